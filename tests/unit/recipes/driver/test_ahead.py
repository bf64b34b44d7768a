"""Running ahead: order, staleness, failures and checkpoints of the batches that are drawn one step early."""

import json
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from rlpack.batch.store import LocalStore
from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.schema import Rollout, Trainer
from rlpack.distributed.errors import RoleError
from rlpack.observe.errors import MetricError
from rlpack.observe.report.step_times import StepTimes
from rlpack.packing import Batching
from rlpack.recipes.driver import ahead
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch, as_scored
from rlpack.recipes.driver.engine_weights import sync_weights
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.errors import StalenessError
from tests.unit.recipes.driver.sessions import AnsweringGroup, SavingSession, run_of, session_of

PROMPTS = 3


class Engines:
    """Engines that sample a few tokens per prompt, each with the version that is loaded at that moment."""

    def __init__(self, session: Session, *, seed: int = 0, delay_s: float = 0.0, draws_once: bool = False) -> None:
        self.session, self.random, self.delay_s, self.draws_once = session, random.Random(seed), delay_s, draws_once
        self.weights = session.__dict__["rollout_weights"] = SimpleNamespace(version=1, keeps=False)
        self.threads: list[str] = []
        self.drawn: list[tuple[int, int]] = []  # step and first prompt of each draw

    def pause(self) -> None:
        if self.delay_s:
            time.sleep(self.random.random() * self.delay_s)

    def draw(self, session: Session, step: StepContext) -> Batch:
        start = step.progress.prompts_consumed
        # With dynamic sampling, steps take different numbers of prompts.
        count = PROMPTS if self.draws_once else PROMPTS + start % 2
        self.drawn.append((step.number, start))
        self.threads.append(threading.current_thread().name)
        versions = []
        for _ in range(4):
            self.pause()
            versions.append(self.weights.version)
        step.advance(prompts_consumed=start + count)
        step.metrics["prompts_consumed"] = start + count
        rows = {
            "policy_version": Ragged(torch.tensor(versions, dtype=torch.int32), torch.tensor([3, 1])),
            "prompt": [f"prompt {start}", f"prompt {start + 1}"],
            "rewards": torch.tensor([0.1 * start, 1.0]),
        }
        return Batch(BatchedDataDict(rows), as_scored)

    def publish(self, session: Session, step: StepContext) -> None:
        """Stand in for `sync_weights`; now and then a step changes no weights."""
        if self.random.random() < 0.9:
            self.weights.version += 1
            self.pause()


def session_ahead(folder: Path, *, steps: int, lead: int = 1) -> SavingSession:
    return session_of(folder, trainer=Trainer(steps=steps, lead=lead))


def session_in_flight(folder: Path, **trainer: Any) -> SavingSession:
    return session_of(folder, trainer=Trainer(steps=3, **trainer), rollout=Rollout(engine="vllm", publish="in_flight"))


def walk(session: Session, queue: AheadQueue, engines: Engines) -> list[tuple[int, int, int, int]]:
    """Run all steps; return each step's number, first prompt, and its oldest and newest lag."""
    taken = []
    for step in session.steps("train", session.config.trainer.steps):
        rollouts, score = queue.take(step)
        rollouts = score(step, rollouts)
        first = int(rollouts["prompt"][0].split()[1])
        lags = engines.weights.version - rollouts["policy_version"].values
        taken.append((step.number, first, int(lags.max()), int(lags.min())))
        engines.pause()
        queue.publish(step)
    return taken


@pytest.fixture
def publications(monkeypatch: pytest.MonkeyPatch):
    """Let `publish` of the engines under test stand in for the transfer of weights."""

    def use(engines: Engines) -> Engines:
        monkeypatch.setattr(ahead, "sync_weights", engines.publish)
        return engines

    return use


@pytest.mark.parametrize("lead", [0, 1])
def test_every_prompt_is_trained_on_once_in_order_and_no_token_is_staler_than_the_lead(
    tmp_path: Path, publications: Any, lead: int
):
    steps = 2000
    session = session_ahead(tmp_path, steps=steps, lead=lead)
    engines = publications(Engines(session, delay_s=1e-4))
    taken = walk(session, AheadQueue(session, engines.draw), engines)
    assert [number for number, *_ in taken] == list(range(1, steps + 1))
    position = 0
    for _, first, _, _ in taken:
        assert first == position
        position += PROMPTS + position % 2
    assert session.progress.prompts_consumed == position
    assert len(engines.drawn) == steps  # nothing was drawn and then dropped
    assert max(oldest for *_, oldest, _ in taken) == lead
    assert all(oldest == newest for *_, oldest, newest in taken)  # no batch has tokens of two versions


@pytest.mark.parametrize("lead", [0, 1])
def test_a_draw_that_returns_no_batch_is_named(tmp_path: Path, lead: int):
    session = session_ahead(tmp_path, steps=1, lead=lead)
    engines = Engines(session)

    def draw_rows(session: Session, step: StepContext) -> Any:
        return engines.draw(session, step).rollouts

    queue = AheadQueue(session, draw_rows)
    with pytest.raises(TypeError, match=r"draw_rows of .* returned BatchedDataDict; return Batch\(rollouts, score\)"):
        walk(session, queue, engines)


@pytest.mark.parametrize("lead", [0, 1])
def test_a_step_that_updates_the_actor_and_publishes_nothing_ends_the_run(tmp_path: Path, publications: Any, lead: int):
    session = session_ahead(tmp_path, steps=3, lead=lead)
    engines = publications(Engines(session))
    session.engine_access.optimizer_steps = 4  # of the warm-up, which was published
    session.progress = Progress(optimizer_steps=4)
    queue = AheadQueue(session, engines.draw)

    def train() -> None:
        for step in session.steps("train", 3):
            queue.take(step)
            step.advance(optimizer_steps=6)

    said = r"step 1 of train ended without .* taken 6 .* after 4 .* batches\.publish\(step\)"
    with pytest.raises(ValueError, match=said):
        train()
    assert session.progress.step == 1


def test_weights_may_be_published_without_naming_the_step(tmp_path: Path):
    session = session_ahead(tmp_path, steps=2, lead=0)
    engines = Engines(session)
    engines.weights.publish = lambda canary: 0.0
    session.groups["rollout"] = cast(Any, AnsweringGroup("rollout", Batching(), {}))
    queue = AheadQueue(session, engines.draw)
    sync_weights(session)
    for step in session.steps("train", 2):
        queue.take(step)
        step.advance(optimizer_steps=step.number)
        sync_weights(session)
    assert session.engine_access.optimizer_steps == 2


def test_the_next_batch_is_drawn_while_the_step_trains(tmp_path: Path, publications: Any):
    session = session_ahead(tmp_path, steps=3)
    engines = publications(Engines(session))
    queue = AheadQueue(session, engines.draw)
    began = threading.Event()

    def draw(session: Session, step: StepContext) -> Batch:
        if step.number > 1:
            assert began.wait(30.0), "the step trains only once the next batch is drawn"
            began.clear()
        return engines.draw(session, step)

    queue._draw_batch = draw
    for step in session.steps("train", 3):
        queue.take(step)
        assert [begun.is_drawn for begun in queue._waiting] == [False] * (step.number < 3)
        began.set()
        queue.publish(step)
        assert all(begun.is_drawn for begun in queue._waiting)
    assert engines.threads == ["MainThread", "draw", "draw"]


def test_the_trainer_is_idle_while_the_first_batch_is_drawn(tmp_path: Path, publications: Any):
    session = session_ahead(tmp_path, steps=1)
    engines = publications(Engines(session))

    def draw(session: Session, step: StepContext) -> Batch:
        time.sleep(0.3)
        return engines.draw(session, step)

    walk(session, AheadQueue(session, draw), engines)
    (record,) = run_of(session).records
    assert record["time/wait_s"] >= 0.3
    assert 0.5 < record["perf/trainer_idle_share"] <= 1.0


def test_only_lags_that_occur_have_a_metric(tmp_path: Path, publications: Any):
    session = session_in_flight(tmp_path, lead=64, prompts_per_step=PROMPTS)
    engines = publications(Engines(session, draws_once=True))
    walk(session, AheadQueue(session, engines.draw), engines)
    for record in run_of(session).records:
        shares = {name: value for name, value in record.items() if name.startswith("rollout/lag_share/")}
        assert set(shares) == {f"rollout/lag_share/{lag}" for lag in range(3)}
        assert sum(shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("count", [PROMPTS - 1, PROMPTS + 1])
def test_a_draw_that_takes_other_prompts_than_the_next_batch_expects_ends_the_run(
    tmp_path: Path, publications: Any, count: int
):
    session = session_in_flight(tmp_path, lead=2, prompts_per_step=count)
    engines = publications(Engines(session, draws_once=True))
    with pytest.raises(ValueError, match=rf"step 1 took {PROMPTS} prompts, .*prompts_per_step = {count}; draw that"):
        walk(session, AheadQueue(session, engines.draw), engines)
    assert run_of(session).records == []


def test_versions_are_read_as_a_batch_is_drawn_before_an_evaluation_or_a_draw_occupies_the_engines(
    tmp_path: Path, publications: Any
):
    session = session_ahead(tmp_path, steps=4)
    queue = AheadQueue(session, publications(Engines(session)).draw)
    read: list[str] = []

    class WatchedStore(LocalStore):
        def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
            if set(batch) == {"policy_version"}:
                read.append(threading.current_thread().name)
            return super().fetch(batch)

    session.store = WatchedStore()
    for step in session.steps("train", 4):
        queue.take(step)
        queue.publish(step)
    assert read == ["MainThread", "draw", "draw", "draw"]  # a first batch is drawn by the step itself


def test_a_step_logs_the_metrics_of_its_own_batch_and_commits_its_position(tmp_path: Path, publications: Any):
    session = session_ahead(tmp_path, steps=3)
    engines = publications(Engines(session))
    walk(session, AheadQueue(session, engines.draw), engines)
    trained = [
        r for r, (phase, _) in zip(run_of(session).records, run_of(session).logged, strict=True) if phase == "train"
    ]
    assert [record["prompts_consumed"] for record in trained] == [3, 7, 11]


@pytest.mark.parametrize(
    ("lead", "parts", "meanwhile"),
    [
        (0, {"generate", "recipe/revise", "other"}, set()),
        (1, {"wait", "drain", "recipe/revise", "other"}, {"generate", "draw/recipe/revise"}),
    ],
)
def test_a_report_tells_what_a_recipe_measures_in_a_draw_from_what_it_measures_in_a_step(
    tmp_path: Path, publications: Any, lead: int, parts: set[str], meanwhile: set[str]
):
    session = session_ahead(tmp_path, steps=3, lead=lead)
    engines = publications(Engines(session))

    def draw(session: Session, step: StepContext) -> Batch:
        with step.timer("generate"), step.timer("recipe/revise"):
            time.sleep(0.01)
        return engines.draw(session, step)

    queue = AheadQueue(session, draw)
    for step in session.steps("train", 3):
        queue.take(step)
        with step.timer("recipe/revise"):
            time.sleep(0.05)
        queue.publish(step)
    records = [
        {"phase": phase, "time_s": 0.0, **one}
        for one, (phase, _) in zip(run_of(session).records, run_of(session).logged, strict=True)
    ]
    times = StepTimes.of(records)
    assert times.parts.keys() | {"other"} == parts
    assert times.meanwhile.keys() == meanwhile
    in_steps_s = 3 * 0.05 if lead else 3 * (0.05 + 0.01)
    assert times.parts["recipe/revise"] >= in_steps_s


def test_a_failed_draw_ends_the_run_once_the_step_before_its_own_is_logged(tmp_path: Path, publications: Any):
    session = session_ahead(tmp_path, steps=5)
    engines = publications(Engines(session))

    def draw(session: Session, step: StepContext) -> Batch:
        if step.number == 3:
            raise RoleError("rollout", 0, "generate", "died")
        return engines.draw(session, step)

    session.config.__dict__["checkpoint"] = session.config.checkpoint.model_copy(update={"every": 2})
    with pytest.raises(RoleError, match=r"role rollout, rank 0, in generate, step 3 of train: died"):
        walk(session, AheadQueue(session, draw), engines)
    assert session.progress.step == 2
    assert run_of(session).logged == [("train", 1), ("train", 2)]
    assert engines.weights.version == 2  # nothing was published for a batch that nobody draws
    assert session.saved == ()  # a checkpoint of step 2 would lack batch 3


def test_a_step_that_failed_gets_the_same_batch_again(tmp_path: Path, publications: Any):
    session = session_ahead(tmp_path, steps=3)
    engines = publications(Engines(session))
    queue = AheadQueue(session, engines.draw)
    seen: list[list[str]] = []

    def train(fail: bool) -> None:
        for step in session.steps("train", 3):
            seen.append(queue.take(step).rollouts["prompt"])
            if fail and step.number == 2:
                raise RuntimeError
            queue.publish(step)

    with pytest.raises(RuntimeError):
        train(fail=True)
    train(fail=False)
    assert [rows[0] for rows in seen] == ["prompt 0", "prompt 3", "prompt 3", "prompt 7"]
    assert session.progress.prompts_consumed == 11


@pytest.mark.parametrize("versions", [[5, 7, 7], [7, 7, 9]])
def test_a_token_that_is_too_old_or_from_the_future_ends_the_run(
    tmp_path: Path, publications: Any, versions: list[int]
):
    session = session_ahead(tmp_path, steps=2)
    engines = publications(Engines(session))
    engines.weights.version = 8

    def draw(session: Session, step: StepContext) -> Batch:
        tokens = Ragged(torch.tensor([-1, *versions], dtype=torch.int32), torch.tensor([4]))
        return Batch(BatchedDataDict({"policy_version": tokens}), as_scored)

    with pytest.raises(
        StalenessError, match=rf"step 1 has tokens of the policy versions {versions[0]} to {versions[2]}; .* 7 to 8"
    ):
        walk(session, AheadQueue(session, draw), engines)


@pytest.mark.parametrize("keeps", [False, True])
def test_engines_that_fail_while_the_actor_trains_get_kept_weights_or_end_the_run(
    tmp_path: Path, publications: Any, monkeypatch: pytest.MonkeyPatch, keeps: bool
):
    session = session_ahead(tmp_path, steps=3)
    engines, replaced = publications(Engines(session)), list[str]()
    engines.weights.keeps = keeps
    session.groups["rollout"] = cast(Any, AnsweringGroup("rollout", Batching(), {}))
    monkeypatch.setattr(session, "replace_engines", lambda: replaced.append(threading.current_thread().name))

    def draw(session: Session, step: StepContext) -> Batch:
        if step.number == 2:
            time.sleep(0.1)  # by now the queue knows this thread's call
            assert session.renew_engines(0, True)
        return engines.draw(session, step)

    if keeps:
        walk(session, AheadQueue(session, draw), engines)
        assert replaced == ["draw"]
        return
    with pytest.raises(RoleError, match="the weights that this batch or evaluation began with are gone; resume"):
        walk(session, AheadQueue(session, draw), engines)


def test_columns_that_no_checkpoint_could_hold_are_refused_at_the_first_step(tmp_path: Path, publications: Any):
    session = session_ahead(tmp_path, steps=3)
    engines = publications(Engines(session))

    def draw(session: Session, step: StepContext) -> Batch:
        batch = engines.draw(session, step)
        batch.rollouts["answer"] = [object(), object()]
        return batch

    with pytest.raises(DataError, match="column 'answer' has an entry of type object"):
        walk(session, AheadQueue(session, draw), engines)
    assert session.progress.step == 0


def test_a_queue_that_has_ended_begins_nothing_and_reports_no_draw_that_fails(
    tmp_path: Path, publications: Any, caplog: pytest.LogCaptureFixture
):
    session = session_ahead(tmp_path, steps=5)
    engines, stopped = publications(Engines(session)), threading.Event()

    def draw(session: Session, step: StepContext) -> Batch:
        if step.number == 2:
            assert stopped.wait(30.0)
            raise RoleError("rollout", 0, "generate", "its process was stopped")
        return engines.draw(session, step)

    queue = AheadQueue(session, draw)
    for step in session.steps("train", 5):
        queue.take(step)
        break
    queue.end()
    stopped.set()
    with pytest.raises(RoleError, match="stopped"):
        queue.drain()
    queue._begin_until(5)
    assert [begun.context.number for begun in queue._waiting] == [2]
    assert caplog.text == ""
    with pytest.raises(AssertionError, match="has ended"):
        queue.take(session.begin_step(2))


def stopped_after(folder: Path, steps: int, publications: Any) -> Path:
    """Return the checkpoint folder of a run of five steps that ended after the given one."""
    session = session_ahead(folder, steps=5)
    engines = publications(Engines(session))
    queue = AheadQueue(session, engines.draw)
    for step in session.steps("train", 5):
        queue.take(step)
        queue.publish(step)
        if step.number == steps:
            break
    (folder / f"step-{steps}").mkdir()
    queue.save(folder / f"step-{steps}")
    return folder / f"step-{steps}"


def test_a_resumed_run_trains_on_the_batch_in_its_checkpoint_and_draws_on_from_there(tmp_path: Path, publications: Any):
    checkpoint = stopped_after(tmp_path, 2, publications)
    session = session_ahead(tmp_path, steps=5)
    engines = publications(Engines(session))
    session.progress = Progress(phase="train", step=2, prompts_consumed=7)
    session.restored = checkpoint
    queue = AheadQueue(session, engines.draw)
    assert engines.weights.version in (1, 2)  # the first publication counts up to the checkpoint's version
    engines.weights.version += 1
    taken = walk(session, queue, engines)
    assert [(number, first) for number, first, *_ in taken] == [(3, 7), (4, 11), (5, 15)]
    assert engines.drawn == [(4, 11), (5, 15)]
    assert taken[0][2] == 1


@pytest.mark.parametrize("damage", ["list", "batch"])
def test_a_damaged_batch_in_a_checkpoint_is_one_error(tmp_path: Path, publications: Any, damage: str):
    checkpoint = stopped_after(tmp_path, 2, publications)
    target = "ahead.json" if damage == "list" else "step-3/lists.json"
    (checkpoint / "ahead" / target).write_text("{}")
    session = session_ahead(tmp_path, steps=5)
    session.restored = checkpoint
    with pytest.raises(CheckpointError, match=r"the batches drawn ahead in .* can't be read"):
        AheadQueue(session, publications(Engines(session)).draw)


@pytest.mark.parametrize("value", [torch.tensor(0.5), "hard"])
def test_metrics_of_a_draw_are_numbers_before_a_checkpoint_holds_them(tmp_path: Path, publications: Any, value: Any):
    session = session_ahead(tmp_path, steps=2)
    engines = publications(Engines(session))

    def draw(session: Session, step: StepContext) -> Batch:
        if step.number == 2:
            step.metrics["recipe/x"] = value
        return engines.draw(session, step)

    queue = AheadQueue(session, draw)
    step = next(session.steps("train", 2))
    queue.take(step)
    (tmp_path / "step-1").mkdir()
    if value == "hard":
        with pytest.raises(MetricError, match="metric 'recipe/x' is 'hard'; a metric is one number"):
            queue.save(tmp_path / "step-1")
        return
    queue.save(tmp_path / "step-1")
    (entry,) = json.loads((tmp_path / "step-1" / "ahead" / "ahead.json").read_text())["batches"]
    assert entry["metrics"]["recipe/x"] == 0.5


def test_a_full_disk_is_one_error(tmp_path: Path, publications: Any):
    session = session_ahead(tmp_path, steps=5)
    queue = AheadQueue(session, publications(Engines(session)).draw)
    with pytest.raises(CheckpointError, match="the batches drawn ahead could not be written"):
        queue.save(tmp_path / "missing" / "step-1")

"""A window for stragglers: simulated engines sample at random; every group is trained on once, within its window."""

import math
import random
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.schema import Rollout, Trainer
from rlpack.distributed.errors import RoleError
from rlpack.recipes.driver import ahead, started_batch
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch
from rlpack.recipes.driver.groups_by_end import MOST_THREADS, GroupsByEnd
from rlpack.recipes.driver.late_groups import mini_batch_rows
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.errors import StalenessError
from rlpack.safe_files import read_object
from tests.unit.recipes.driver.sessions import SavingSession, run_of, session_of, set_group
from tests.unit.recipes.driver.simulated_engines import Ledger, Weights, draw, draw_groups, started, walk
from tests.unit.recipes.driver.test_in_flight_run import KilledRun

PROMPTS, SHARE = 4, 0.5


@pytest.fixture(autouse=True)
def publications(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(session: Session, step: StepContext) -> None:
        cast(Weights, session.rollout_weights).publish(session, step)

    monkeypatch.setattr(ahead, "sync_weights", publish)
    monkeypatch.setattr(started_batch, "LOOK_S", 0.005)


def check(ledger: Ledger, steps: int, lead: int, window: int) -> int:
    """Check that every prompt was trained on once, in its window; return how many were late."""
    late = 0
    for step, positions in ledger.positions.items():
        batches = [1 + position // PROMPTS for position in positions]
        assert all(batch <= step < batch + window for batch in batches)
        assert positions == sorted(positions)
        assert batches.count(step) >= PROMPTS * (1 - SHARE)
        late += sum(batch < step for batch in batches)
    everything = sorted(position for positions in ledger.positions.values() for position in positions)
    assert everything == list(range(PROMPTS * steps))
    assert 0 <= min(ledger.lags) <= max(ledger.lags) <= lead + window - 1
    return late


@pytest.mark.parametrize(("lead", "window"), [(1, 2), (2, 3)])
def test_every_group_is_trained_on_once_within_its_window_though_engines_die(tmp_path: Path, lead: int, window: int):
    steps = 100
    trainer = {"prompts_per_step": PROMPTS, "late_groups": {"window": window, "share": SHARE}}
    session = started(tmp_path, steps=steps, lead=lead, seed=lead, dies=True, delay_s=3e-4, **trainer)
    ledger = Ledger()
    walk(session, ledger, delay_s=2e-3)
    late = check(ledger, steps, lead, window)
    assert late > 0
    records = run_of(session).records
    assert sum(record["rollout/late_groups"] for record in records) == late
    assert records[-1]["rollout/groups_left"] == 0
    # Whether a group is older than the lead depends on time.
    assert max(record["rollout/lag"] for record in records) == max(ledger.lags)
    assert [record["perf/trainer_idle_share"] >= 0 for record in records] == [True] * steps
    assert session.engine_access.load.in_flight == dict.fromkeys(range(2), 0)
    assert threading.active_count() < 20


def test_runs_killed_at_any_moment_train_on_every_group_once_within_its_window(tmp_path: Path):
    steps, lead, window, kills = 40, 2, 3, random.Random(3)
    trainer = {"prompts_per_step": PROMPTS, "late_groups": {"window": window, "share": SHARE}}
    committed: list[tuple[Progress, Path]] = [(Progress(phase="train"), tmp_path)]
    ledger, runs, held, is_completed = Ledger(), 0, 0, False
    while not is_completed:
        folder = tmp_path / f"run-{runs}"
        folder.mkdir()
        session = started(folder, steps=steps, lead=lead, seed=runs, delay_s=2e-4, checkpoint_every=2, **trainer)
        is_completed = KilledRun(session, committed, kills.randrange(3, 12)).is_completed(ledger)
        held += sum(1 for _ in committed[-1][1].glob("ahead/step-*"))
        runs += 1
    assert runs > 15
    assert held > 0, "no checkpoint held a late group"
    check(ledger, steps, lead, window)


class ManualGroups:
    """Ends groups when the test says so; group g of batch b has uid 10·b + g."""

    def __init__(self, folder: Path, *, steps: int, window: int, **trainer: Any) -> None:
        settings = {
            "steps": steps,
            "lead": 1,
            "prompts_per_step": PROMPTS,
            "late_groups": {"window": window, "share": SHARE},
        } | trainer
        rollout = Rollout(engine="vllm", publish="in_flight")
        self.session: SavingSession = session_of(folder, trainer=Trainer(**settings), rollout=rollout)
        self.weights = self.session.__dict__["rollout_weights"] = cast(Any, ManualWeights())
        self.changed = threading.Condition()
        self.allowed: set[int] = set()
        self.left_out: set[int] = set()  # by batching, so that no role scores them
        self.queue = AheadQueue(self.session, draw, self.draw_groups)

    def allow(self, *uids: int) -> None:
        with self.changed:
            self.allowed.update(uids)
            self.changed.notify_all()

    def draw_groups(self, session: Session, step: StepContext, on_groups: Any) -> None:
        step.advance(prompts_consumed=step.progress.prompts_consumed + PROMPTS)
        version, left = self.weights.version, {10 * step.number + group for group in range(PROMPTS)}
        while left:
            with self.changed:
                assert self.changed.wait_for(lambda left=left: left & self.allowed, timeout=30.0)
                ended = sorted(left & self.allowed)
            for uid in ended:
                columns = {
                    "policy_version": Ragged.from_rows([torch.tensor([version], dtype=torch.int32)], torch.int32),
                    "uid": [str(uid)],
                    "group_ids": torch.tensor([uid % 10]),
                    "response_lengths": torch.tensor([1]),
                    "finish_reason": ["stop"],
                    "rewards": torch.tensor([float(uid)]),
                    "valid": torch.tensor([uid not in self.left_out]),
                    "level": torch.tensor([0.0 if uid in self.left_out else uid]),
                }
                on_groups(Batch(BatchedDataDict(columns, row_ids=[uid % 10]), one_timeout))
            left = left - set(ended)
        step.metrics["perf/group_wait_s"] = 0.25


def test_a_recipe_with_its_own_draw_has_to_draw_late_groups_itself(tmp_path: Path):
    session = started(tmp_path, steps=2, lead=1, late_groups={"window": 2, "share": SHARE})
    with pytest.raises(TypeError, match="the recipe's draw isn't called; pass draw_groups"):
        AheadQueue(session, draw)


def one_timeout(step: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
    step.metrics["reward/timeouts"] = 1.0
    return rollouts


class ManualWeights:
    version = 1

    def publish(self, session: Session, step: StepContext) -> None:
        self.version += 1


def test_groups_that_no_role_scored_have_the_types_of_the_others(tmp_path: Path):
    groups = ManualGroups(tmp_path, steps=2, window=2)
    groups.left_out = {10, 21}
    groups.allow(10, 11, 12, 20, 21, 22, 23)
    taken = {}
    for step in groups.session.steps("train", 2):
        if step.number == 2:
            groups.allow(13)
        rollouts = groups.queue.take(step).rollouts
        taken |= {int(uid): level for uid, level in zip(rollouts["uid"], rollouts["level"].tolist(), strict=True)}
        assert rollouts["level"].dtype == torch.int64
        groups.queue.publish(step)
    assert taken == {uid: 0 if uid in groups.left_out else uid for uid in (*range(10, 14), *range(20, 24))}


def test_a_step_takes_what_has_ended_and_waits_for_groups_whose_window_closes(tmp_path: Path):
    groups = ManualGroups(tmp_path, steps=4, window=2)
    groups.allow(12, 10, 20, 21, 22)
    taken = {}
    for step in groups.session.steps("train", 4):
        if step.number == 2:  # 11 has ended in time for the second step, 13 has to
            groups.allow(11)
            threading.Timer(0.05, groups.allow, [13]).start()
        if step.number == 3:
            threading.Timer(0.05, groups.allow, [30, 31, 32, 33, 23]).start()
        if step.number == 4:  # the last
            groups.allow(40, 41)
            threading.Timer(0.05, groups.allow, [42, 43]).start()
        rollouts = groups.queue.take(step).rollouts
        assert rollouts is groups.queue.take(step).rollouts, "a step that is run again gets the same rows"
        taken[step.number] = [int(uid) for uid in rollouts["uid"]]
        assert rollouts["group_ids"].unique().numel() == rollouts.num_rows
        assert step.metrics["reward/mean"] == pytest.approx(sum(taken[step.number]) / len(taken[step.number]))
        groups.queue.publish(step)
    assert taken[1] == [10, 12]
    assert taken[2][:2] == [11, 13]
    assert set(taken[2][2:]) <= {20, 21, 22}
    assert sorted(taken[2] + taken[3] + taken[4])[2:] == [*range(20, 24), *range(30, 34), *range(40, 44)]
    records = run_of(groups.session).records
    assert [record["rollout/late_groups"] for record in records][:2] == [0.0, 2.0]
    assert [record["rollout/groups_left"] for record in records][0::3] == [2.0, 0.0]
    # What is counted for a group, or for a whole batch, is in one step's metrics.
    assert sum(record.get("reward/timeouts", 0.0) for record in records) == 4 * PROMPTS
    assert sum(record.get("perf/group_wait_s", 0.0) for record in records) == 4 * 0.25
    assert all(("time/reward_s" in record) == ("perf/group_wait_s" in record) for record in records)


@pytest.mark.parametrize(("group_size", "mini_batch"), [(8, 64), (4, 12), (1, 10), (8, 256)])
def test_a_batch_with_more_or_fewer_groups_has_about_as_many_optimizer_steps_of_similar_size(
    group_size: int, mini_batch: int
):
    trainer = Trainer(prompts_per_step=32, group_size=group_size, mini_batch_size=mini_batch)
    usual = -(-32 * group_size // mini_batch)
    for groups in range(16, 65):
        rows = groups * group_size
        size = mini_batch_rows(trainer, rows)
        assert size is not None
        if groups == 32:
            assert size == mini_batch
            continue
        assert size % group_size == 0, "the responses of a prompt are in one optimizer step"
        steps, last = -(-rows // size), (rows - 1) % size + 1
        assert usual / 2 <= steps <= 1.5 * usual
        assert last >= size / 5
    assert mini_batch_rows(Trainer(prompts_per_step=32), 33 * 8) is None


def test_mini_batches_follow_the_number_of_groups_that_a_step_takes(tmp_path: Path):
    groups = ManualGroups(tmp_path, steps=3, window=2, group_size=1, mini_batch_size=2)
    actor, reward = (set_group(groups.session, name) for name in ("actor", "reward"))
    actor.mini_batch_size = 2
    groups.allow(10, 11)
    sizes = set()
    for step in groups.session.steps("train", 3):
        if step.number == 2:
            groups.allow(12, 13, 20, 21, 22, 23, 30, 31, 32, 33)
        rows = groups.queue.take(step).rollouts.num_rows
        assert actor.mini_batch_size == math.ceil(rows / 2), "a batch has two optimizer steps"
        assert reward.mini_batch_size is None
        sizes.add(rows)
        groups.queue.publish(step)
    assert sizes != {PROMPTS}


def test_late_groups_that_are_too_old_end_the_run(tmp_path: Path):
    groups = ManualGroups(tmp_path, steps=4, window=2)
    groups.allow(10, 11, 12, 20, 21, 22, 23)

    def run() -> None:
        for step in groups.session.steps("train", 4):
            groups.queue.take(step)
            groups.weights.version = 10
            groups.allow(13)

    with pytest.raises(StalenessError, match=r"lead=1 and trainer.late_groups.window=2 they have to be from 8 to 10"):
        run()


def test_a_group_that_can_not_be_scored_fails_its_step(tmp_path: Path):
    groups = ManualGroups(tmp_path, steps=2, window=2)

    def fail(step: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
        raise RoleError("reward", 0, "score", "it died")

    def draw_one(session: Session, step: StepContext, on_groups: Any) -> None:
        on_groups(Batch(BatchedDataDict({"uid": ["1"]}), fail))

    groups.queue = AheadQueue(groups.session, draw, draw_one)
    with pytest.raises(RoleError, match="it died"):
        groups.queue.take(next(groups.session.steps("train", 2)))


class YieldingLock:
    """A lock that the main thread gets whenever a thread that scores releases it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()
        if threading.current_thread().name == "score":
            time.sleep(0.1)


def groups_by_end(folder: Path) -> GroupsByEnd:
    return GroupsByEnd(session_of(folder).begin_step(1))


def one_group(number: int) -> BatchedDataDict:
    columns = {"group_ids": torch.tensor([number]), "rewards": torch.ones(1), "valid": torch.tensor([True])}
    return BatchedDataDict(columns, row_ids=[number])


def test_whoever_has_the_last_group_has_its_counts(tmp_path: Path):
    groups = groups_by_end(tmp_path)
    groups._changed = threading.Condition(cast(Any, YieldingLock()))
    groups.add(Batch(one_group(0), one_timeout))
    assert groups.wait(1, timeout_s=10.0)
    assert groups.pop() is not None
    assert groups.pop_counts() == {"reward/timeouts": 1.0}


def test_the_first_failure_of_scoring_is_raised_whatever_follows_from_it(tmp_path: Path):
    groups, has_failed = groups_by_end(tmp_path), threading.Event()

    def fail(step: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
        raise RoleError("judge", 0, "score", "the key was rejected")

    def die(step: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
        assert has_failed.wait(30.0)
        raise RoleError("judge", 1, "score", "the process died")

    groups.add(Batch(one_group(0), die))
    groups.add(Batch(one_group(1), fail))
    with pytest.raises(RoleError, match="the key was rejected"):
        groups.all_scored()
    has_failed.set()
    deadline = time.monotonic() + 30.0
    while groups._num_threads and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RoleError, match="the key was rejected"):
        groups.all_scored()


def test_few_threads_wait_for_many_slow_scores(tmp_path: Path):
    groups, go_on = groups_by_end(tmp_path), threading.Event()

    def slow(step: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
        assert go_on.wait(30.0)
        return one_timeout(step, rollouts)

    before = threading.active_count()
    for number in range(300):
        groups.add(Batch(one_group(number), slow))
    assert threading.active_count() <= before + MOST_THREADS
    go_on.set()
    assert groups.all_scored().row_ids.tolist() == list(range(300))
    assert groups.pop_counts() == {"reward/timeouts": 300.0}


def test_failures_and_times_of_late_groups_in_a_checkpoint_are_those_of_the_resumed_run(tmp_path: Path):
    groups = ManualGroups(tmp_path, steps=4, window=2)
    groups.allow(10, 11)
    step = next(groups.session.steps("train", 4))
    groups.queue.take(step)
    assert step.metrics["reward/timeouts"] == 2.0
    groups.session.progress = step.progress
    groups.allow(12, 13)
    (tmp_path / "step-1").mkdir()
    groups.queue.save(tmp_path / "step-1")
    (saved, _) = read_object(tmp_path / "step-1/ahead/ahead.json")["batches"]
    resumed = ManualGroups(tmp_path, steps=4, window=2)
    resumed.session.restored, resumed.session.progress = tmp_path / "step-1", step.progress
    resumed.queue = AheadQueue(resumed.session, draw, resumed.draw_groups)
    resumed.weights.version += 1
    resumed.allow(20, 21)  # counts of others might come before their groups
    second = next(resumed.session.steps("train", 4))
    assert list(resumed.queue.take(second).rollouts["uid"]) == ["12", "13", "20", "21"]
    assert second.metrics["reward/timeouts"] == 4.0
    assert second.metrics["time/reward_s"] == saved["metrics"]["time/reward_s"] > 0
    resumed.allow(22, 23)


def test_late_groups_in_a_checkpoint_are_refused_if_they_are_too_late_for_the_window(tmp_path: Path):
    groups = ManualGroups(tmp_path, steps=4, window=2)
    groups.allow(10, 11, 20, 21, 22, 23)
    for step in groups.session.steps("train", 4):
        groups.queue.take(step)
        groups.session.progress = step.progress
        break
    threading.Timer(0.05, groups.allow, [12, 13]).start()  # the checkpoint waits for them
    (tmp_path / "step-1").mkdir()
    groups.queue.save(tmp_path / "step-1")
    batches = read_object(tmp_path / "step-1/ahead/ahead.json")["batches"]
    assert [(one["step"], one["start"], one["is_drawn"]) for one in batches] == [(1, 0, True), (2, PROMPTS, False)]
    session = groups.session
    session.restored = tmp_path / "step-1"
    session.config.trainer.late_groups.__dict__["window"] = 1
    with pytest.raises(
        CheckpointError, match=r"window is 1, and .* takes 1 steps late; .* trainer\.late_groups\.window=2"
    ):
        AheadQueue(session, draw, draw_groups)

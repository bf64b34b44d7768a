"""A session's own work: steps, progress, checkpoints and interruption."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.checkpoint.commit import load_state, newest
from rlpack.config.schema import Checkpoint, Evaluation, Trainer
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching
from rlpack.recipes.driver.dynamic_sampling import sample_informative_groups
from rlpack.recipes.driver.exports import export_models
from rlpack.recipes.driver.resume import LoadedCheckpoint
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.testing.local_ranks import LocalRanks
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.sessions import RecordingRun, SavingSession, run_of, session_of, set_group


def walk(session: Session, total: int) -> None:
    for _ in session.steps("train", total, lambda session, step: None):
        pass


@pytest.mark.parametrize(
    ("interrupt_at", "logged", "saved"),
    [
        (0, [], ()),
        (1, [("evaluation", 0)], ()),
        (2, [("evaluation", 0), ("train", 1)], (1,)),
        (3, [("evaluation", 0), ("train", 1), ("train", 2)], (2,)),  # the evaluation is left to a resumed run
        (4, [("evaluation", 0), ("train", 1), ("train", 2), ("evaluation", 2)], (2,)),
    ],
)
def test_ctrl_c_ends_a_run_at_once_and_saves_finished_steps(
    tmp_path: Path, interrupt_at: int, logged: list[tuple[str, int]], saved: tuple[int, ...]
):
    session = session_of(tmp_path, interrupt_at)
    with pytest.raises(KeyboardInterrupt):
        walk(session, 2)
    assert (run_of(session).logged, session.saved) == (logged, saved)


def test_ctrl_c_while_a_state_is_copied_waits_for_its_checkpoint(tmp_path: Path):
    session, calls = session_of(tmp_path), []

    class Writer:
        def finish(self) -> None:
            calls.append("finish")

    session.checkpoints = Writer()
    session.run.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        session.stop_if_interrupted()
    assert calls == ["finish"]


class SignalledRun(RecordingRun):
    """Ctrl-C comes right after the run has looked `at` times whether it came."""

    def __init__(self, directory: Path, at: int) -> None:
        self.looks, self.at = 0, at
        super().__init__(directory)

    @property
    def interrupted(self) -> bool:
        self.looks += 1
        return self.looks > self.at

    @interrupted.setter
    def interrupted(self, value: bool) -> None: ...


@pytest.mark.parametrize("at", range(20))
def test_the_last_step_is_saved_whenever_ctrl_c_comes(tmp_path: Path, at: int):
    session = session_of(tmp_path)
    session.run = cast(Any, SignalledRun(tmp_path, at))
    with suppress(KeyboardInterrupt):
        walk(session, 3)
    assert session.saved == ((session.progress.step,) if session.progress.step else ())


def test_a_run_has_begun_with_its_first_step(tmp_path: Path):
    session = session_of(tmp_path)
    session.run.has_begun = False
    session.begin_step(1)
    assert session.run.has_begun


def test_a_recipe_that_reports_no_plan_runs_and_every_step_is_known(tmp_path: Path):
    session = session_of(tmp_path)
    assert session.step is None
    assert [step.number for step in session.steps("train", 3)] == [1, 2, 3]
    assert session.step is not None
    assert (session.step.number, session.saved) == (3, (3,))


def test_skipped_steps_are_not_counted_as_optimizer_steps(tmp_path: Path):
    session = session_of(tmp_path)
    step = session.begin_step(1)
    step.record_optimizer_steps(
        [{"actor/skipped_steps": 0.0}, {"actor/skipped_steps": 1.0}, {"actor/skipped_steps": 0.0}]
    )
    assert step.progress.optimizer_steps == 2
    assert step.metrics == {"optimizer_steps": 2, "sft_warmup/skipped_steps": 1.0}


def test_optimizer_steps_without_a_token_do_not_enter_means(tmp_path: Path):
    step = session_of(tmp_path).begin_step(1)
    step.advance(phase="train")
    with_tokens = {"actor/entropy": 2.0, "actor/ratio_max": 1.5, "actor/skipped_steps": 0.0}
    without = {"actor/entropy": 0.0, "actor/ratio_max": 0.0, "actor/skipped_steps": 1.0}
    step.record_optimizer_steps([without, with_tokens], [False, True])
    expected = {"actor/entropy": 2.0, "actor/ratio_max": 1.5, "actor/skipped_steps": 1.0}
    assert step.metrics == expected | {"optimizer_steps": 1}
    step.record_optimizer_steps([without], [False])
    assert step.metrics["actor/entropy"] == 0.0


@pytest.mark.parametrize(("recipe", "trained"), [("grpo", ["actor"]), ("ppo", ["actor", "critic"])])
def test_roles_that_the_recipe_trains_and_no_others_are_saved_loaded_and_exported(
    tmp_path: Path, recipe: str, trained: list[str]
):
    session = session_of(tmp_path, recipe=recipe)
    calls: list[tuple[str, str, Path]] = []

    def record(role: str, method: str) -> Callable[[str], None]:
        def called(folder: str) -> None:
            Path(folder).mkdir(exist_ok=True)
            calls.append((role, method, Path(folder)))

        return called

    for name in ("actor", "rollout", "critic", "judge"):
        methods: dict[str, Any] = {method: record(name, method) for method in ("save", "load", "export_model")}
        set_group(session, name, **methods)
    Session.save(session)
    (folder,) = (tmp_path / "checkpoints").glob("*/step-0")
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(trained)
    calls.clear()
    session.restore(LoadedCheckpoint(folder, load_state(folder)), evaluation_is_due=False)
    assert calls == [(name, "load", folder / name) for name in trained]
    calls.clear()
    export_models(session)
    folders = {"actor": tmp_path / "model", "critic": tmp_path / "critic_model"}
    assert [(name, method) for name, method, _ in calls] == [(name, "export_model") for name in trained]
    assert not any(folder.exists() for _, _, folder in calls)  # renamed when they are complete
    for name in trained:
        assert (folders[name] / "tokenizer.json").exists()
        assert (folders[name] / "COMMITTED").exists()


def sampling_session(folder: Path) -> Session:
    """Return a session whose rewards are a function of the sampling seeds alone."""
    session = session_of(folder, recipe="dapo", trainer=Trainer(prompts_per_step=3, group_size=2))

    def generate(prompts: BatchedDataDict, params: object) -> BatchedDataDict:
        responses = tiny_rollouts([(3, 4)] * prompts.num_rows).drop(["group_ids", "uid"])
        texts = [str(seed) for seed in prompts["seeds"].tolist()]
        return prompts.keep(["group_ids", "uid"]).union({**responses, "completion": texts})

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        rewards = torch.tensor([int(text) % 1000 / 1000 for text in batch["completion"]])
        return batch.keep([]).union({"rewards": rewards, "quarantined": torch.zeros(len(rewards), dtype=torch.bool)})

    set_group(session, "rollout", generate=generate)
    set_group(session, "reward", score=score)
    return session


def take_steps(session: Session, fails_at: int | None = None) -> None:
    for step in session.steps("train", 3):
        sample_informative_groups(session, step, max_rounds=8)
        step.record_optimizer_steps([{"actor/skipped_steps": 0.0}])
        if step.number == fails_at:
            raise ValueError("failed midway")


def test_a_step_that_fails_midway_commits_nothing_and_is_repeated_with_the_same_random_numbers(tmp_path: Path):
    disturbed, undisturbed = sampling_session(tmp_path), sampling_session(tmp_path)
    take_steps(undisturbed)
    with pytest.raises(ValueError, match="failed midway"):
        take_steps(disturbed, fails_at=2)
    assert (disturbed.progress.step, disturbed.progress.optimizer_steps) == (1, 1)
    assert disturbed.progress.prompts_consumed == run_of(undisturbed).records[0]["prompts_consumed"]
    take_steps(disturbed)
    assert without_times(run_of(disturbed)) == without_times(run_of(undisturbed))
    assert disturbed.progress == undisturbed.progress


@pytest.mark.parametrize(
    ("kind", "at"), [("evaluation", 0), ("evaluation", 2), ("evaluation", 3), ("checkpoint", 2), ("checkpoint", 3)]
)
def test_an_evaluation_or_checkpoint_that_fails_is_repeated_when_the_steps_continue(tmp_path: Path, kind: str, at: int):
    sections = {"evaluation": Evaluation(every=2), "checkpoint": Checkpoint(every=2)}
    undisturbed, session = (session_of(tmp_path, **sections) for _ in range(2))
    walk(undisturbed, 3)
    done: list[tuple[str, int]] = []

    def fail_once(kind_now: str) -> None:
        done.append((kind_now, session.progress.step))
        if done.count((kind, at)) == 1 and done[-1] == (kind, at):
            raise ValueError("failed midway")

    session.before_save = lambda: fail_once("checkpoint")

    def evaluate(session: Session, step: StepContext) -> None:
        fail_once("evaluation")

    with pytest.raises(ValueError, match="failed midway"):
        list(session.steps("train", 3, evaluate))
    assert session.progress.step == at
    for _ in range(2):  # the second time, nothing is left to do
        list(session.steps("train", 3, evaluate))
        assert run_of(session).logged == run_of(undisturbed).logged
        assert session.saved == undisturbed.saved


@pytest.mark.parametrize(("at", "saved"), [(2, (2,)), (4, (2, 4)), (5, (2, 4, 5))])
def test_an_evaluation_that_fails_loses_no_step_whose_checkpoint_is_due(
    tmp_path: Path, at: int, saved: tuple[int, ...]
):
    session = session_of(tmp_path, evaluation=Evaluation(every=1), checkpoint=Checkpoint(every=2))

    def evaluate(session: Session, step: StepContext) -> None:
        if session.progress.step == at:
            raise ValueError("the judge is down")

    with pytest.raises(ValueError, match="the judge is down"):
        list(session.steps("train", 5, evaluate))
    assert session.saved == saved
    assert session.evaluations.is_due


def test_an_evaluation_that_fails_leaves_the_checkpoint_that_is_written_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(SavingSession, "save", Session.save)
    session = session_of(tmp_path, evaluation=Evaluation(every=1), checkpoint=Checkpoint(every=2, asynchronous=True))

    def write(folder: str, *_: float) -> None:
        (Path(folder) / "weights").touch()

    set_group(session, "actor", start_save=write, save_is_done=True, finish_save=None)

    def evaluate(session: Session, step: StepContext) -> None:
        if session.progress.step == 4:
            raise ValueError("the judge is down")

    try:
        with pytest.raises(ValueError, match="the judge is down"):
            list(session.steps("train", 5, evaluate))
    finally:
        session.checkpoints.finish_after_error()  # as at the end of a run
    assert newest(tmp_path / "checkpoints" / "train") == tmp_path / "checkpoints" / "train" / "step-4"


def test_a_resumed_run_does_not_repeat_the_evaluation_of_its_checkpoint(tmp_path: Path):
    session = session_of(tmp_path, evaluation=Evaluation(every=2))
    session.progress, session.evaluations.is_due = replace(session.progress, phase="train", step=2), False
    walk(session, 3)
    assert run_of(session).logged == [("train", 3), ("evaluation", 3)]


def test_a_step_that_fails_after_a_resume_is_repeated_without_saving_the_checkpoint_again(tmp_path: Path):
    session = session_of(tmp_path, evaluation=Evaluation(every=2), checkpoint=Checkpoint(every=2))
    session.progress, session.evaluations.is_due = replace(session.progress, phase="train", step=2), False
    for _ in session.steps("train", 3, lambda session, step: None):
        break  # as an error would
    list(session.steps("train", 3, lambda session, step: None))
    assert run_of(session).logged == [("train", 3), ("evaluation", 3)]
    assert len(session.saved) == 1


def test_calls_that_a_failed_step_did_not_wait_for_are_discarded_before_the_next_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    session = session_of(tmp_path)
    groups = [set_group(session, name) for name in ("reward", "reference")]
    for attempt in range(2):
        for step in session.steps("train", 2):
            assert [group.submitted for group in groups] == [[], []]
            if (attempt, step.number) == (0, 2):
                groups[0].submitted, groups[1].submitted = ["reward.score"] * 2, ["reference.logprobs"]
                break  # as an error would
    assert session.progress.step == 2
    assert [record.getMessage() for record in caplog.records if "discarded" in record.getMessage()] == [
        "step 2 of train ended without waiting for 3 of its calls, whose results are discarded: reward.score, "
        "reward.score, reference.logprobs"
    ]


def without_times(run: RecordingRun) -> list[tuple[tuple[str, int], dict[str, float]]]:
    records = [
        {name: value for name, value in record.items() if not name.startswith(("time/", "perf/"))}
        for record in run.records
    ]
    return list(zip(run.logged, records, strict=True))


def test_a_step_that_is_repeated_packs_alike_and_the_next_one_does_not(tmp_path: Path):
    batching = Batching(max_tokens=64, algorithm="first_fit_shuffle", balance="none")
    rollouts = tiny_rollouts([(2, 3 + row) for row in range(12)])

    def order_of(step: int, seed: int = 1) -> list[int]:
        session = session_of(tmp_path, seed=seed)
        session.groups["actor"] = WorkerGroup("actor", LocalRanks([lambda context: None]), batching)
        session.begin_step(step)
        return session.actor.plan(rollouts).order.tolist()

    assert order_of(1) == order_of(1)
    assert order_of(1) != order_of(2)
    assert order_of(1) != order_of(1, seed=2)

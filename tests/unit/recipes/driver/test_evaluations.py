"""Evaluations that run while the next step trains: their weights, their place in the records, failures and kills."""

import os
import random
import threading
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlpack.background_call import BackgroundCall
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.batch.store import LocalLease
from rlpack.config.schema import Evaluation, Trainer
from rlpack.data.sampler import step_seed
from rlpack.distributed.errors import RoleError
from rlpack.observe.sinks import ResumePoint
from rlpack.recipes.driver import ahead, evaluation, evaluations, started_batch
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch, as_scored
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.recipes.driver.evaluations import EnginesOnly, Evaluations
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.rollout_stages import DrawnPrompts, sample_responses
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.errors import StalenessError
from tests.unit.recipes.driver.sessions import SavingSession, run_of, session_of, set_group
from tests.unit.recipes.driver.simulated_engines import GROUP, PROMPTS, Ledger, SimulatedGroup, draw, started

# `make test-long` takes more steps.
STEPS = min(1000, int(os.environ.get("RLPACK_SIMULATED_STEPS", "60")))
Record = tuple[str, int, dict[str, float]]


class DrainedEngines:
    """Engines that serve one caller at a time, sample with the weights that are loaded, and never during a load."""

    def __init__(self, session: Session, *, delay_s: float = 0.0, seed: int = 0) -> None:
        self.session, self.delay_s, self.random = session, delay_s, random.Random(seed)
        self.version = 1
        session.__dict__["rollout_weights"] = self
        self.is_busy = threading.Lock()
        self.evaluated_on: dict[int, str] = {}

    def pause(self) -> None:
        if self.delay_s:
            time.sleep(self.random.random() * self.delay_s)

    def sample(self) -> list[int]:
        assert self.is_busy.acquire(blocking=False), "two generations, or a generation and a publication, at once"
        try:
            versions = []
            for _ in range(4):
                self.pause()
                versions.append(self.version)
            return versions
        finally:
            self.is_busy.release()

    def draw(self, session: Session, step: StepContext) -> Batch:
        start = step.progress.prompts_consumed
        step.advance(prompts_consumed=start + PROMPTS)
        step.metrics["prompts_consumed"] = start + PROMPTS
        versions = Ragged(torch.tensor(self.sample(), dtype=torch.int32), torch.tensor([4]))
        return Batch(BatchedDataDict({"policy_version": versions}), as_scored)

    def publish(self, session: Session, step: StepContext | None = None) -> None:
        assert self.is_busy.acquire(blocking=False), "weights are published during a generation"
        self.pause()
        self.version += 1
        self.is_busy.release()

    def evaluate(self, session: Session, step: StepContext) -> None:
        """Record the versions of a few tokens, and what the session says it is."""
        self.evaluated_on[step.number] = threading.current_thread().name
        versions = self.sample()
        assert session.progress.step == step.number
        step.metrics |= {"evaluation/reward_sampled": float(sum(versions)), "evaluation/graded_rewards": min(versions)}


def test_an_evaluation_that_loses_its_engines_at_once_fails_and_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
):
    access, has_lost, may_end = EngineAccess(are_concurrent=True), threading.Event(), threading.Event()
    every, context = Evaluations(), StepContext(1, Progress(), lease=LocalLease())

    def lose() -> None:
        every.lose_engines(access)
        has_lost.set()
        may_end.wait(30.0)

    class SlowCall(BackgroundCall[None]):
        """Returns to the thread that starts it only after the engines were lost."""

        def __init__(self, function: Any, *, name: str) -> None:
            super().__init__(function, name=name)
            assert has_lost.wait(30.0)

    monkeypatch.setattr(evaluations, "BackgroundCall", SlowCall)
    monkeypatch.setattr(evaluations, "_LOOK_S", 0.01)
    threading.Timer(5.0, may_end.set).start()
    every.begin(("train", 1), context, lose)
    with pytest.raises(RoleError, match="the weights that this batch or evaluation began with are gone"):
        every.finish(access, 1, lambda: None)


def session_with_lead(folder: Path, *, steps: int, lead: int = 1, every: int = 1) -> SavingSession:
    return session_of(folder, trainer=Trainer(steps=steps, lead=lead), evaluation=Evaluation(every=every))


def walk(session: SavingSession, engines: DrainedEngines, evaluate: Any) -> None:
    queue = AheadQueue(session, engines.draw)
    if session.restored is not None:  # the first publication
        engines.version += 1
    for step in session.steps("train", session.config.trainer.steps, evaluate):
        queue.take(step)
        engines.pause()
        queue.publish(step)


def records(session: Session) -> list[Record]:
    """Return what was logged but for times, which threads share differently, and peaks of memory."""
    run = run_of(session)
    return [
        (phase, number, {k: v for k, v in record.items() if not k.startswith(("time/", "perf/", "store/"))})
        for (phase, number), record in zip(run.logged, run.records, strict=True)
    ]


@pytest.fixture(autouse=True)
def publications(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let simulated weights stand in for the transfer of real ones, and look for dead engines often."""
    monkeypatch.setattr(ahead, "sync_weights", lambda session, step: session.rollout_weights.publish(session, step))
    monkeypatch.setattr(started_batch, "LOOK_S", 0.005)
    monkeypatch.setattr(evaluations, "_LOOK_S", 0.005)


@pytest.mark.parametrize("every", [1, 3])
def test_records_are_those_of_a_run_that_waits_for_its_evaluations(tmp_path: Path, every: int):
    found: dict[bool, list[Record]] = {}
    for is_waiting in (True, False):
        session = session_with_lead(tmp_path, steps=STEPS, every=every)
        engines = DrainedEngines(session, delay_s=3e-4)
        evaluate = EnginesOnly(lambda session, step, engines=engines: engines.evaluate(session, step))
        if is_waiting:
            evaluate = engines.evaluate
        walk(session, engines, evaluate)
        found[is_waiting] = records(session)
        # The first evaluation comes before any step that could train meanwhile, the last after all.
        threads = [engines.evaluated_on.pop(number) for number in (0, STEPS)]
        assert threads == ["MainThread"] * 2
        assert set(engines.evaluated_on.values()) == {"MainThread" if is_waiting else "evaluate"}
    assert found[True] == found[False]
    numbers = [number for phase, number, _ in found[False] if phase == "evaluation"]
    assert numbers == sorted({*range(0, STEPS + 1, every), STEPS})


def test_a_step_trains_while_the_evaluation_before_it_is_under_way(tmp_path: Path):
    session = session_with_lead(tmp_path, steps=4)
    engines, trained = DrainedEngines(session), threading.Event()
    set_group(session, "reward")
    queue = AheadQueue(session, engines.draw)

    @EnginesOnly
    def evaluate(session: Session, step: StepContext) -> None:
        if 0 < step.number < 4:
            assert trained.wait(30.0), "training waits for the evaluation"
            trained.clear()
            assert session.groups["reward"].seed == step_seed(session.config.seed, "train", step.number)
        engines.evaluate(session, step)

    for step in session.steps("train", 4, evaluate):
        queue.take(step)
        assert session.evaluations.is_under_way == (step.number > 1)
        trained.set()
        queue.publish(step)
        assert not session.evaluations.is_under_way
    assert len(engines.evaluated_on) == 5


@pytest.mark.parametrize("lead", [1, 3])
def test_every_evaluation_samples_the_weights_of_its_step_and_no_batch_is_staler_for_it(tmp_path: Path, lead: int):
    session = started(tmp_path, steps=STEPS, lead=lead, seed=lead, delay_s=2e-4)
    session.config.__dict__["evaluation"] = session.config.evaluation.model_copy(update={"every": 2})
    published, ledger = {0: 1}, Ledger()
    sampled: dict[int, set[int]] = {}
    overlaps: list[bool] = []

    @EnginesOnly
    def evaluate(session: Session, step: StepContext) -> None:
        drawn = DrawnPrompts(session.held_out.batch(np.arange(3)), 2**32, np.arange(3))
        rollouts = sample_responses(session, drawn, GROUP, temperature=1.0, metrics=step.metrics)
        sampled[step.number] = set(rollouts["policy_version"].values.tolist())
        evaluation._check_versions(session, step, rollouts)

    queue = AheadQueue(session, draw)
    for step in session.steps("train", STEPS, evaluate):
        ledger.record(step.number, queue.take(step).rollouts, session.rollout_weights.version)
        time.sleep(0.001)
        overlaps.append(session.evaluations.is_under_way)
        queue.publish(step)
        published[step.number] = session.rollout_weights.version
    assert sampled == {number: {published[number]} for number in range(0, STEPS + 1, 2)}
    assert sum(overlaps) == STEPS // 2 - 1
    assert ledger.positions == {n: list(range(PROMPTS * (n - 1), PROMPTS * n)) for n in range(1, STEPS + 1)}
    assert max(ledger.lags) == lead
    places = [place for place in run_of(session).logged if place[0] == "evaluation" or place[1] % 2 == 0]
    assert places == [("evaluation", 0)] + [
        (phase, n) for n in range(2, STEPS + 1, 2) for phase in ("train", "evaluation")
    ]


class KilledError(Exception):
    """Ends a run where a signal would."""


def run_until_killed(
    folder: Path, committed: list[tuple[Progress, Path, bool]], kept: list[Record], moments: int
) -> tuple[list[Record], bool]:
    """Continue a run, which is killed after a number of moments; return its records, and whether it came to its end."""
    folder.mkdir()
    session = session_with_lead(folder, steps=14, every=2)
    session.config.__dict__["checkpoint"] = session.config.checkpoint.model_copy(update={"every": 2})
    engines, left = DrainedEngines(session, delay_s=5e-4, seed=moments), [moments]
    if committed:
        session.progress, session.restored, session.evaluations.is_due = committed[-1]
        # As a resumed run does: what was logged after the checkpoint was committed counts.
        session.evaluations.is_due &= ("evaluation", session.progress.step) not in {one[:2] for one in kept}
        point = ResumePoint(session.progress.step, "train", session.evaluations.is_due)
        kept = [one for one in kept if point.covers({"phase": one[0], "step": one[1]})]

    def moment() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KilledError

    def commit() -> None:
        checkpoint = folder / f"step-{session.progress.step}"
        is_due = session.evaluations.is_due or session.evaluations.is_under_way
        assert not engines.is_busy.locked(), "the checkpoint waits for the evaluation, to read the waiting batch"
        checkpoint.mkdir()
        cast(AheadQueue, session.ahead).save(checkpoint)
        moment()
        committed.append((session.progress, checkpoint, is_due))
        moment()

    session.before_save = commit
    try:
        queue = AheadQueue(session, engines.draw)
        if session.restored is not None:
            engines.version += 1
        for step in session.steps("train", 14, EnginesOnly(lambda *a: engines.evaluate(*a))):
            queue.take(step)
            moment()
            engines.pause()
            queue.publish(step)
            moment()
    except KilledError:
        session.evaluations.wait()
        cast(AheadQueue, session.ahead).drain()  # the threads end
        return kept + records(session), False
    return kept + records(session), True


def test_runs_killed_at_any_moment_log_every_evaluation_once_with_the_same_figures(tmp_path: Path):
    whole, is_completed = run_until_killed(tmp_path / "whole", [], [], 10**6)
    assert is_completed
    number = 0
    for moments in range(1, 8):
        committed: list[tuple[Progress, Path, bool]] = []
        found: list[Record] = []
        is_completed = False
        while not is_completed:
            number += 1
            # The first checkpoint takes seven moments.
            found, is_completed = run_until_killed(tmp_path / f"run-{number}", committed, found, moments + 7)
        assert found == whole
        assert any(is_due for *_, is_due in committed), "no checkpoint lacked its evaluation"
    assert number > 14, "hardly a run was killed"


def test_an_evaluation_that_fails_ends_the_next_step_names_its_own_and_is_repeated_without_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    session = session_with_lead(tmp_path, steps=4, every=2)
    session.config.__dict__["checkpoint"] = session.config.checkpoint.model_copy(update={"every": 2})
    engines, failures = DrainedEngines(session), [RoleError("reward", 0, "score", "died")]

    @EnginesOnly
    def evaluate(session: Session, step: StepContext) -> None:
        if step.number == 2 and failures:
            raise failures.pop()
        engines.evaluate(session, step)

    with pytest.raises(RoleError, match="role reward, rank 0, in score, step 2 of train: died"):
        walk(session, engines, evaluate)
    assert "the evaluation after step 2 failed, and the next step will: role reward" in caplog.text
    assert session.progress.step == 2
    queue = cast(AheadQueue, session.ahead)
    for step in session.steps("train", 4, evaluate):
        queue.take(step)
        queue.publish(step)
    assert [one for one in run_of(session).logged if one[0] == "evaluation"] == [("evaluation", n) for n in (0, 2, 4)]
    assert session.saved == (2, 4)


@pytest.mark.parametrize("interrupt_at", [5, 6])
def test_ctrl_c_waits_for_the_evaluation_and_begins_none(tmp_path: Path, interrupt_at: int):
    # The sixth record is that of step 3: evaluation 0, step 1, its evaluation, step 2, its evaluation, step 3.
    session = session_of(tmp_path, interrupt_at, trainer=Trainer(steps=9, lead=1), evaluation=Evaluation(every=1))
    engines = DrainedEngines(session, delay_s=1e-3)
    with pytest.raises(KeyboardInterrupt):
        walk(session, engines, EnginesOnly(lambda *a: engines.evaluate(*a)))
    assert run_of(session).logged[-1] == ("train", 3)
    assert session.saved == (3,)
    assert session.evaluations.is_due  # for a resumed run
    assert engines.evaluated_on == {0: "MainThread", 1: "evaluate", 2: "evaluate"}


def test_an_evaluation_that_may_call_other_roles_is_waited_for(tmp_path: Path):
    session = session_with_lead(tmp_path, steps=3)
    engines = DrainedEngines(session)
    walk(session, engines, lambda *a: engines.evaluate(*a))
    assert set(engines.evaluated_on.values()) == {"MainThread"}


@pytest.mark.parametrize("trains", [True, False], ids=["actor trains", "critic's warm-up"])
def test_an_evaluation_whose_engines_all_fail_ends_the_run_if_their_weights_are_gone(tmp_path: Path, trains: bool):
    session = started(tmp_path, steps=6, lead=1, delay_s=1e-4)
    session.config.__dict__["evaluation"] = session.config.evaluation.model_copy(update={"every": 2})
    begun, dead = threading.Event(), threading.Event()

    @EnginesOnly
    def evaluate(session: Session, step: StepContext) -> None:
        if step.number != 2:
            return
        begun.set()
        assert dead.wait(30.0)
        drawn = DrawnPrompts(session.held_out.batch(np.arange(3)), 2**32, np.arange(3))
        sample_responses(session, drawn, GROUP, temperature=1.0, metrics=step.metrics)

    queue = AheadQueue(session, draw)
    session.engine_access.optimizer_steps = 0

    def train() -> None:
        for step in session.steps("train", 6, evaluate):
            queue.take(step)
            if step.number == 3:
                step.advance(optimizer_steps=int(trains))
                assert begun.wait(30.0)
                queue.drain()
                for rank in cast(SimulatedGroup, session.rollout).every:
                    rank.engine.is_alive = False
                dead.set()
            queue.publish(step)

    if not trains:
        train()
        assert session.progress.step == 6
        return
    with pytest.raises(RoleError, match="the weights that this batch or evaluation began with are gone; resume"):
        train()
    assert session.progress.step == 2


def test_an_evaluation_with_tokens_of_other_weights_is_an_error(tmp_path: Path):
    session = session_with_lead(tmp_path, steps=3)
    session.__dict__["rollout_weights"] = DrainedEngines(session)
    step = session.begin_step(2)
    for versions, is_right in (([-1, 1, 1], True), ([1, 2], False), ([0, 0], False)):
        tokens = Ragged(torch.tensor(versions, dtype=torch.int32), torch.tensor([len(versions)]))
        rollouts = BatchedDataDict({"policy_version": tokens})
        if is_right:
            evaluation._check_versions(session, step, rollouts)
            continue
        with pytest.raises(StalenessError, match=rf"after step 2 has tokens of .* {versions[0]} to {versions[1]}, and"):
            evaluation._check_versions(session, step, rollouts)

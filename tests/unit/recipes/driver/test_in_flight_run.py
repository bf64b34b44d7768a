"""Running ahead with weights that reach engines while they sample: engines that sample, die and are replaced at random.

The queue, the router, the turns and the groups in flight are the real ones; ranks and engines are simulated.
"""

import os
import random
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.checkpoint.errors import CheckpointError
from rlpack.distributed.calls import Call
from rlpack.distributed.errors import RoleError
from rlpack.recipes.driver import ahead, started_batch
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch, as_scored
from rlpack.recipes.driver.engine_weights import sync_weights
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.rollout_stages import DrawnPrompts, sample_responses
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.safe_files import read_object
from tests.unit.recipes.driver.sessions import SavingSession, run_of
from tests.unit.recipes.driver.simulated_engines import (
    GROUP,
    PROMPTS,
    RANKS,
    FailingCanary,
    Ledger,
    SimulatedGroup,
    Weights,
    draw,
    started,
    walk,
)

# `make test-long` takes more steps.
STEPS = int(os.environ.get("RLPACK_SIMULATED_STEPS", "150"))


@pytest.fixture(autouse=True)
def publications(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the simulated weights stand in for the transfer of real ones, and look for dead engines often."""

    def publish(session: Session, step: StepContext) -> None:
        cast(Weights, session.rollout_weights).publish(session, step)

    monkeypatch.setattr(ahead, "sync_weights", publish)
    monkeypatch.setattr(started_batch, "LOOK_S", 0.005)


def test_an_engine_that_fails_is_replaced_by_the_end_of_a_step_that_left_the_actor_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As in the critic's warm-up, whose steps publish no weights."""
    monkeypatch.setattr(ahead, "sync_weights", sync_weights)
    session = started(tmp_path, steps=12, lead=1, seed=1)
    engines, weights = session.rollout.every, session.rollout_weights
    engines[0].engine.calls_left = 30
    queue = AheadQueue(session, draw)
    for step in session.steps("train", 12):
        queue.take(step)
        queue.publish(step)
    assert not session.engine_access.failed  # the engine died some steps earlier
    assert [rank.num_engines for rank in engines] == [2, *[1] * (RANKS - 1)]
    assert {rank.version for rank in engines} == {weights.version} == {1}


@pytest.mark.parametrize(("lead", "steps"), [(1, STEPS), (2, STEPS), (3, 2 * STEPS)])
def test_every_prompt_is_trained_on_once_in_order_within_the_bound_though_engines_die(
    tmp_path: Path, lead: int, steps: int
):
    session = started(tmp_path, steps=steps, lead=lead, seed=lead, dies=True, delay_s=3e-4)
    ledger = Ledger()
    walk(session, ledger, delay_s=2e-3)
    assert ledger.positions == {n: list(range(PROMPTS * (n - 1), PROMPTS * n)) for n in range(1, steps + 1)}
    assert 0 <= min(ledger.lags) <= max(ledger.lags) <= lead
    assert max(ledger.lags) == lead, "nothing ran ahead"
    replaced = sum(rank.num_engines for rank in session.rollout.every) - RANKS
    assert replaced > 0, "no engine died"
    counts = [*run_of(session).records, session.engine_access.pop_metrics()]
    assert sum(record.get("rollout/engines_replaced", 0) for record in counts) == replaced
    assert sum(record.get("rollout/repeated_rows", 0) for record in counts) >= replaced / 2
    assert threading.active_count() < 20
    assert session.engine_access.load.in_flight == dict.fromkeys(range(RANKS), 0)


def test_batches_are_sampled_while_earlier_ones_are(tmp_path: Path):
    session = started(tmp_path, steps=30, lead=3)
    most, begun, in_flight = list[int](), list[int](), list[int]()
    group = session.rollout

    def submit_to(rank: int, method: Any, rows: BatchedDataDict, *args: Any, **limits: Any) -> Any:
        number, oldest = args[1], args[2]
        most.append(number - oldest)
        begun.extend(int(uid) // PROMPTS for uid in rows["uid"])
        in_flight.append(max(session.engine_access.load.in_flight.values()))
        return SimulatedGroup.submit_to(group, rank, method, rows, *args, **limits)

    group.submit_to = submit_to
    walk(session, Ledger(), delay_s=2e-3)
    assert max(most) > 0
    assert begun == sorted(begun), "a row got an engine before one of an earlier batch"
    assert max(in_flight) <= session.config.rollout.max_num_seqs - 1 + GROUP


def test_an_evaluation_shares_the_engines_with_batches_that_were_begun_and_samples_one_version(tmp_path: Path):
    session = started(tmp_path, steps=12, lead=3, delay_s=2e-4)
    session.config.evaluation.__dict__["every"] = 3
    group, others = session.rollout, list[bool]()
    versions: list[set[int]] = []
    evaluating: list[int] = []

    def submit_to(rank: int, method: Any, rows: BatchedDataDict, *args: Any, **start: Any) -> Any:
        if evaluating and threading.current_thread() is not session.thread:
            others.append(True)
        return SimulatedGroup.submit_to(group, rank, method, rows, *args, **start)

    def evaluate(session: Session, step: StepContext) -> None:
        evaluating.append(step.number)
        drawn = DrawnPrompts(session.held_out.batch(np.arange(3)), 2**32, np.arange(3))
        rollouts = sample_responses(session, drawn, GROUP, temperature=1.0, metrics=step.metrics)
        versions.append(set(rollouts["policy_version"].values.tolist()) - {session.rollout_weights.version})
        evaluating.pop()

    group.submit_to = submit_to
    queue = AheadQueue(session, draw)
    for step in session.steps("train", 12, evaluate):
        queue.take(step)
        queue.publish(step)
    assert versions == [set()] * 5  # before the first step, and after every third
    assert others, "the engines drew no batch during an evaluation"


def test_a_response_has_tokens_of_several_versions(tmp_path: Path):
    session = started(tmp_path, steps=60, lead=2, delay_s=2e-4)
    mixed: list[bool] = []

    class Watching(Ledger):
        def record(self, step: int, rollouts: BatchedDataDict, newest: int) -> None:
            mixed.extend(row.unique().numel() > 1 for row in rollouts["policy_version"].rows())

    walk(session, Watching())
    assert any(mixed)


class KilledError(Exception):
    """Ends a run where a signal would."""


class KilledRun:
    """A run that is killed after a number of moments, and the checkpoints that were committed.

    Moments: a batch is taken, a step is trained, its weights are published, a checkpoint is written, it is committed.
    """

    def __init__(self, session: SavingSession, committed: list[tuple[Progress, Path]], moments: int) -> None:
        self.session, self.committed, self.moments_left = session, committed, moments
        if committed:
            session.progress, session.restored = committed[-1]
        session.before_save = self.commit

    def moment(self) -> None:
        self.moments_left -= 1
        if self.moments_left == 0:
            raise KilledError

    def commit(self) -> None:
        checkpoint = self.session.run.run_dir / f"step-{self.session.progress.step}"
        checkpoint.mkdir()
        cast(AheadQueue, self.session.ahead).save(checkpoint)
        self.moment()
        self.committed.append((self.session.progress, checkpoint))
        self.moment()

    def is_completed(self, ledger: Ledger) -> bool:
        """Run until the kill, or to the end."""
        try:
            walk(self.session, ledger, delay_s=5e-4, moment=self.moment)
        except KilledError:
            return False
        finally:
            cast(AheadQueue, self.session.ahead).drain()  # the threads end
        return True


def test_runs_killed_at_any_moment_train_on_every_prompt_once_and_on_responses_of_the_same_lengths(tmp_path: Path):
    steps, lead, kills = 60, 2, random.Random(2)
    undisturbed, ledger = Ledger(), Ledger()
    (tmp_path / "whole").mkdir()
    walk(started(tmp_path / "whole", steps=steps, lead=lead), undisturbed)
    committed: list[tuple[Progress, Path]] = [(Progress(phase="train"), tmp_path)]
    runs, is_completed = 0, False
    while not is_completed:
        folder = tmp_path / f"run-{runs}"
        folder.mkdir()
        session = started(folder, steps=steps, lead=lead, seed=runs, delay_s=1e-4, checkpoint_every=2)
        is_completed = KilledRun(session, committed, kills.randrange(1, 12)).is_completed(ledger)
        runs += 1
    assert runs > 50
    assert len(ledger.steps) > steps + 20, "hardly a step was taken again"
    assert all(step <= before + 1 for before, step in pairwise([0, *ledger.steps])), "a step was left out"
    assert ledger.positions == undisturbed.positions
    # Lengths depend on the seeds alone in this simulation, so that any choice among responses shows.
    assert ledger.lengths == undisturbed.lengths
    assert 0 <= min(ledger.lags) <= max(ledger.lags) <= lead


def test_a_checkpoint_has_where_batches_begin_and_none_of_them_whether_it_was_drawn_or_not(tmp_path: Path):
    session = started(tmp_path, steps=10, lead=3)
    rank = session.rollout.every[0]
    queue = AheadQueue(session, draw)
    for step in session.steps("train", 10):
        queue.take(step)
        queue.publish(step)
        session.progress = step.progress
        break
    queue.drain()
    rank.lock.acquire()  # the engine hangs while the next batch is begun
    try:
        queue._begin_until(5)
        (tmp_path / "step-1").mkdir()
        queue.save(tmp_path / "step-1")
        assert [begun.is_drawn for begun in queue._waiting] == [True, True, True, False]
    finally:
        rank.lock.release()
    queue.drain()
    batches = read_object(tmp_path / "step-1/ahead/ahead.json")["batches"]
    assert [(entry["step"], entry["start"]) for entry in batches] == [(2, 3), (3, 6), (4, 9), (5, 12)]
    assert [path.name for path in (tmp_path / "step-1/ahead").iterdir()] == ["ahead.json"]


def test_responses_after_a_resume_are_as_long_as_others_though_short_ones_are_drawn_before_the_checkpoint(
    tmp_path: Path,
):
    # Whether a batch changes with every draw, as for responses that go on with new random numbers.
    steps, lengths, trained = 300, random.Random(7), []
    session = started(tmp_path, steps=steps, lead=1)
    changed, drawn = threading.Condition(), dict[int, bool]()
    taking = 0

    def draw_batch(session: Session, step: StepContext) -> Batch:
        is_long = lengths.random() < 0.5
        with changed:
            drawn[step.number] = is_long
            changed.notify_all()
            assert changed.wait_for(lambda: not is_long or taking >= step.number, 30.0)
        step.advance(prompts_consumed=step.progress.prompts_consumed + PROMPTS)
        tokens = torch.full((30 if is_long else 1,), session.rollout_weights.version, dtype=torch.int32)
        return Batch(BatchedDataDict({"policy_version": Ragged.from_rows([tokens], torch.int32)}), as_scored)

    for number in range(1, steps + 1):  # each step is taken by a run that was resumed
        queue = AheadQueue(session, draw_batch)
        with changed:
            taking = number
            changed.notify_all()
        for step in session.steps("train", steps):
            trained.append(queue.take(step).rollouts["policy_version"].values.numel())
            session.progress = step.progress
            break
        with changed:
            assert number == steps or changed.wait_for(lambda number=number: number + 1 in drawn, 30.0)
        while number < steps and not (queue._waiting[0].is_drawn or drawn[number + 1]):
            time.sleep(0.001)
        session.restored = tmp_path / f"step-{number}"
        session.restored.mkdir()
        queue.save(session.restored)
        drawn.pop(number + 1, None)
    assert abs(trained.count(30) / steps - 0.5) < 0.1  # 3.5 standard deviations


def test_no_engine_samples_while_weights_are_published_again_after_a_failed_canary(tmp_path: Path):
    session = started(tmp_path, steps=1, lead=1)
    channel = session.__dict__["rollout_weights"] = FailingCanary(session.rollout)
    sync_weights(session)
    assert channel.interrupted == [[True, True], [True, True]]
    assert [rank.num_engines for rank in session.rollout.every] == [2, 1]
    assert not any(rank.engine.is_interrupted for rank in session.rollout.every)


def test_ranks_that_are_started_again_while_engines_go_on_get_the_weights_again(tmp_path: Path):
    session = started(tmp_path, steps=1, lead=1)
    access = session.engine_access

    def run(method: Any, *args: Any) -> None:
        if method.__name__ == "resume":  # a rank dies, and its pool is started again
            session.rollout.num_starts += 1

    session.rollout.run = run
    with session.publication():
        access.record_failure(0)
    assert access.failed == frozenset()
    access.record_starts(session.rollout.ranks.num_starts, RANKS)  # as a router does for each call
    assert access.failed == frozenset(range(RANKS))


def test_engines_stay_interrupted_if_a_publication_fails(tmp_path: Path):
    session = started(tmp_path, steps=1, lead=1)
    with pytest.raises(ValueError, match="lost"), session.publication():
        raise ValueError("lost")
    assert all(rank.engine.is_interrupted for rank in session.rollout.every)


def test_batches_drawn_ahead_are_refused_if_prompts_would_be_trained_on_twice_or_never(tmp_path: Path):
    session = started(tmp_path, steps=10, lead=3)
    queue = walk(session, Ledger(), until=1)
    (tmp_path / "step-1").mkdir()
    queue.save(tmp_path / "step-1")
    for begun in queue._waiting:
        begun.drawn()
    session.restored = tmp_path / "step-1"
    session.config.trainer.__dict__["prompts_per_step"] = PROMPTS + 1
    with pytest.raises(CheckpointError, match=r"trainer\.prompts_per_step is 4, .* have 3 prompts each; resume with"):
        AheadQueue(session, draw)


def test_engines_are_replaced_by_the_main_thread_alone_which_knows_whose_weights_the_actor_has(tmp_path: Path):
    session = started(tmp_path, steps=1, lead=1)
    for rank in session.rollout.every:
        rank.engine.calls_left = 1
    replaced: list[threading.Thread] = []

    def submit(call: Call) -> Any:
        assert call.method == "replace_failed_engine"
        replaced.append(threading.current_thread())
        return SimulatedGroup.submit(session.rollout, call)

    session.rollout.submit = submit
    ledger = Ledger()
    walk(session, ledger)
    assert set(replaced) == {threading.main_thread()}
    assert ledger.positions == {1: list(range(PROMPTS))}


def test_a_checkpoint_is_written_although_a_later_batch_could_not_be_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    session = started(tmp_path, steps=5, lead=2)

    def draw_until_3(session: Session, step: StepContext) -> Batch:
        if step.number == 3:
            raise RoleError("rollout", 0, "advance", "it died")
        return draw(session, step)

    queue = AheadQueue(session, draw_until_3)

    def train() -> None:
        for step in session.steps("train", 5):
            queue.take(step)
            while not all(begun.is_drawn for begun in queue._waiting):
                time.sleep(0.001)
            queue.publish(step)
            session.progress = step.progress
            folder = tmp_path / f"step-{step.number}"
            folder.mkdir()
            queue.save(folder)

    with pytest.raises(RoleError, match="it died"):
        train()
    assert "the batch of step 3 could not be drawn; its step will fail" in caplog.text
    batches = read_object(tmp_path / "step-2/ahead/ahead.json")["batches"]
    assert [(one["step"], one["start"]) for one in batches] == [(3, 6), (4, 9)]


def test_idle_shares_are_those_of_waiting_for_a_batch_and_of_engines_without_rows(tmp_path: Path):
    session = started(tmp_path, steps=4, lead=1, delay_s=4e-3)
    queue = AheadQueue(session, draw)
    for step in session.steps("train", 4):
        queue.take(step)
        if step.number == 4:  # no batch is left
            time.sleep(0.5)
        queue.publish(step)
    records = cast(Any, session.run).records
    trainer = [record["perf/trainer_idle_share"] for record in records]
    engines = [record["perf/engine_idle_share"] for record in records]
    assert trainer[0] > 0.5 > engines[0], "the first step trains for a moment, after it has waited for its batch"
    assert trainer[3] < 0.5 < engines[3], "the last step trains for half a second"
    assert 0.0 <= min(*trainer, *engines) <= max(*trainer, *engines) <= 1.0

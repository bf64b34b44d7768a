"""Running ahead with weights that reach engines while they sample: engines that sample, die and are replaced at random.

The queue, the router, the turns and the groups in flight are the real ones; ranks and engines are simulated.
"""

import math
import os
import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.checkpoint.errors import CheckpointError
from rlpack.config.schema import Rollout, Trainer
from rlpack.distributed.calls import Pending
from rlpack.distributed.usage import Usage
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.recipes.driver import ahead
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch, as_scored
from rlpack.recipes.driver.engine_weights import sync_weights
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.rollout_stages import DrawnPrompts, sample_responses
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.engine import FinishedRow
from rlpack.rollout.in_flight import GroupsInFlight
from rlpack.rollout.types import Generations, SamplingParams
from tests.unit.recipes.driver.sessions import SavingSession, session_of

PROMPTS, GROUP, RANKS = 3, 2, 2
# `make test-long` takes more steps.
STEPS = int(os.environ.get("RLPACK_SIMULATED_STEPS", "150"))


class SimulatedEngine:
    """Samples a token for each row in flight at a time, and stamps it with the version of its weights."""

    def __init__(self, rank: "SimulatedRank") -> None:
        self.rank, self.is_alive, self.is_interrupted = rank, True, False
        self.calls_left = rank.random.randint(100, 500) if rank.dies else math.inf  # so no group fails three times
        self.rows: dict[int, list[int]] = {}
        self.left: dict[int, int] = {}

    def begin(self, keys: Sequence[int], prompts: Ragged, params: SamplingParams, seeds: np.ndarray) -> None:
        for key, seed in zip(keys, seeds, strict=True):
            self.rows[key] = []
            self.left[key] = 1 + int(seed) % 5 + (20 if int(seed) % 10 == 0 else 0)  # a tail of long responses

    def finished(self, timeout_s: float) -> list[FinishedRow]:
        assert not self.is_interrupted, "tokens are sampled during a publication"
        self.calls_left -= 1
        self.is_alive = self.is_alive and self.calls_left > 0
        if not self.is_alive:
            failed, self.rows = list(self.rows), {}
            return [FinishedRow(key, None, "the engine died") for key in failed]
        self.rank.pause()
        for key, versions in self.rows.items():
            versions.append(self.rank.version)
            self.left[key] -= 1
        ended = [key for key in self.rows if self.left[key] == 0]
        return [FinishedRow(key, self.rows.pop(key), "") for key in ended]

    def to_generations(self, responses: Sequence[list[int]], params: SamplingParams) -> Generations:
        versions = Ragged.from_rows([torch.tensor(row, dtype=torch.int32) for row in responses], torch.int32)
        return Generations(
            versions.with_values(versions.values.long()),
            versions.with_values(torch.zeros(versions.values.shape[0])),
            versions,
            ["stop"] * versions.num_rows,
        )

    def abort(self) -> None:
        self.rows = {}


class SimulatedRank:
    """One process, which answers one call at a time."""

    def __init__(self, seed: int, dies: bool, delay_s: float) -> None:
        self.random, self.dies, self.delay_s = random.Random(seed), dies, delay_s
        self.version, self.num_engines, self.is_publishing = 1, 1, False
        self.lock = threading.Lock()
        self.engine = SimulatedEngine(self)
        self.groups = GroupsInFlight(cast(Any, self.engine))

    def pause(self) -> None:
        if self.delay_s:
            time.sleep(self.random.random() * self.delay_s)

    def advance(
        self, rows: BatchedDataDict, params: SamplingParams, generation: int, oldest: int, timeout_s: float
    ) -> BatchedDataDict:
        with self.lock:
            assert not self.is_publishing, "a call reached an engine during a publication"
            self.groups.abandon(oldest)
            self.groups.begin(rows, params, generation)
            ended = self.groups.ended(generation, timeout_s)
            versions = ended.generations.policy_versions
            columns = {"policy_version": versions, "uid": ended.rows["uid"], "group_ids": ended.rows["group_ids"]}
            return BatchedDataDict(columns | {"engine_failure": ended.failures}, row_ids=ended.rows.row_ids)

    def interrupt(self) -> None:
        with self.lock:
            self.engine.is_interrupted = self.is_publishing = True

    def replace_failed_engine(self) -> None:
        with self.lock:
            if not self.engine.is_alive:
                self.engine, self.num_engines = SimulatedEngine(self), self.num_engines + 1
                self.groups.move_to(cast(Any, self.engine))

    def publish(self, version: int) -> None:
        with self.lock:
            self.version, self.engine.is_interrupted, self.is_publishing = version, False, False


class SimulatedGroup:
    """The rollout role of several ranks."""

    role, num_ranks = "rollout", RANKS

    def __init__(self, seed: int, dies: bool, delay_s: float) -> None:
        self.every = [SimulatedRank(seed + place, dies, delay_s) for place in range(RANKS)]
        self.ranks = self

    def wait_any(self, pending: Sequence[Any], timeout_s: float) -> list[int]:
        return [0]

    def submit_to(self, rank: int, method: Any, rows: BatchedDataDict, *args: Any) -> Pending[BatchedDataDict]:
        return Pending(partial(self.every[rank].advance, rows, *args))

    def discard_submitted(self) -> list[str]:
        return []

    def pop_usage(self, role: str) -> dict[str, Usage]:
        return {}

    def run(self, method: Any, *args: Any) -> None:
        for rank in self.every:
            vars(type(rank))[method.__name__](rank, *args)


class Weights:
    """The channel of weights: counts versions."""

    def __init__(self, group: SimulatedGroup) -> None:
        self.group, self.version = group, 1

    def publish_again(self, canary: Any) -> float:
        for rank in self.group.every:
            rank.publish(self.version)
        return 0.0

    def publish(self, session: Session, step: StepContext) -> None:
        """Stand in for `sync_weights`."""
        with session.publication():
            session.rollout.run(SimulatedRank.replace_failed_engine)
            self.version += 1
            self.publish_again(None)


class FailingCanary:
    """The channel of weights, whose first publication fails the canary of rank 0; rank 1 goes on."""

    def __init__(self, group: SimulatedGroup) -> None:
        self.group, self.interrupted = group, []

    def publish(self, canary: Any) -> float:
        self.interrupted.append([rank.engine.is_interrupted for rank in self.group.every])
        self.group.every[1].publish(2)
        self.group.every[0].engine.is_alive = False
        return math.inf

    def publish_again(self, canary: Any) -> float:
        self.interrupted.append([rank.engine.is_interrupted for rank in self.group.every])
        for rank in self.group.every:
            rank.publish(2)
        return 0.0


class Ledger:
    """What was trained on: the positions of prompts by step, the lags of tokens, and the lengths of responses."""

    def __init__(self) -> None:
        self.positions: dict[int, list[int]] = {}
        self.lags: list[int] = []
        self.lengths: dict[int, list[int]] = {}

    def record(self, step: int, rollouts: BatchedDataDict, newest: int) -> None:
        self.positions[step] = [int(uid) for uid in rollouts["uid"][::GROUP]]
        self.lags += (newest - rollouts["policy_version"].values).tolist()
        self.lengths[step] = rollouts["policy_version"].lengths.tolist()


def draw(session: Session, step: StepContext) -> Batch:
    start = step.progress.prompts_consumed
    positions = np.arange(start, start + PROMPTS)
    step.advance(prompts_consumed=start + PROMPTS)
    prompts = BatchedDataDict(
        {"input_ids": Ragged.from_rows([torch.tensor([5])] * PROMPTS, torch.int64), "uid": [str(n) for n in positions]}
    )
    return Batch(
        sample_responses(session, DrawnPrompts(prompts, step.number, positions), GROUP, temperature=1.0), as_scored
    )


def started(folder: Path, *, steps: int, lead: int, seed: int = 0, dies: bool = False, delay_s: float = 0.0) -> Any:
    """Return a session with simulated engines, and their weights."""
    session = session_of(
        folder,
        trainer=Trainer(steps=steps, lead=lead, prompts_per_step=PROMPTS, group_size=GROUP),
        rollout=Rollout(engine="vllm", publish="in_flight", max_new_tokens=30, max_num_seqs=4),
    )
    group = SimulatedGroup(seed, dies, delay_s)
    session.groups["rollout"] = cast(WorkerGroup[Any], group)
    session.__dict__["rollout_weights"] = Weights(group)
    return session


def walk(session: SavingSession, ledger: Ledger, until: int | None = None, delay_s: float = 0.0) -> AheadQueue:
    queue, delays = AheadQueue(session, draw), random.Random(1)
    weights = cast(Weights, session.rollout_weights)
    if session.restored is not None:  # the first publication
        weights.version += 1
        weights.publish_again(None)
    for step in session.steps("train", session.config.trainer.steps):
        ledger.record(step.number, queue.take(step).rollouts, weights.version)
        if delay_s:
            time.sleep(delays.random() * delay_s)
        queue.publish(step)
        if step.number == until:
            session.progress = step.progress
            break
    return queue


@pytest.fixture(autouse=True)
def publications(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the simulated weights stand in for the transfer of real ones, and look for dead engines often."""

    def publish(session: Session, step: StepContext) -> None:
        cast(Weights, session.rollout_weights).publish(session, step)

    monkeypatch.setattr(ahead, "sync_weights", publish)
    monkeypatch.setattr(ahead, "_LOOK_S", 0.005)


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
    assert sum(rank.num_engines for rank in session.rollout.every) > RANKS, "no engine died"
    assert threading.active_count() < 20


def test_batches_are_sampled_while_earlier_ones_are(tmp_path: Path):
    session = started(tmp_path, steps=30, lead=3)
    most: list[int] = []
    group = session.rollout

    def submit_to(rank: int, method: Any, rows: BatchedDataDict, *args: Any) -> Any:
        number, oldest = args[1], args[2]
        most.append(number - oldest)
        return SimulatedGroup.submit_to(group, rank, method, rows, *args)

    group.submit_to = submit_to
    walk(session, Ledger(), delay_s=2e-3)
    assert max(most) > 0


def test_a_response_has_tokens_of_several_versions(tmp_path: Path):
    session = started(tmp_path, steps=60, lead=2, delay_s=2e-4)
    mixed: list[bool] = []

    class Watching(Ledger):
        def record(self, step: int, rollouts: BatchedDataDict, newest: int) -> None:
            mixed.extend(row.unique().numel() > 1 for row in rollouts["policy_version"].rows())

    walk(session, Watching())
    assert any(mixed)


def test_runs_killed_at_random_train_on_every_prompt_once_and_on_responses_of_the_same_lengths(tmp_path: Path):
    steps, lead, kills = 60, 2, random.Random(5)
    undisturbed = Ledger()
    (tmp_path / "whole").mkdir()
    walk(started(tmp_path / "whole", steps=steps, lead=lead), undisturbed)
    ledger, progress, checkpoint, runs = Ledger(), None, None, 0
    while progress is None or progress.step < steps:
        folder = tmp_path / f"run-{runs}"
        folder.mkdir()
        session = started(folder, steps=steps, lead=lead, seed=runs, delay_s=2e-4)
        if progress is not None:
            session.progress, session.restored = progress, checkpoint
        last = min(steps, session.progress.step + kills.randrange(1, 3))
        queue = walk(session, ledger, until=last, delay_s=1e-3)
        checkpoint = folder / f"step-{last}"
        checkpoint.mkdir()
        queue.save(checkpoint)  # what is drawn after this is lost
        progress, runs = session.progress, runs + 1
        for begun in queue._waiting:
            begun.drawn()
    assert runs >= 30
    assert ledger.positions == undisturbed.positions
    # Lengths depend on the seeds alone in this simulation, so that any choice among responses shows.
    assert ledger.lengths == undisturbed.lengths
    assert max(ledger.lags) <= lead


def test_a_checkpoint_has_drawn_batches_and_where_the_others_begin(tmp_path: Path):
    session = started(tmp_path, steps=10, lead=3)
    rank = session.rollout.every[0]
    queue, ledger = AheadQueue(session, draw), Ledger()
    for step in session.steps("train", 10):
        ledger.record(step.number, queue.take(step).rollouts, session.rollout_weights.version)
        queue.publish(step)
        session.progress = step.progress
        break
    queue.drain()
    rank.lock.acquire()  # the engine hangs while the next batch is begun
    try:
        queue._begin_until(5)
        (tmp_path / "step-1").mkdir()
        queue.save(tmp_path / "step-1")
    finally:
        rank.lock.release()
    document = SimpleNamespace(**ahead.read_object(tmp_path / "step-1/ahead/ahead.json"))
    states = [(entry["step"], entry["start"], entry["is_drawn"]) for entry in document.batches]
    assert states == [(2, 3, True), (3, 6, True), (4, 9, True), (5, 12, False)]
    assert sorted(path.name for path in (tmp_path / "step-1/ahead").iterdir() if path.is_dir()) == [
        "step-2",
        "step-3",
        "step-4",
    ]
    assert Progress(**vars(session.progress)).prompts_consumed == PROMPTS


def test_no_engine_samples_while_weights_are_published_again_after_a_failed_canary(tmp_path: Path):
    session = started(tmp_path, steps=1, lead=1)
    channel = session.__dict__["rollout_weights"] = FailingCanary(session.rollout)
    sync_weights(session)
    assert channel.interrupted == [[True, True], [True, True]]
    assert [rank.num_engines for rank in session.rollout.every] == [2, 1]
    assert not any(rank.engine.is_interrupted for rank in session.rollout.every)


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

"""Simulated ranks and engines that sample, die and are replaced at random, for runs of real queues and routers."""

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Checkpoint, Rollout, Trainer
from rlpack.distributed.calls import Call, Pending
from rlpack.distributed.usage import Usage
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch, as_scored
from rlpack.recipes.driver.engine_restarts import replace_failed_engines
from rlpack.recipes.driver.rollout_stages import DrawnPrompts, sample_responses
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.engine import FinishedRow
from rlpack.rollout.in_flight import RowsInFlight
from rlpack.rollout.types import SamplingParams
from tests.unit.recipes.driver.sessions import SavingSession, session_of

PROMPTS, GROUP, RANKS = 3, 2, 2


class SimulatedEngine:
    """Samples a token for each row in flight at a time, and stamps it with the version of its weights."""

    def __init__(self, rank: "SimulatedRank") -> None:
        self.rank, self.is_alive, self.is_interrupted = rank, True, False
        self.calls_left = rank.random.randint(100, 500) if rank.dies else math.inf  # so no group fails three times
        self.rows: dict[int, list[int]] = {}
        self.left: dict[int, int] = {}

    @property
    def policy_version(self) -> int:
        return self.rank.version

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

    def abort(self, keys: Sequence[int] | None = None) -> None:
        self.rows = {} if keys is None else {key: row for key, row in self.rows.items() if key not in keys}


class SimulatedRank:
    """One process, which answers one call at a time."""

    def __init__(self, seed: int, dies: bool, delay_s: float) -> None:
        self.random, self.dies, self.delay_s = random.Random(seed), dies, delay_s
        self.version, self.num_engines, self.is_publishing = 1, 1, False
        self.lock = threading.Lock()
        self.engine = SimulatedEngine(self)
        self.in_flight = RowsInFlight(cast(Any, self.engine))

    def pause(self) -> None:
        if self.delay_s:
            time.sleep(self.random.random() * self.delay_s)

    def advance(
        self, rows: BatchedDataDict, params: SamplingParams, generation: int, oldest: int, timeout_s: float, enough: int
    ) -> BatchedDataDict:
        with self.lock:
            assert not self.is_publishing, "a call reached an engine during a publication"
            self.in_flight.abandon(oldest)
            self.in_flight.begin(rows, params, generation)
            ended = self.in_flight.ended(generation, timeout_s, enough)
            versions = Ragged.from_rows(
                [torch.tensor(row or [], dtype=torch.int32) for row in ended.responses], torch.int32
            )
            columns = {"policy_version": versions, "uid": ended.rows["uid"], "group_ids": ended.rows["group_ids"]}
            failed = {
                "engine_failure": ended.failures,
                "engine_has_failed": torch.full((len(ended.failures),), any(ended.has_engine_failed)),
                "engine_version": torch.tensor(ended.versions, dtype=torch.int64),
            }
            return BatchedDataDict(columns | failed, row_ids=ended.rows.row_ids)

    def interrupt(self) -> None:
        with self.lock:
            self.engine.is_interrupted = self.is_publishing = True

    def replace_failed_engine(self) -> bool:
        with self.lock:
            if self.engine.is_alive:
                return False
            self.engine, self.num_engines = SimulatedEngine(self), self.num_engines + 1
            self.engine.is_interrupted = self.is_publishing
            self.in_flight.move_to(cast(Any, self.engine))
            return True

    def publish(self, version: int) -> None:
        with self.lock:
            self.version = version

    def resume(self) -> None:
        with self.lock:
            self.engine.is_interrupted = self.is_publishing = False


class SimulatedGroup:
    """The rollout role of several ranks."""

    role, num_ranks, num_starts = "rollout", RANKS, 1

    def __init__(self, seed: int, dies: bool, delay_s: float) -> None:
        self.every = [SimulatedRank(seed + place, dies, delay_s) for place in range(RANKS)]
        self.ranks = self

    def wait_any(self, pending: Sequence[Any], timeout_s: float) -> list[int]:
        return [0]

    def submit(self, call: Call) -> Pending[list[Any]]:
        assert len(call.args_of_rank) == RANKS
        return Pending(lambda: [vars(SimulatedRank)[call.method](rank) for rank in self.every])

    def submit_to(
        self, rank: int, method: Any, rows: BatchedDataDict, *args: Any, of_start: int, answer_s: float
    ) -> Pending[BatchedDataDict]:
        return Pending(partial(self.every[rank].advance, rows, *args))

    def discard_submitted(self) -> list[str]:
        return []

    def pop_usage(self, role: str) -> dict[str, Usage]:
        return {}

    def run(self, method: Any, *args: Any) -> None:
        if method.__name__ == "resume":
            assert len({rank.version for rank in self.every}) == 1, "an engine goes on before all have the weights"
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
            replace_failed_engines(session.rollout, session.engine_access)
            self.version += 1
            self.publish_again(None)


class FailingCanary:
    """The channel of weights, whose first publication fails the canary of rank 0."""

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
    """What was trained on: the positions of prompts by step, the lags of tokens, and the lengths of responses.

    A step that a resumed run takes again replaces the earlier one; `steps` has both.
    """

    def __init__(self) -> None:
        self.positions: dict[int, list[int]] = {}
        self.lags: list[int] = []
        self.lengths: dict[int, list[int]] = {}
        self.steps: list[int] = []

    def record(self, step: int, rollouts: BatchedDataDict, newest: int) -> None:
        self.steps.append(step)
        self.positions[step] = [int(uid) for uid in rollouts["uid"][::GROUP]]
        self.lags += (newest - rollouts["policy_version"].values).tolist()
        self.lengths[step] = rollouts["policy_version"].lengths.tolist()


def draw(session: Session, step: StepContext) -> Batch:
    return Batch(
        sample_responses(session, _drawn(session, step), GROUP, temperature=1.0, metrics=step.metrics), as_scored
    )


def draw_groups(session: Session, step: StepContext, on_groups: Callable[[Batch], None]) -> None:
    def report(part: BatchedDataDict) -> None:
        lengths, size = part["policy_version"].lengths, part.num_rows
        columns = {"response_lengths": lengths, "finish_reason": ["stop"] * size, "rewards": lengths.float()}
        on_groups(Batch(part.union(columns | {"valid": torch.ones(size, dtype=torch.bool)}), as_scored))

    sample_responses(session, _drawn(session, step), GROUP, temperature=1.0, metrics=step.metrics, on_part=report)


def _drawn(session: Session, step: StepContext) -> DrawnPrompts:
    start, count = step.progress.prompts_consumed, session.config.trainer.prompts_per_step
    positions = np.arange(start, start + count)
    step.advance(prompts_consumed=start + count)
    prompts = BatchedDataDict(
        {"input_ids": Ragged.from_rows([torch.tensor([5])] * count, torch.int64), "uid": [str(n) for n in positions]}
    )
    return DrawnPrompts(prompts, step.number, positions)


def started(
    folder: Path,
    *,
    steps: int,
    lead: int,
    seed: int = 0,
    dies: bool = False,
    delay_s: float = 0.0,
    checkpoint_every: int = 10**6,
    **trainer: Any,
) -> Any:
    """Return a session with simulated engines, and their weights."""
    session = session_of(
        folder,
        checkpoint=Checkpoint(every=checkpoint_every),
        trainer=Trainer(**{"steps": steps, "lead": lead, "prompts_per_step": PROMPTS, "group_size": GROUP} | trainer),
        rollout=Rollout(engine="vllm", publish="in_flight", max_new_tokens=30, max_num_seqs=4),
    )
    group = SimulatedGroup(seed, dies, delay_s)
    session.groups["rollout"] = cast(WorkerGroup[Any], group)
    session.__dict__["rollout_weights"] = Weights(group)
    return session


def walk(
    session: SavingSession,
    ledger: Ledger,
    until: int | None = None,
    delay_s: float = 0.0,
    moment: Callable[[], None] = lambda: None,
) -> AheadQueue:
    """Take the steps of a run; `moment` is called after each part of a step."""
    queue, delays = AheadQueue(session, draw, draw_groups), random.Random(1)
    weights = cast(Weights, session.rollout_weights)
    if session.restored is not None:  # the first publication
        weights.version += 1
        weights.publish_again(None)
    for step in session.steps("train", session.config.trainer.steps):
        rollouts = queue.take(step).rollouts
        moment()
        if delay_s:
            time.sleep(delays.random() * delay_s)
        ledger.record(step.number, rollouts, weights.version)
        moment()
        queue.publish(step)
        moment()
        if step.number == until:
            session.progress = step.progress
            break
    return queue

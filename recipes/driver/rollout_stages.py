"""Rollout stages: draw prompts and generate responses.

Row order never changes: every role returns its rows in the order it got them.
"""

import math
import time
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.columns import positions_of
from rlpack.config.schema import Config
from rlpack.data.sampler import prompt_positions, row_seeds
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.models.stop_tokens import stop_token_ids
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.recipes.driver.engine_slots import Turn, turn_of_batch, turn_of_evaluation
from rlpack.recipes.driver.router import Router
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.engine import STREAMING_ENGINES
from rlpack.rollout.types import SamplingParams
from rlpack.workers.rollout import RolloutWorker

# Longest wait of an engine's call for a group that ends, in seconds; shorter where publications wait for calls.
_CALL_S, _SHORT_CALL_S = 1.0, 0.1

# Called with each part of a batch as soon as it is generated.
OnPart = Callable[[BatchedDataDict], None]


class DrawnPrompts(NamedTuple):
    """Prompts drawn for a step.

    Attributes:
        prompts: the prompts' rows.
        step: number of the step.
        positions: positions in the run's stream of prompts, int64 [prompts]; with the step they seed the samples.
        evaluated_during: the step that trains while they are evaluated; None for a batch, or if none trains.
    """

    prompts: BatchedDataDict
    step: int
    positions: np.ndarray
    evaluated_during: int | None = None

    @property
    def turn(self) -> Turn:
        """Return the turn in which their responses are needed."""
        during = self.evaluated_during
        return turn_of_batch(self.step) if during is None else turn_of_evaluation(during)


class SamplingSession(Protocol):
    """The part of a session that sampling needs.

    Attributes:
        engine_access: the turns of generations and publications.
    """

    engine_access: EngineAccess

    @property
    def config(self) -> Config:
        """The whole configuration."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        ...

    @property
    def rollout(self) -> WorkerGroup[RolloutWorker]:
        """The generating ranks."""
        ...

    def renew_engines(self, generation: int, none_is_left: bool) -> bool:
        """Replace the engines that failed, for a generation; return whether that was possible.

        Args:
            generation: its number.
            none_is_left: whether all have failed, so that the generation can't continue with the others.
        """
        ...


class GroupWaits:
    """How long rows that are complete wait for the last ones of their batch.

    >>> clock = iter([1.0, 2.0, 4.0])
    >>> waits = GroupWaits(lambda: next(clock))
    >>> waits.add(2), waits.add(1), waits.add(1)
    (None, None, None)
    >>> waits.mean_s()  # 3, 3, 2 and 0 seconds
    2.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without rows.

        Args:
            clock: returns the time in seconds.
        """
        self._clock, self._last, self._rows, self._sum = clock, 0.0, 0, 0.0

    def add(self, rows: int) -> None:
        """Count rows that are complete now."""
        self._last = self._clock()
        self._rows += rows
        self._sum += rows * self._last

    def mean_s(self) -> float:
        """Return the mean wait of all rows, in seconds; 0 without any."""
        return self._last - self._sum / self._rows if self._rows else 0.0


def draw_prompts(session: Session, step: StepContext, count: int | None = None) -> DrawnPrompts:
    """Draw the step's next prompts: `count` rows, or `trainer.prompts_per_step`.

    The rows follow the last ones drawn, so a resumed run skips and repeats none, even if `trainer.prompts_per_step` has
    changed.
    """
    start = step.progress.prompts_consumed
    count = session.config.trainer.prompts_per_step if count is None else count
    epochs, rows = prompt_positions(session.config.seed, len(session.prompts), start, count)
    step.advance(prompts_consumed=start + count)
    step.metrics |= {"prompts_consumed": start + count, "epoch": float(epochs[-1])}
    return DrawnPrompts(session.prompts.batch(rows), step.number, np.arange(start, start + count))


def generate(
    session: Session, step: StepContext, drawn: DrawnPrompts, on_part: OnPart | None = None
) -> BatchedDataDict:
    """Return the rollout batch: `group_size` responses per prompt, B = prompts × group_size rows.

    The batch has the columns of `rlpack.rollout.assemble.assemble`, `completion`, and the dataset's own. With
    `on_part` the batch is generated in parts of whole groups, and `on_part` gets each part before the next begins.
    """
    settings = session.config
    with step.timer("generate"):
        rollouts = sample_responses(
            *(session, drawn, settings.trainer.group_size),
            temperature=settings.rollout.temperature,
            on_part=on_part,
            metrics=step.metrics,
        )
    report_lengths(step, rollouts)
    return rollouts


def generate_greedily(session: Session, step: StepContext, drawn: DrawnPrompts, on_part: OnPart) -> None:
    """Generate the greedy response to each prompt; `on_part` gets the parts."""
    with step.timer("greedy"):
        sample_responses(session, drawn, 1, temperature=0.0, on_part=on_part, metrics=step.metrics)


def report_lengths(step: StepContext, rollouts: BatchedDataDict) -> None:
    """Record the metrics of response lengths."""
    counts = rollouts["response_lengths"].float()
    step.metrics |= {
        "rollout/response_tokens_mean": counts.mean().item(),
        "rollout/response_tokens_max": counts.max().item(),
        "rollout/truncated_fraction": float(np.mean([reason == "length" for reason in rollouts["finish_reason"]])),
    }


def sample_responses(
    session: SamplingSession,
    drawn: DrawnPrompts,
    samples: int,
    *,
    temperature: float,
    on_part: OnPart | None = None,
    metrics: dict[str, float],
) -> BatchedDataDict:
    """Return `samples` adjacent responses per prompt.

    The position of a prompt in the run determines the random streams of its responses. With `on_part` the batch is
    generated in parts of whole groups, and `on_part` gets each part before the next begins. A streaming engine adds
    `rollout/repeated_rows` and `perf/group_wait_s` to `metrics`.
    """
    prompts = drawn.prompts.repeat_interleave(samples)
    prompts["group_ids"] = torch.arange(drawn.prompts.num_rows).repeat_interleave(samples)
    prompts["seeds"] = torch.from_numpy(sample_seeds(session.config.seed, drawn, samples).view(np.int64))
    params = _sampling_params(session, temperature)
    if session.config.rollout.engine in STREAMING_ENGINES:
        return _stream(session, prompts, params, drawn.turn, on_part, metrics)
    sizes = [prompts.num_rows] if on_part is None else _part_rows(session, drawn.prompts.num_rows, samples)
    parts: list[BatchedDataDict] = []
    for part in prompts.split(sizes):
        with session.engine_access.load.busy(session.rollout.dp_size):
            generated = session.rollout.run(RolloutWorker.generate, part, params)
        parts.append(generated.union(dict(part.drop(["seeds", *(name for name in part if name in generated)]))))
        if on_part is not None:
            on_part(parts[-1])
    return BatchedDataDict.concat(parts) if len(parts) > 1 else parts[0]


def _stream(
    session: SamplingSession,
    prompts: BatchedDataDict,
    params: SamplingParams,
    turn: Turn,
    on_part: OnPart | None,
    metrics: dict[str, float],
) -> BatchedDataDict:
    """Return a response to each prompt, in the order of the prompts; `on_part` gets groups as soon as they end."""
    router = Router(
        session.rollout,
        params,
        capacity=session.config.rollout.max_num_seqs,
        access=session.engine_access,
        replace_engines=session.renew_engines,
        turn=turn,
        call_s=_SHORT_CALL_S if session.config.rollout.publish == "in_flight" else _CALL_S,
    )
    parts: list[BatchedDataDict] = []
    waits = GroupWaits()
    with closing(router.run(prompts)) as groups:  # so that it gives up the engines if `on_part` raises
        for ended in groups:
            waits.add(ended.num_rows)
            given = prompts.select(positions_of(prompts.row_ids, ended.row_ids))
            parts.append(ended.union(dict(given.drop(["seeds", *(name for name in given if name in ended)]))))
            if on_part is not None:
                on_part(parts[-1])
    metrics["perf/group_wait_s"] = metrics.get("perf/group_wait_s", 0.0) + waits.mean_s()
    metrics["rollout/repeated_rows"] = metrics.get("rollout/repeated_rows", 0.0) + router.repeated
    batch = BatchedDataDict.concat(parts)
    return batch.select(np.argsort(batch.row_ids))


def sample_seeds(seed: int, drawn: DrawnPrompts, samples: int) -> np.ndarray:
    """Return the seed of each response to drawn prompts, uint64 [prompts × samples]."""
    return row_seeds(seed, drawn.step, drawn.positions, samples)


def _sampling_params(session: SamplingSession, temperature: float) -> SamplingParams:
    settings = session.config.rollout
    return SamplingParams(
        temperature=temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new_tokens,
        stop_token_ids=stop_token_ids(session.config, session.tokenizer),
    )


def _part_rows(session: SamplingSession, prompts: int, samples: int) -> list[int]:
    """Return the number of rows in each part.

    A part has whole groups, and at most as many rows as the engines run at a time. Parts are even, so that no engine
    is left with a few rows at the end.
    """
    capacity = session.rollout.dp_size * session.config.rollout.max_num_seqs
    parts = math.ceil(prompts / max(1, capacity // samples))
    return [samples * len(groups) for groups in np.array_split(np.arange(prompts), max(1, parts))]

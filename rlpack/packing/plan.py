"""The plan: which rows share a microbatch, on which rank, in which optimizer step.

`rlpack.packing.analysis.invariants` numbers the guarantees of a plan and checks them.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlpack.packing.analysis.metrics import PackingMetrics
from rlpack.packing.batching import Batching
from rlpack.packing.errors import PackingError
from rlpack.packing.request import PlanRequest


@dataclass(frozen=True, eq=False)
class Microbatch:
    """The rows of one forward and backward on one rank.

    Attributes:
        rows: ascending row numbers, int64 [n]: in the batch (`MicrobatchPlan`) or among the rank's rows (`RankPlan`).
        length: padded length: slots of the packed row in packed mode, the width of each row in the other two.
        is_dummy: whether it holds no rows; it runs forward and backward with zero weight, to keep ranks in lock step.
    """

    rows: np.ndarray
    length: int
    is_dummy: bool


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's part of a plan, small enough to travel with the rank's shard.

    Attributes:
        batching: the mode, the budget and the alignments.
        rank: the data-parallel rank.
        num_ranks: number of data-parallel ranks.
        rows: rows of the batch on this rank, in dispatch order, int64 [n].
        lengths: tokens of each of these rows after truncation, int64 [n].
        shared: leading tokens of each that another row of the microbatch holds, int64 [n].
        owners: index in `rows` of the row that holds them; of the row itself if it shares nothing, int64 [n].
        counts: rows of each microbatch, int64 [M], over all optimizer steps.
        padded_lengths: padded length of each microbatch, int64 [M].
        step_bounds: first microbatch of each optimizer step, and M, int64 [steps + 1].
    """

    batching: Batching
    rank: int
    num_ranks: int
    rows: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray
    owners: np.ndarray
    counts: np.ndarray
    padded_lengths: np.ndarray
    step_bounds: np.ndarray

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return self.step_bounds.size - 1

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return the microbatches of an optimizer step; their `rows` index this rank's `rows`.

        Raises:
            PackingError: there is no such step.
        """
        if not 0 <= step < self.num_steps:
            raise PackingError(f"optimizer step {step} is not in the plan, which has {self.num_steps}")
        first, stop = int(self.step_bounds[step]), int(self.step_bounds[step + 1])
        bounds = np.cumsum(self.counts) - self.counts
        return [
            Microbatch(
                rows=np.arange(bounds[at], bounds[at] + self.counts[at]),
                length=int(self.padded_lengths[at]),
                is_dummy=bool(self.counts[at] == 0),
            )
            for at in range(first, stop)
        ]


@dataclass(frozen=True, eq=False)
class MicrobatchPlan:
    """The microbatches of one batch, over all ranks and optimizer steps.

    Attributes:
        request: the checked arguments of `make_plan`; if groups were split, with their new ids.
        metrics: quality of the plan.
        lengths: tokens of each row after truncation, int64 [B]; 0 for a dropped one.
        shared: leading tokens of each row that its owner holds, int64 [B].
        owners: row of the same microbatch that holds them; the row itself if it shares nothing, int64 [B].
        order: the batch's rows in dispatch order, rank by rank, int64 [B − dropped].
        inverse: position of each row in `order`, int64 [B]; −1 for a dropped one.
        step_of_row: optimizer step of each row, int64 [B]; −1 for a dropped one.
        truncated: rows that were truncated, int64.
        dropped: rows that were left out, int64.
        counts: rows of each microbatch, int64 [ranks, M], over all optimizer steps.
        padded_lengths: padded length of each microbatch, int64 [ranks, M].
        step_bounds: first microbatch of each optimizer step, and M, int64 [steps + 1]; the same on every rank.
    """

    request: PlanRequest
    metrics: PackingMetrics
    lengths: np.ndarray
    shared: np.ndarray
    owners: np.ndarray
    order: np.ndarray
    inverse: np.ndarray
    step_of_row: np.ndarray
    truncated: np.ndarray
    dropped: np.ndarray
    counts: np.ndarray
    padded_lengths: np.ndarray
    step_bounds: np.ndarray

    @property
    def batching(self) -> Batching:
        """The mode, the budget and the alignments."""
        return self.request.batching

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch, dropped ones included."""
        return self.request.lengths.size

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return self.step_bounds.size - 1

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.request.dp_size

    @cached_property
    def _rank_bounds(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.counts.sum(axis=1))))

    def rank_plan(self, rank: int) -> RankPlan:
        """Return one rank's part of the plan.

        Raises:
            PackingError: there is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise PackingError(f"rank {rank} is not in the plan, which has {self.num_ranks}")
        first = self._rank_bounds[rank]
        rows = self.order[first : self._rank_bounds[rank + 1]].copy()
        return RankPlan(
            batching=self.batching,
            rank=rank,
            num_ranks=self.num_ranks,
            rows=rows,
            lengths=self.lengths[rows],
            shared=self.shared[rows],
            owners=self.inverse[self.owners[rows]] - first,
            counts=self.counts[rank].copy(),
            padded_lengths=self.padded_lengths[rank].copy(),
            step_bounds=self.step_bounds,
        )

    def microbatches(self, rank: int, step: int) -> list[Microbatch]:
        """Return the microbatches of an optimizer step on one rank; their `rows` index the batch.

        Raises:
            PackingError: there is no such rank or step.
        """
        plan = self.rank_plan(rank)
        return [
            Microbatch(plan.rows[microbatch.rows], microbatch.length, microbatch.is_dummy)
            for microbatch in plan.microbatches(step)
        ]

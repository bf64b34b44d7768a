"""Rows of which several begin with the same prompt, for plans and forecasts of `batching.share_prompts`."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from rlpack.packing.analysis.cost import Cost
from rlpack.packing.batching import Batching
from rlpack.packing.make_plan import make_plan
from rlpack.packing.plan import MicrobatchPlan
from rlpack.packing.prefixes import owners_of


def can_share_prompts(batching: Batching) -> bool:
    """Return whether the mode and the alignment of a batching allow `share_prompts`."""
    return batching.mode == "packed" and batching.pad_to_multiple == 1 and not batching.equal_rows


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """The prompts of a batch's rows.

    Attributes:
        groups: id of each row's prompt, int64 [B].
        prefixes: tokens of each row's prompt, int64 [B].
    """

    groups: np.ndarray
    prefixes: np.ndarray

    def repeated(self, count: int) -> Self:
        """Return the prompts of `count` rows, which repeat these as `np.resize` does; repetitions share no prompt."""
        repetition = np.arange(count) // max(1, self.groups.size)
        _, groups = np.unique(self.groups, return_inverse=True)
        return replace(
            self,
            groups=np.resize(groups, count) + repetition * self.groups.size,
            prefixes=np.resize(self.prefixes, count),
        )

    def shared_in(self, batching: Batching) -> Batching:
        """Return the batching with `share_prompts`, or without it if its mode or alignment allows no sharing."""
        return replace(batching, share_prompts=can_share_prompts(batching))

    def least_slots(self, lengths: np.ndarray, budget: int) -> np.ndarray:
        """Return the fewest slots of each row within the budget, int64 [n], whatever rows its microbatch holds.

        The first row of a prompt has slots for it; the others may share it. In every microbatch these numbers add up to
        its slots at most, so they give a lower bound on the number of microbatches.

        >>> prompts = SharedPrompts(np.array([0, 0, 1]), np.array([4, 4, 2]))
        >>> prompts.least_slots(np.array([6, 7, 3]), budget=8).tolist()
        [6, 3, 3]

        Args:
            lengths: tokens of each row, int64 [B].
            budget: slots of a microbatch; longer rows are left out.
        """
        fitting = np.flatnonzero(lengths <= budget)
        is_first = owners_of(self.groups[fitting]) == np.arange(fitting.size)
        return lengths[fitting] - np.where(is_first, 0, self.prefixes[fitting])


def plan_rows(
    lengths: np.ndarray,
    batching: Batching,
    prompts: SharedPrompts | None,
    *,
    dp_size: int,
    mini_batch_size: int | None = None,
    cost: Cost | None = None,
) -> MicrobatchPlan:
    """Return the plan of rows, which share their prompts if the batching does, as in a run.

    Args:
        lengths: tokens of each row, int64 [B].
        batching: the batching.
        prompts: the prompts of the rows; None if they aren't known.
        dp_size: number of data-parallel ranks.
        mini_batch_size: rows of an optimizer step; None for all.
        cost: cost model of a row; None counts slots.

    Raises:
        PackingError: as `make_plan`.
    """
    used = prompts if batching.share_prompts else None
    return make_plan(
        lengths,
        batching,
        dp_size=dp_size,
        mini_batch_size=mini_batch_size,
        groups=None if used is None else used.groups,
        split_groups=True,
        prefixes=None if used is None else used.prefixes,
        cost=cost,
    )

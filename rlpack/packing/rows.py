"""Rows: the rows of a batch after truncation and dropping, and the items they are planned as.

Invariants:

1. No item spans two optimizer steps.
2. An item above the token budget is dropped or gets its own microbatch, as `batching.overlong` says; else it is an
   error.
3. Items are numbered in the order of their first rows.

`tests/unit/packing/test_make_plan.py` asserts them.
"""

from dataclasses import dataclass, replace

import numpy as np

from rlpack.packing.algorithms.packers import bins_of
from rlpack.packing.algorithms.sorting import by_first_row
from rlpack.packing.bins import pack_items
from rlpack.packing.errors import PackingError
from rlpack.packing.prefixes import owners_of, shared_tokens
from rlpack.packing.request import PlanRequest
from rlpack.packing.row_sets import RowSets

# The ranks that share a microbatch have max_tokens slots each; a plan knows only their sum.
_SLOTS = "slots of a microbatch (batching.max_tokens of each rank that shares it)"


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a batch and the items they are planned as.

    An item is a single row, or a group that stays together.

    Attributes:
        request: the request; if groups were split, with their new ids.
        lengths: tokens of each row after truncation, 0 for a dropped row, int64 [B].
        shared: leading tokens of each row that the first row of its item holds, int64 [B].
        item: item of each row, int64 [B].
        items: rows, slots and costs of each item.
        oversized: items above the token budget, bool [I].
        num_groups_split: number of groups with rows that no microbatch could hold together.
    """

    request: PlanRequest
    lengths: np.ndarray
    shared: np.ndarray
    item: np.ndarray
    items: RowSets
    oversized: np.ndarray
    num_groups_split: int = 0

    @property
    def own_slots(self) -> np.ndarray:
        """Slots of each row in its microbatch, without those of tokens that it shares, int64 [B]."""
        return self.request.batching.slots_of(self.lengths) - self.shared

    @property
    def dropped(self) -> np.ndarray:
        """Rows that are left out, bool [B]."""
        return self.dropped_items[self.item]

    @property
    def dropped_items(self) -> np.ndarray:
        """Items that are left out, bool [I]."""
        return self.oversized & (self.request.batching.overlong == "drop")

    def items_of_steps(self) -> list[np.ndarray]:
        """Return the items of each optimizer step, dropped ones excluded, int64 each."""
        step_of_item = np.zeros(self.items.size, dtype=np.int64)
        step_of_item[self.item] = self.request.step_of_row
        bounds = np.searchsorted(step_of_item, np.arange(1, self.request.num_steps))
        remaining = ~self.dropped_items
        steps = np.split(np.arange(self.items.size), bounds)[: self.request.num_steps]
        return [items[remaining[items]] for items in steps]


def resolve_rows(request: PlanRequest) -> Rows:
    """Truncate overlong rows and gather rows into items.

    Raises:
        PackingError: a row or group is above the budget and `overlong` is "error", a group spans two optimizer steps,
            or not even an empty row fits.
    """
    batching = request.batching
    lengths = _resolve_lengths(request)
    items = RowSets.of_rows(batching.slots_of(lengths), request.balanced_cost)
    item, shared, num_split = np.arange(lengths.size), np.zeros_like(lengths), 0
    if request.groups is not None:
        item = by_first_row(request.groups)
        _check_steps(request, request.groups, item)
        if request.split_groups:
            item, num_split = _split_groups(request, items, _gather(request, lengths, item)[0], item)
            request = replace(request, groups=item)
        items, shared = _gather(request, lengths, item)
    oversized = items.slots_in(batching.mode) > batching.budget
    rows = Rows(request, lengths, shared, item, items, oversized, num_split)
    _check_items(rows)
    dropped = rows.dropped
    return replace(rows, lengths=np.where(dropped, 0, lengths), shared=np.where(dropped, 0, shared))


def _gather(request: PlanRequest, lengths: np.ndarray, item: np.ndarray) -> tuple[RowSets, np.ndarray]:
    """Return the items, and the leading tokens of each row that the first row of its item holds, int64 [B]."""
    shared = np.zeros_like(lengths)
    if request.prefixes is not None:
        shared = shared_tokens(lengths, request.prefixes, owners_of(item))
    return RowSets.of_rows(request.batching.slots_of(lengths), request.balanced_cost, shared).merge(item), shared


def _resolve_lengths(request: PlanRequest) -> np.ndarray:
    """Return the tokens of each row after truncation, int64 [B]."""
    batching, lengths = request.batching, request.lengths
    budget, multiple = batching.budget, batching.alignment
    if multiple > budget:
        key = "pad_to_multiple" if batching.mode == "packed" else "length_multiple"
        raise PackingError(f"batching.{key} ({multiple}) exceeds the {budget} {_SLOTS}; lower it")
    if batching.overlong == "truncate":
        return np.minimum(lengths, budget // multiple * multiple)
    overlong = batching.slots_of(lengths) > budget
    if overlong.any() and batching.overlong == "error":
        row = int(np.flatnonzero(overlong)[0])
        rounded = "" if multiple == 1 else f" (rounded up to a multiple of {multiple})"
        raise PackingError(
            f"sequence {row} has {lengths[row]} tokens{rounded}, over the {budget} {_SLOTS}; "
            "raise batching.max_tokens or set batching.overlong=truncate"
        )
    return lengths


def _check_steps(request: PlanRequest, groups: np.ndarray, item: np.ndarray) -> None:
    """Raise a `PackingError` if a group has rows in two optimizer steps."""
    steps = request.step_of_row
    first_row = np.unique(item, return_index=True)[1]
    first_step = steps[first_row][item]
    outside = np.flatnonzero(steps != first_step)
    if outside.size:
        row = int(outside[0])
        raise PackingError(
            f"group {groups[row]} has rows in optimizer steps {first_step[row]} and {steps[row]}; "
            f"choose a mini-batch size ({request.rows_per_step}) that holds whole groups"
        )


def _split_groups(request: PlanRequest, rows: RowSets, groups: RowSets, item: np.ndarray) -> tuple[np.ndarray, int]:
    """Split each group above the budget into as few items as possible.

    Rows above the budget become items by themselves. A group with a row that is dropped is not split: it is dropped
    as a whole, unless its rows are together only to share a prompt. Tokens that rows share are counted for each row, so
    parts may be smaller than necessary.

    Args:
        request: the request.
        rows: each row by itself.
        groups: the groups.
        item: group of each row, int64 [B].

    Returns:
        The item of each row, int64 [B], and the number of groups that were split.
    """
    batching = request.batching
    oversized = rows.slots_in(batching.mode) > batching.budget
    over = (groups.counts > 1) & _is_above_limits(request, groups)
    if batching.overlong == "drop" and request.prompts is None:
        over[item[oversized]] = False
    members, pieces, unused = bins_of(item), item.copy(), groups.size
    for group in np.flatnonzero(over).tolist():
        own = oversized[members[group]]
        sharing = members[group][~own]
        labels, _ = pack_items(batching, rows.select(sharing), request.seed)
        num_bins = int(labels.max(initial=-1)) + 1
        pieces[sharing] = unused + labels
        pieces[members[group][own]] = unused + num_bins + np.arange(own.sum())
        unused += num_bins + int(own.sum())
    groups_of_rows = item if request.prompts is None else request.prompts
    return by_first_row(pieces), np.unique(groups_of_rows[over[item]]).size


def _is_above_limits(request: PlanRequest, groups: RowSets) -> np.ndarray:
    """Return which groups no microbatch can hold, bool [G]."""
    batching = request.batching
    too_many_rows = (groups.counts > batching.micro_batch_size) & (batching.mode == "fixed")
    return (groups.slots_in(batching.mode) > batching.budget) | too_many_rows


def _check_items(rows: Rows) -> None:
    """Raise a `PackingError` for an item that no microbatch can hold, unless it is dropped or gets its own."""
    request, batching = rows.request, rows.request.batching
    if batching.mode == "fixed" and request.groups is not None:
        counts = np.where(rows.dropped_items, 0, rows.items.counts)
        if counts.max(initial=0) > batching.micro_batch_size:
            largest = int(np.argmax(counts))
            raise PackingError(
                f"group {_name(rows, largest)} has {counts[largest]} rows, over batching.micro_batch_size of "
                f"{batching.micro_batch_size}; raise it or allow make_plan to split_groups"
            )
    if rows.oversized.any() and batching.overlong in {"error", "truncate"}:
        first = int(np.flatnonzero(rows.oversized)[0])
        raise PackingError(
            f"group {_name(rows, first)} takes {rows.items.slots_in(batching.mode)[first]} slots for "
            f"{rows.items.counts[first]} rows, over the {batching.max_tokens} {_SLOTS}; "
            "raise batching.max_tokens, set batching.overlong=drop, or allow make_plan to split_groups"
        )


def _name(rows: Rows, item: int) -> int:
    """Return the id of an item's group, or its row."""
    row = int(np.flatnonzero(rows.item == item)[0])
    return row if rows.request.groups is None else int(rows.request.groups[row])

"""What a planner moves around: rows, or groups of rows that stay together, with their slots and costs."""

from dataclasses import dataclass

import numpy as np

from rlpack.packing.analysis.cost import Cost, ticks
from rlpack.packing.batching import Batching
from rlpack.packing.errors import PackingError
from rlpack.packing.lengths import align
from rlpack.packing.plan import Request

# Stands for "no limit" where kernels compare products of rows and slots.
UNLIMITED = 2**62


@dataclass(frozen=True, eq=False)
class Items:
    """Rows, or groups of rows, that no microbatch boundary parts; I of them, in order of their first rows.

    Attributes:
        counts: rows of each, int64 [I].
        widths: aligned length of the longest row of each, int64 [I].
        slots: packed slots of each, int64 [I].
        costs: ticks of each when packed, int64 [I].
        unit_costs: ticks of one row as wide as `widths`, int64 [I].
    """

    counts: np.ndarray
    widths: np.ndarray
    slots: np.ndarray
    costs: np.ndarray
    unit_costs: np.ndarray

    @property
    def size(self) -> int:
        """How many items there are."""
        return self.counts.size

    def take(self, index: np.ndarray) -> "Items":
        """Return some of the items."""
        return Items(
            self.counts[index], self.widths[index], self.slots[index], self.costs[index], self.unit_costs[index]
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a batch after over-long ones were dealt with.

    Attributes:
        lengths: tokens after truncation, 0 for a dropped row, int64 [B].
        aligned: slots of each row, int64 [B].
        overlong: rows over the budget as given, bool [B].
        dropped: rows left out, bool [B].
        item: what each row belongs to, int64 [B]: items count in order of their first rows.
        items: the items.
        alone: items over the budget that get a microbatch of their own, bool [I].
    """

    lengths: np.ndarray
    aligned: np.ndarray
    overlong: np.ndarray
    dropped: np.ndarray
    item: np.ndarray
    items: Items
    alone: np.ndarray


def multiple_of(batching: Batching) -> int:
    """Return what this mode rounds slots up to; also the least length of a microbatch, and that of a filler."""
    return batching.pad_to_multiple if batching.mode == "packed" else batching.length_multiple


def slots_of(batching: Batching, lengths: np.ndarray) -> np.ndarray:
    """Return the slots of each row; padded rows are never of width 0."""
    aligned = align(lengths, multiple_of(batching))
    return aligned if batching.mode == "packed" else np.maximum(aligned, batching.length_multiple)


def resolve_rows(request: Request) -> Rows:
    """Deal with over-long rows and gather rows into items.

    Raises:
        PackingError: a row or a group does not fit, and `overlong` says nothing else; no row could ever fit.
    """
    batching, capacity = request.batching, request.batching.max_tokens
    multiple = multiple_of(batching)
    lengths = request.lengths
    budget = UNLIMITED if capacity is None else capacity
    if multiple > budget:
        key = "pad_to_multiple" if batching.mode == "packed" else "length_multiple"
        raise PackingError(f"batching.{key} is {multiple}, over batching.max_tokens of {budget}; lower it")
    overlong = slots_of(batching, lengths) > budget
    if overlong.any() and batching.overlong == "error":
        row = int(np.flatnonzero(overlong)[0])
        rounded = "" if multiple == 1 else f" (rounded up to a multiple of {multiple})"
        raise PackingError(
            f"sequence {row} has {lengths[row]} tokens{rounded}, over the budget of {budget}; "
            "raise batching.max_tokens or set batching.overlong=truncate"
        )
    if batching.overlong == "truncate":
        lengths = np.minimum(lengths, budget // multiple * multiple)
    aligned = slots_of(batching, lengths)
    item = _item_of_row(request)
    items = _items(item, aligned, request.cost)
    too_big = _needs(batching, items) > budget
    if batching.mode == "fixed":
        _check_group_rows(np.where(too_big & (batching.overlong == "drop"), 0, items.counts), item, request)
    dropped = np.zeros(lengths.size, dtype=bool)
    if too_big.any() and batching.overlong in {"error", "truncate"}:
        raise _group_over_budget(too_big, item, items, request)
    if batching.overlong == "drop":
        dropped = too_big[item]
        lengths = np.where(dropped, 0, lengths)
    return Rows(lengths, aligned, overlong, dropped, item, items, alone=too_big)


def _needs(batching: Batching, items: Items) -> np.ndarray:
    """Return the slots of each item in a microbatch of its own."""
    return items.slots if batching.mode == "packed" else items.counts * items.widths


def _item_of_row(request: Request) -> np.ndarray:
    """Return the item of each row: itself, or its group; groups count in order of their first rows."""
    if request.groups is None:
        return np.arange(request.lengths.size)
    first, inverse = check_steps(request)
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(first.size)
    return rank[inverse]


def check_steps(request: Request) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row of each group, ids ascending, and the group of each row.

    Raises:
        PackingError: a group has rows in two optimizer steps.
    """
    assert request.groups is not None
    _, first, inverse = np.unique(request.groups, return_index=True, return_inverse=True)
    steps = np.arange(request.lengths.size) // request.rows_per_step
    parted = steps != steps[first][inverse]
    if parted.any():
        row = int(np.flatnonzero(parted)[0])
        raise PackingError(
            f"group {request.groups[row]} has rows in optimizer steps {steps[first][inverse][row]} and {steps[row]}; "
            f"make the mini-batch size ({request.rows_per_step}) hold whole groups"
        )
    return first, inverse


def _items(item: np.ndarray, aligned: np.ndarray, cost: Cost | None) -> Items:
    """Add the rows of each item up."""
    costs = ticks(aligned if cost is None else cost.of(aligned))
    total = int(item.max(initial=-1)) + 1
    if total == item.size:
        return Items(np.ones_like(item), aligned, aligned, costs, costs)
    counts, slots, summed, widths, units = (np.zeros(total, dtype=np.int64) for _ in range(5))
    np.add.at(counts, item, 1)
    np.add.at(slots, item, aligned)
    np.add.at(summed, item, costs)
    np.maximum.at(widths, item, aligned)
    np.maximum.at(units, item, costs)
    return Items(counts, widths, slots, summed, units)


def _check_group_rows(counts: np.ndarray, item: np.ndarray, request: Request) -> None:
    """Raise a `PackingError` if one of these counts of items, int64 [I], is over the rows of a microbatch."""
    if counts.size and counts.max() > request.batching.micro_batch_size and request.groups is not None:
        at = int(np.argmax(counts))
        group = request.groups[np.flatnonzero(item == at)[0]]
        raise PackingError(
            f"group {group} has {counts[at]} rows, over batching.micro_batch_size of "
            f"{request.batching.micro_batch_size}; raise it or allow make_plan to split_groups"
        )


def _group_over_budget(too_big: np.ndarray, item: np.ndarray, items: Items, request: Request) -> PackingError:
    at = int(np.flatnonzero(too_big)[0])
    row = int(np.flatnonzero(item == at)[0])
    group = row if request.groups is None else request.groups[row]
    return PackingError(
        f"group {group} takes {_needs(request.batching, items)[at]} slots for {items.counts[at]} rows, over the budget "
        f"of {request.batching.max_tokens}; raise batching.max_tokens, set batching.overlong=drop, or allow make_plan "
        "to split_groups"
    )

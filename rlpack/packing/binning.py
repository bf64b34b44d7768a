"""Form the microbatches of one optimizer step, and cut them until there are enough.

A bin is a set of items; `labels`, int64 [I], says which bin each item is in, bins counting from 0 without gaps.
No function here lets a bin pass the token budget.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlpack.packing import kernels
from rlpack.packing.batching import Batching
from rlpack.packing.contiguous import partition_sorted
from rlpack.packing.items import UNLIMITED, Items
from rlpack.packing.packers import optimal, pack_labels
from rlpack.packing.partitioning import balance
from rlpack.packing.sorting import ascending, decreasing

# Differencing takes time in items × bins; beyond this, levelling is as good and quicker.
_DIFFERENCING_LIMIT = 2**13
# Padded runs may take one slot in so many more than the fewest, if that lets ranks wait less for each other.
_SLOTS_FOR_EVENNESS = 250


@dataclass(frozen=True, eq=False)
class Bins:
    """Microbatches of one optimizer step.

    Attributes:
        labels: bin of each item, int64 [I].
        slots: of each bin, padding included, int64 [K].
        costs: ticks of each bin, int64 [K].
    """

    labels: np.ndarray
    slots: np.ndarray
    costs: np.ndarray

    def lockstep_cost(self, ranks: int) -> int:
        """Return Σ_i max_rank cost(rank, i) when bins are dealt to the ranks in order of cost."""
        return int(np.sort(self.costs)[::-1][::ranks].sum())


def measure(batching: Batching, items: Items, labels: np.ndarray) -> Bins:
    """Return bins with their slots and costs."""
    total = int(labels.max(initial=-1)) + 1
    if batching.mode == "packed":
        return Bins(labels, _sums(labels, items.slots, total), _sums(labels, items.costs, total))
    counts = _sums(labels, items.counts, total)
    widths, units = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    np.maximum.at(widths, labels, items.widths)
    np.maximum.at(units, labels, items.unit_costs)
    return Bins(labels, counts * widths, counts * units)


def form(batching: Batching, items: Items, seed: int) -> tuple[np.ndarray, bool]:
    """Return labels of as few bins as the mode's algorithm finds, and whether a search ended at its budget.

    Bins are packed, dynamic or, in item order, fixed.
    """
    if batching.mode == "packed" and batching.algorithm == "optimal":
        return optimal(items.slots, _budget(batching))
    return _form(batching, items, seed), False


def _form(batching: Batching, items: Items, seed: int) -> np.ndarray:
    if batching.mode == "packed":
        assert batching.max_tokens is not None
        return pack_labels(items.slots, batching.max_tokens, batching.algorithm, seed=seed)
    if batching.mode == "dynamic":
        order = decreasing(items.widths)
        limits = (UNLIMITED, _budget(batching), UNLIMITED)
        labels = np.empty(items.size, dtype=np.int64)
        labels[order] = kernels.chunk(items.counts[order], items.widths[order], items.unit_costs[order], limits)
        return labels
    limits = (batching.rows, batching.max_tokens or UNLIMITED, UNLIMITED)
    return kernels.chunk(items.counts, items.widths, items.unit_costs, limits)


def candidates(
    batching: Batching, items: Items, formed: np.ndarray, count: int, ranks: int
) -> Iterator[np.ndarray | None]:
    """Yield labels of at most `count` bins that keep the budget, the likeliest to be best first; None is none.

    Args:
        batching: the mode and the budget.
        items: what is in the bins.
        formed: what `form` returned.
        count: how many bins there may be.
        ranks: how many of them meet at one index.
    """
    if items.size == 0 or batching.mode == "fixed":
        yield formed
    elif batching.mode == "dynamic":
        yield from _contiguous(batching, items, count)
    else:
        yield _level(batching, items, count)
        yield formed
        yield _level_tail(batching, items, formed, count, ranks)
        if items.size * count <= _DIFFERENCING_LIMIT:
            differenced = balance(items.costs, count)
            yield differenced if _sums(differenced, items.slots, count).max() <= _budget(batching) else None


def lockstep_bound(batching: Batching, items: Items, ranks: int) -> int:
    """Return ticks that Σ_i max_rank cost(rank, i) can't go below, however packed rows are dealt.

    An index is as dear as its dearest row. The first k indices cost at least what the longest rows 1, R + 1, … of R
    ranks cost, as long as no two of these fit together; their R · k bins hold at most what the budget lets in of the
    dearest rows, and what is left makes the other indices.
    """
    total = int(items.costs.sum())
    bound = -(-total // ranks)
    if batching.mode != "packed" or items.size == 0:
        return bound
    order = decreasing(items.slots)
    slots, costs = items.slots[order], items.costs[order]
    firsts = np.arange(0, items.size, ranks)
    firsts = firsts[(firsts == 0) | (2 * slots[firsts] > _budget(batching))]
    heads = np.cumsum(costs[firsts])
    rooms = np.searchsorted(np.cumsum(slots), (firsts + ranks) * _budget(batching))
    held = np.cumsum(costs)[np.minimum(rooms, items.size - 1)]
    rest = np.maximum(total - np.minimum(held, heads * ranks), 0)
    return max(bound, int((heads + rest // ranks).max()))


def _contiguous(batching: Batching, items: Items, count: int) -> Iterator[np.ndarray]:
    """Yield runs of like width: those with the least slots, and with hardly more, evened out by a tighter budget."""
    order = decreasing(items.widths)
    counts, widths = items.counts[order], items.widths[order]
    labels = np.empty(items.size, dtype=np.int64)
    labels[order] = partition_sorted(counts, widths, count, _budget(batching))
    yield labels
    least = int(measure(batching, items, labels).slots.sum())
    tightest = _tightest(batching, counts, widths, count)
    for share in (0, 1, 3):
        evened = np.empty_like(labels)
        budget = tightest + (_budget(batching) - tightest) * share // 8
        evened[order] = partition_sorted(counts, widths, count, budget)
        if int(measure(batching, items, evened).slots.sum()) <= least + least // _SLOTS_FOR_EVENNESS:
            yield evened


def _tightest(batching: Batching, counts: np.ndarray, widths: np.ndarray, count: int) -> int:
    """Return about the smallest budget under which `count` runs hold all rows, found by bisection."""
    high = min(_budget(batching), int(counts.sum() * widths[0]))
    low = 0
    while low + 1 < high and (high - low) * 1000 > high:
        middle = (low + high) // 2
        labels = kernels.chunk(counts, widths, widths, (UNLIMITED, middle, UNLIMITED))
        if int(labels[-1]) < count:
            high = middle
        else:
            low = middle
    return high


def _level(batching: Batching, items: Items, count: int) -> np.ndarray | None:
    """Return labels of at most `count` packed bins, items to the cheapest, dear ones first; None if one won't fit."""
    labels = kernels.spread(items.slots, items.costs, decreasing(items.costs), count, _budget(batching))
    if labels.size and labels.min() < 0:
        return None
    filled = np.bincount(labels, minlength=count) > 0
    return (np.cumsum(filled) - 1)[labels]


def _level_tail(batching: Batching, items: Items, labels: np.ndarray, count: int, ranks: int) -> np.ndarray | None:
    """Return labels that keep the dearest bins as they are, and level the rest over the last index of all ranks.

    None if there is nothing to keep, or if levelling breaks the budget.
    """
    costs = measure(batching, items, labels).costs
    kept = (count - 1) // ranks * ranks
    if not 0 < kept < costs.size:
        return None
    order = decreasing(costs)
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    moved = place[labels]
    rest = np.flatnonzero(moved >= kept)
    levelled = _level(batching, items.take(rest), count - kept)
    if levelled is None:
        return None
    moved[rest] = kept + levelled
    return moved


def cut(batching: Batching, items: Items, labels: np.ndarray, count: int) -> np.ndarray:
    """Return labels of `count` bins, reached by halving the dearest bin of several items as long as there is one."""
    bins = measure(batching, items, labels)
    if bins.costs.size >= count:
        return labels
    labels = labels.copy()
    order = ascending(labels)
    members: list[np.ndarray] = np.split(order, np.cumsum(np.bincount(labels, minlength=bins.costs.size))[:-1])
    heap = [(-int(cost), at) for at, cost in enumerate(bins.costs) if members[at].size > 1]
    heapq.heapify(heap)
    while len(members) < count and heap:
        _, at = heapq.heappop(heap)
        left, right = _halve(batching, items, members[at])
        labels[right] = len(members)
        members[at] = left
        members.append(right)
        for half, name in ((left, at), (right, len(members) - 1)):
            if half.size > 1:
                heapq.heappush(heap, (-_cost(batching, items, half), name))
    return labels


def _sums(labels: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    # float64 holds these integers exactly: ticks are at most 2**32 a row.
    return np.bincount(labels, weights=values, minlength=count).astype(np.int64)


def _budget(batching: Batching) -> int:
    return UNLIMITED if batching.max_tokens is None else batching.max_tokens


def _cost(batching: Batching, items: Items, members: np.ndarray) -> int:
    if batching.mode == "packed":
        return int(items.costs[members].sum())
    return int(items.counts[members].sum() * items.unit_costs[members].max())


def _halve(batching: Batching, items: Items, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two parts, neither empty, of like cost: any when packed, else of like width or in arrival order."""
    if batching.mode == "packed":
        ordered = members[decreasing(items.costs[members])]
        left, right, balance_ = [ordered[0]], [ordered[1]], int(items.costs[ordered[0]] - items.costs[ordered[1]])
        for item in ordered[2:]:
            lighter, sign = (right, -1) if balance_ > 0 else (left, 1)
            lighter.append(item)
            balance_ += sign * int(items.costs[item])
        return np.array(left), np.array(right)
    ordered = members[decreasing(items.widths[members])] if batching.mode == "dynamic" else members
    counts, units = items.counts[ordered], items.unit_costs[ordered]
    ahead = np.cumsum(counts) * np.maximum.accumulate(units)
    behind = (np.cumsum(counts[::-1]) * np.maximum.accumulate(units[::-1]))[::-1]
    at = 1 + int(np.argmin(np.maximum(ahead[:-1], behind[1:])))
    return ordered[:at], ordered[at:]

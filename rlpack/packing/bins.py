"""Form the microbatches of one optimizer step, and cut them until there are enough.

A bin is a set of items; `labels`, int64 [I], says which bin each item is in, bins counting from 0 without gaps.
No function here lets a bin pass the token budget.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlpack.packing.algorithms import kernels
from rlpack.packing.algorithms.contiguous import partition_sorted
from rlpack.packing.algorithms.jit import compiled
from rlpack.packing.algorithms.packers import optimal, pack_labels
from rlpack.packing.algorithms.partition import balance
from rlpack.packing.algorithms.sorting import ascending, decreasing
from rlpack.packing.batching import Batching
from rlpack.packing.rows import UNLIMITED, Items

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
    limits = (batching.micro_batch_size, batching.max_tokens or UNLIMITED, UNLIMITED)
    return kernels.chunk(items.counts, items.widths, items.unit_costs, limits)


def candidates(batching: Batching, items: Items, formed: np.ndarray, count: int, ranks: int) -> Iterator[np.ndarray]:
    """Yield labels of at most `count` bins that keep the budget, the likeliest to be best first.

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
        levelled = _level(batching, items, count)
        if levelled is not None:
            yield levelled
        others = list(_otherwise(batching, items, formed, count, ranks))
        yield from sorted(others, key=lambda labels: measure(batching, items, labels).lockstep_cost(ranks))


def _otherwise(batching: Batching, items: Items, formed: np.ndarray, count: int, ranks: int) -> Iterator[np.ndarray]:
    """Yield labels of packed bins that were not levelled, or not all of them."""
    yield formed
    tail = _level_tail(batching, items, formed, count, ranks)
    if tail is not None:
        yield tail
    if items.size * count <= _DIFFERENCING_LIMIT:
        differenced = balance(items.costs, count)
        if _sums(differenced, items.slots, count).max() <= _budget(batching):
            yield differenced


def lockstep_bound(batching: Batching, items: Items, ranks: int) -> int:
    """Return ticks that Σ_i max_rank cost(rank, i) can't go below, however packed rows are dealt.

    An index is as dear as its dearest row. The first k indices cost at least what the longest rows 1, R + 1, … of R
    ranks cost, as long as no two of these fit together; their R · k bins hold at most what the budget lets in of the
    dearest rows, and what is left makes the other indices.
    """
    total = int(items.costs.sum())
    bound = -(-total // ranks)
    if batching.mode != "packed" or items.size == 0 or (items.counts > 1).any():
        return bound
    order = decreasing(items.slots)
    slots, costs = np.minimum(items.slots[order], _budget(batching)), items.costs[order]
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
    order = decreasing(items.costs)
    placed = kernels.spread(items.slots[order], items.costs[order], count, _budget(batching))
    if placed.size and placed.min() < 0:
        return None
    filled = np.bincount(placed, minlength=count) > 0
    labels = np.empty_like(placed)
    labels[order] = (np.cumsum(filled) - 1)[placed]
    return labels


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
    packed = batching.mode == "packed"
    order = np.arange(items.size) if batching.mode == "fixed" else decreasing(items.costs if packed else items.widths)
    members = order[ascending(labels[order])]
    sizes = np.bincount(labels, minlength=bins.costs.size)
    costs = items.costs if packed else items.unit_costs
    return _cut(labels, members, sizes, count, items.counts, costs, packed)


@compiled
def _cut(
    labels: np.ndarray,
    members: np.ndarray,
    sizes: np.ndarray,
    count: int,
    counts: np.ndarray,
    costs: np.ndarray,
    packed: bool,
) -> np.ndarray:
    """Return the labels of `cut`. `members` are the items of one bin after the other, `sizes` their numbers."""
    labels, members = labels.copy(), members.copy()
    bins = sizes.size
    most = min(count, bins + members.size)
    starts, ends = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.int64)
    ends[:bins] = np.cumsum(sizes)
    starts[:bins] = ends[:bins] - sizes
    heap = [(0, 0, 0) for _ in range(0)]  # the dearest bin comes first, of bins alike the one of more items
    for at in range(bins):
        if sizes[at] > 1:
            inside = members[starts[at] : ends[at]]
            heap.append((-_cost_of(inside, counts, costs, packed), -inside.size, at))
    heapq.heapify(heap)
    while bins < count and len(heap) > 0:
        _, _, at = heapq.heappop(heap)
        inside = members[starts[at] : ends[at]]
        middle = starts[at] + (_halve(inside, costs) if packed else _halve_in_order(inside, counts, costs))
        starts[bins], ends[bins], ends[at] = middle, ends[at], middle
        labels[members[middle : ends[bins]]] = bins
        for half in (at, bins):
            inside = members[starts[half] : ends[half]]
            if inside.size > 1:
                heapq.heappush(heap, (-_cost_of(inside, counts, costs, packed), -inside.size, half))
        bins += 1
    return labels


@compiled
def _cost_of(members: np.ndarray, counts: np.ndarray, costs: np.ndarray, packed: bool) -> int:
    """Return the ticks of one bin."""
    if packed:
        return int(costs[members].sum())
    return int(counts[members].sum() * costs[members].max())


@compiled
def _halve(members: np.ndarray, costs: np.ndarray) -> int:
    """Bring packed members, dearest first, into two parts of like cost; returns the size of the first, at least 1.

    Each goes to the cheaper part; one that costs nothing, or finds both alike, to the part of fewer members. Were
    those that cost nothing all in one part, it would have to be halved once for each of them.
    """
    others = np.zeros(members.size, dtype=np.int64)
    first, second, ahead = 0, 0, 0
    for at in range(members.size):
        item = members[at]
        cost = int(costs[item])
        even = ahead == 0 or cost == 0
        if (first <= second) if even else (ahead < 0):
            members[first] = item
            first += 1
            ahead += cost
        else:
            others[second] = item
            second += 1
            ahead -= cost
    members[first:] = others[:second]
    return first


@compiled
def _halve_in_order(members: np.ndarray, counts: np.ndarray, costs: np.ndarray) -> int:
    """Return how many padded members the first of two parts takes, so that the dearer part costs the least.

    Of cuts alike it is the one nearest to the middle.
    """
    total = members.size
    behind = np.zeros(total, dtype=np.int64)
    rows, unit = 0, 0
    for at in range(total - 1, 0, -1):
        rows, unit = rows + counts[members[at]], max(unit, costs[members[at]])
        behind[at] = rows * unit
    best, least, distance = 1, behind[0], 0
    rows, unit = 0, 0
    for at in range(1, total):
        rows, unit = rows + counts[members[at - 1]], max(unit, costs[members[at - 1]])
        dearer, away = max(rows * unit, behind[at]), abs(2 * at - total)
        if at == 1 or dearer < least or (dearer == least and away < distance):
            best, least, distance = at, dearer, away
    return best


def _sums(labels: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    # float64 holds these integers exactly: ticks are at most 2**32 a row.
    return np.bincount(labels, weights=values, minlength=count).astype(np.int64)


def _budget(batching: Batching) -> int:
    return UNLIMITED if batching.max_tokens is None else batching.max_tokens

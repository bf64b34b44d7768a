"""Split the costliest bins in half until there are enough.

The halves of a packed bin have similar costs. Padded bins, and packed bins whose rows keep their order, are cut so that
the costlier half costs as little as possible.
"""

import heapq

import numpy as np

from rlpack.packing.algorithms.jit import compiled


@compiled
def halve_costliest(
    labels: np.ndarray,
    members: np.ndarray,
    sizes: np.ndarray,
    count: int,
    counts: np.ndarray,
    costs: np.ndarray,
    packed: bool,
    in_order: bool,
) -> np.ndarray:
    """Halve the costliest bin until there are `count` or no bin of several items is left; return the labels.

    Args:
        labels: bin of each item, int64 [I].
        members: items, bin by bin, int64 [I]: in arrival order, or else costliest first in packed bins and widest first
            in padded ones.
        sizes: number of items of each bin, int64 [K].
        count: number of bins to reach.
        counts: rows of each item, int64 [I].
        costs: integer cost of each item when packed, else of its longest row, int64 [I].
        packed: whether bins are packed; else they are padded.
        in_order: whether packed members keep their order; padded ones always do.
    """
    labels, members = labels.copy(), members.copy()
    bins = sizes.size
    most = min(count, bins + members.size)
    starts, ends = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.int64)
    ends[:bins] = np.cumsum(sizes)
    starts[:bins] = ends[:bins] - sizes
    heap = [(0, 0, 0) for _ in range(0)]  # costliest bin first; ties go to the one with more items
    for at in range(bins):
        if sizes[at] > 1:
            inside = members[starts[at] : ends[at]]
            heap.append((-_cost_of(inside, counts, costs, packed), -inside.size, at))
    heapq.heapify(heap)
    while bins < count and len(heap) > 0:
        _, _, at = heapq.heappop(heap)
        inside = members[starts[at] : ends[at]]
        if packed and in_order:
            middle = starts[at] + _halve_packed_in_order(inside, costs)
        elif packed:
            middle = starts[at] + _halve(inside, costs)
        else:
            middle = starts[at] + _halve_in_order(inside, counts, costs)
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
    """Return the integer cost of one bin."""
    if packed:
        return int(costs[members].sum())
    return int(counts[members].sum() * costs[members].max())


@compiled
def _halve(members: np.ndarray, costs: np.ndarray) -> int:
    """Reorder packed members into two parts of similar cost; return the size of the first, at least 1.

    Members come costliest first, and each goes to the cheaper part. A member that costs nothing, or for which both
    parts are equally cheap, goes to the part with fewer members. If all zero-cost members were in one part, that part
    would have to be halved once for each of them.
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
def _halve_packed_in_order(members: np.ndarray, costs: np.ndarray) -> int:
    """Return the size of the first part if packed members are cut to minimize the cost of the costlier part.

    Ties go to the cut nearest to the middle.
    """
    total, whole = members.size, int(costs[members].sum())
    best, least, distance, ahead = 1, whole, total, 0
    for at in range(1, total):
        ahead += int(costs[members[at - 1]])
        costlier, away = max(ahead, whole - ahead), abs(2 * at - total)
        if costlier < least or (costlier == least and away < distance):
            best, least, distance = at, costlier, away
    return best


@compiled
def _halve_in_order(members: np.ndarray, counts: np.ndarray, costs: np.ndarray) -> int:
    """Return the size of the first part if padded members are cut to minimize the cost of the costlier part.

    Ties go to the cut nearest to the middle.
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
        costlier, away = max(rows * unit, behind[at]), abs(2 * at - total)
        if at == 1 or costlier < least or (costlier == least and away < distance):
            best, least, distance = at, costlier, away
    return best

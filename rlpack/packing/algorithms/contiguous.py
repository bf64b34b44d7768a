"""Cut rows sorted by length into a given number of padded microbatches with the least padding.

Rows are sorted by decreasing length, so a part (i, j] takes (P[j] − P[i]) · w[i] slots: its number of rows, by prefix
sums P, times the length of its longest row. These costs satisfy the quadrangle inequality, even with an infinite cost
for parts over the budget. Hence:

- the best start of the last part is monotone in j, and a queue of candidates finds all of them in O(n log n)
  (Galil and Park, "A linear-time algorithm for concave one-dimensional dynamic programming", Inf. Process. Lett. 33,
  1990, describe this and faster ones);
- the minimum number of slots is convex in the number of parts, so every number of parts is optimal at some price per
  part (Aggarwal, Schieber and Tokuyama, "Finding a minimum-weight k-link path in graphs with the concave Monge
  property", Discrete Comput. Geom. 12, 1994). If a price makes several numbers of parts optimal, a path with the
  requested number lies between the one with the fewest and the one with the most parts.
"""

import numpy as np

from rlpack.packing.algorithms import kernels
from rlpack.packing.algorithms.jit import compiled
from rlpack.packing.lengths import UNLIMITED

# Beyond this, path costs would overflow int64.
_LARGEST = 2**62


def partition_sorted(counts: np.ndarray, widths: np.ndarray, parts: int, capacity: int) -> np.ndarray:
    """Return the part of each item, minimizing Σ rows × width, int64 [I].

    Args:
        counts: rows of each item, int64 [I].
        widths: padded length of each item, decreasing, int64 [I].
        parts: maximum number of parts; with fewer items, each item is a part.
        capacity: maximum slots of a part with several items; large enough for `parts` parts to hold all items.
    """
    if parts >= counts.size:
        return np.arange(counts.size)
    rows = np.concatenate(([0], np.cumsum(counts)))
    most = int(rows[-1]) * int(widths[0])
    if most * counts.size >= _LARGEST:  # more slots than any device holds: the fewest parts are good enough
        return kernels.chunk(counts, widths, widths, (UNLIMITED, capacity, UNLIMITED))
    # Slots are convex in the number of parts: the highest price, which no part is worth, gives the fewest parts.
    low, high = -1, most
    while high - low > 1:
        price = (low + high) // 2
        if _path(_starts(rows, widths, price, capacity, True)).size - 1 <= parts:
            high = price
        else:
            low = price
    few = _path(_starts(rows, widths, high, capacity, True))
    if few.size - 1 < parts:
        few = _between(few, _path(_starts(rows, widths, high, capacity, False)), parts)
    return np.repeat(np.arange(few.size - 1), np.diff(few))


def _between(few: np.ndarray, many: np.ndarray, parts: int) -> np.ndarray:
    """Return a cheapest path with `parts` parts: the start of `many` joined to the end of `few`.

    Both are cheapest paths at the same price per part.
    """
    ahead = parts - (few.size - 1)
    for at in range(few.size - 1):
        if few[at] <= many[at + ahead] and many[at + ahead + 1] <= few[at + 1]:
            return np.concatenate((many[: at + ahead + 1], few[at + 1 :]))
    return few  # unreachable: one of the parts of `few` contains a part of `many`


@compiled
def _path(starts: np.ndarray) -> np.ndarray:
    """Return the bounds of the parts, from 0 to the number of items, given the best start of each end."""
    size = starts.size - 1
    count, at = 0, size
    while at > 0:
        at = starts[at]
        count += 1
    bounds = np.zeros(count + 1, dtype=np.int64)
    at = size
    for place in range(count, 0, -1):
        bounds[place] = at
        at = starts[at]
    return bounds


@compiled
def _starts(rows: np.ndarray, widths: np.ndarray, price: int, capacity: int, fewest: bool) -> np.ndarray:
    """Return the start of the last part on the cheapest path to each end, int64 [I + 1].

    A part costs its slots plus `price`. Ties go to the path with the fewest parts, or with the most if `fewest` is
    false. The queue holds candidate starts, each with the first end for which it is best.
    """
    size = widths.size
    costs, parts = np.zeros(size + 1, dtype=np.int64), np.zeros(size + 1, dtype=np.int64)
    starts = np.zeros(size + 1, dtype=np.int64)
    queue, since = np.zeros(size + 1, dtype=np.int64), np.zeros(size + 1, dtype=np.int64)
    sign = 1 if fewest else -1
    since[0] = 1
    first, last = 0, 0
    for end in range(1, size + 1):
        while first < last and since[first + 1] <= end:
            first += 1
        start = queue[first]
        starts[end], parts[end] = start, parts[start] + sign
        costs[end] = costs[start] + _slots(rows, widths, start, end) + price
        if end == size:
            break
        while last > first:
            other = queue[last]
            gap, tie = costs[end] - costs[other], parts[end] < parts[other]
            if not _wins(rows, widths, end, other, since[last], gap, tie, capacity):
                break
            last -= 1
        other = queue[last]
        gap, tie = costs[end] - costs[other], parts[end] < parts[other]
        low, high = max(since[last], end), size + 1
        while high - low > 1:
            middle = (low + high) // 2
            if _wins(rows, widths, end, other, middle, gap, tie, capacity):
                high = middle
            else:
                low = middle
        if high <= size:
            last += 1
            queue[last], since[last] = end, high
    return starts


@compiled
def _wins(
    rows: np.ndarray, widths: np.ndarray, start: int, other: int, end: int, gap: int, tie: bool, capacity: int
) -> bool:
    """Return whether the part that ends at `end` should begin at `start` rather than at the earlier `other`.

    The later start always wins if the part from the earlier one is over the budget. `gap` is the extra cost of the path
    to the later start, and `tie` says whether the later start wins at equal cost.
    """
    if end <= start:
        return False
    theirs = _slots(rows, widths, other, end)
    if theirs > capacity:
        return True
    ours = gap + _slots(rows, widths, start, end)
    return bool(ours < theirs or (ours == theirs and tie))


@compiled
def _slots(rows: np.ndarray, widths: np.ndarray, start: int, end: int) -> int:
    """Return the slots of the part of items [start, end)."""
    return (rows[end] - rows[start]) * widths[start]

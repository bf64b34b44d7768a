"""Search for a packing into fewer bins if best-fit leaves a gap to the lower bound.

1. Fill one bin after another with the largest remaining row and the completion that leaves the least room, found by a
   depth-first search over the remaining sizes (the minimum bin slack heuristic of Gupta and Ho, Production Planning and
   Control 10, 1999). A completion is repeated for as many bins as the remaining rows of its sizes allow. The start of
   the search (the largest sizes, a half or a third of the room) determines which sizes remain at the end, so all three
   are tried.
2. While this saves bins, empty the bins with free room and some of the full ones, and refill them.

Work is counted in rows tried, never in seconds, so that a plan is the same on every machine. For some ten thousand rows
the limit is about half a second on one core; it is checked between fillings, which take longer with more rows. The
result never has more bins than best-fit's.
"""

from typing import NamedTuple

import numpy as np

from rlpack.packing.algorithms.jit import compiled
from rlpack.packing.algorithms.sorting import ascending, shuffled

_MAX_TRIES = 10_000_000
_MAX_TRIES_PER_BIN = 600
_SPLITS = (1, 2, 3)
_PATIENCE = 6
# A bin counts as full if less than one slot in this many is free.
_FULL = 2000


class _Stock(NamedTuple):
    """The rows that are not packed yet, by size.

    Attributes:
        sizes: distinct sizes, ascending, int64 [S].
        left: remaining rows of each size, int64 [S].
        below: for each size, counted from 1, an upper bound on the next size with remaining rows; 0 is none. A
            disjoint-set forest with path halving, int64 [S + 1].
    """

    sizes: np.ndarray
    left: np.ndarray
    below: np.ndarray


def improve(labels: np.ndarray, sizes: np.ndarray, capacity: int, fewest: int) -> tuple[np.ndarray, bool]:
    """Search for fewer bins; return the labels, and whether it hit its limit above `fewest` bins.

    Args:
        labels: bin of each row, int64 [B].
        sizes: slots of each row, int64 [B], none over the capacity.
        capacity: maximum slots of a bin.
        fewest: lower bound on the number of bins, at which the search stops.
    """
    if not (sizes > 0).all():  # rows without slots fit anywhere
        filled = sizes > 0
        labels, hit_limit = labels.copy(), False
        if filled.any():
            used = np.unique(labels[filled], return_inverse=True)[1]
            labels[filled], hit_limit = improve(used, sizes[filled], capacity, fewest)
        labels[~filled] = 0
        return labels, hit_limit
    count, budget, tries, idle = int(labels.max(initial=-1)) + 1, _MAX_TRIES, 0, 0
    while count > fewest and budget > 0 and idle < _PATIENCE + len(_SPLITS):
        split = _SPLITS[tries % len(_SPLITS)]
        opened = np.ones(count, dtype=bool) if tries < len(_SPLITS) else _opened(labels, sizes, capacity, tries)
        rows = np.flatnonzero(opened[labels])
        filled, spent = _filled(sizes[rows], capacity, split)
        budget -= spent
        tries += 1
        now = count - int(opened.sum()) + int(filled.max(initial=-1)) + 1
        idle = 0 if now < count else idle + 1
        if now <= count:
            labels = (np.cumsum(~opened) - 1)[labels]
            labels[rows] = filled + count - int(opened.sum())
            count = now
    return labels, count > fewest and budget <= 0


def _opened(labels: np.ndarray, sizes: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    """Return which bins to empty, bool [K]: all with room, and one to three times as many full ones."""
    used = np.bincount(labels, weights=sizes)
    opened = (capacity - used) * _FULL >= capacity
    full = np.flatnonzero(~opened)
    drawn = full[shuffled(full.size, seed)][: int(opened.sum()) * (1 + seed % 3)]
    opened[drawn] = True
    return opened


def _filled(sizes: np.ndarray, capacity: int, split: int) -> tuple[np.ndarray, int]:
    """Fill bins one by one; return the bin of each row, and the number of rows tried."""
    distinct, counts = np.unique(sizes, return_counts=True)
    stock = _Stock(distinct, counts.astype(np.int64), np.arange(distinct.size + 1))
    size_of, bin_of = np.zeros((2, sizes.size), dtype=np.int64)
    tried = _fill(stock, capacity, split, size_of, bin_of)
    labels = np.empty_like(sizes)
    labels[ascending(sizes)] = bin_of[ascending(size_of)]
    return labels, tried


@compiled
def _fill(stock: _Stock, capacity: int, split: int, size_of: np.ndarray, bin_of: np.ndarray) -> int:
    """Pack all rows; return the number of rows tried.

    The size (its index) and the bin of each row are written into `size_of` and `bin_of`, in the order of packing.
    """
    chosen = np.zeros(size_of.size, dtype=np.int64)
    placed, label, tried, smallest = 0, 0, 0, 0
    while placed < size_of.size:
        top = _highest(stock, stock.sizes.size, True)
        while stock.left[smallest] == 0:
            smallest += 1
        stock.left[top - 1] -= 1
        room = capacity - stock.sizes[top - 1]
        spare = stock.sizes[smallest] if stock.left[smallest] > 0 else 1
        count, steps = _complete(stock, room, spare, split, chosen[placed:])
        tried += steps
        stock.left[top - 1] += 1
        chosen[placed + count] = top
        count += 1
        times = _times(stock, chosen[placed : placed + count])
        pattern = chosen[placed : placed + count].copy()
        for _ in range(times):
            for size in pattern:
                stock.left[size - 1] -= 1
                size_of[placed], bin_of[placed] = size - 1, label
                placed += 1
            label += 1
    return tried


@compiled
def _highest(stock: _Stock, at: int, forget: bool) -> int:
    """Return the 1-based index of the largest remaining size among the first `at`; 0 if there is none.

    If `forget` is set, later calls also skip the sizes that have run out of rows. A search puts its rows back, so it
    does not set it.
    """
    while at > 0:
        while stock.below[at] != at:
            stock.below[at] = stock.below[stock.below[at]]
            at = stock.below[at]
        if at == 0 or stock.left[at - 1] > 0:
            return at
        if forget:
            stock.below[at] = at - 1
        at -= 1
    return 0


@compiled
def _times(stock: _Stock, pattern: np.ndarray) -> int:
    """Return how many times a pattern of sizes can be taken from the remaining rows."""
    times = stock.left[pattern[0] - 1]
    for at in range(pattern.size):
        needed = 0
        for other in range(pattern.size):
            needed += pattern[other] == pattern[at]
        times = min(times, stock.left[pattern[at] - 1] // needed)
    return int(times)


@compiled
def _complete(stock: _Stock, room: int, spare: int, split: int, best: np.ndarray) -> tuple[int, int]:
    """Write the sizes that leave the least of `room` into `best`; return their number and the rows tried."""
    path = np.zeros(room // stock.sizes[0] + 1, dtype=np.int64)
    depth, count, least, tried, leaf = 0, 0, room, 0, False
    first = min(stock.sizes.size, np.searchsorted(stock.sizes, room // split) + 1)
    at, wrapped = first, split == 1
    while least > 0 and tried < _MAX_TRIES_PER_BIN:
        tried += 1
        size = _highest(stock, min(at, np.searchsorted(stock.sizes, room, side="right")), False)
        if size > 0:
            stock.left[size - 1] -= 1
            path[depth] = size
            depth, room, at, leaf = depth + 1, room - stock.sizes[size - 1], size, True
            if room < least:
                least, count = room, depth
                best[:depth] = path[:depth]
        elif depth > 0:
            depth -= 1
            size = int(path[depth])
            stock.left[size - 1] += 1
            room += stock.sizes[size - 1]
            at = size - 1
            if leaf:  # a smaller last row is useful only if another row fits next to it
                at = min(at, np.searchsorted(stock.sizes, room - spare, side="right"))
            leaf = False
            if wrapped and depth == 0 and split > 1 and at < first:
                break
        elif wrapped:
            break
        else:
            wrapped, at = True, stock.sizes.size
    for step in range(depth):
        stock.left[path[step] - 1] += 1
    return count, tried

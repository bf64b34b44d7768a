"""Pack lengths into bins of one capacity.

Every packer places each row once and never exceeds the capacity of a bin. All but `optimal` run in O(n log n):
first-fit with a tree of the bins' free room, best-fit with buckets of free room under a tree, modified first-fit
decreasing with a sorted list with skips.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import pairwise
from typing import get_args

import numpy as np

from rlpack.packing.algorithms import kernels
from rlpack.packing.algorithms.best_fit import best_fit
from rlpack.packing.algorithms.first_fit import modified_first_fit
from rlpack.packing.algorithms.optimal import improve
from rlpack.packing.algorithms.sorting import ascending, decreasing, shuffled
from rlpack.packing.batching import Algorithm
from rlpack.packing.errors import PackingError
from rlpack.packing.lengths import Integers, check_count, check_lengths, check_seed

# Above this many slots, buckets of free room would take more memory than a sorted list of bins.
_MAX_BUCKETS = 2**22


def pack(
    lengths: Integers, capacity: int, algorithm: Algorithm = "best_fit_decreasing", *, seed: int = 0
) -> list[np.ndarray]:
    """Return bins of at most `capacity` slots, each as the ascending indices of its rows, int64.

    >>> [bin.tolist() for bin in pack([4, 1, 3, 2], capacity=5)]
    [[0, 1], [2, 3]]

    Args:
        lengths: slots of each row, alignment included.
        capacity: most slots of a bin.
        algorithm: `concatenative` fills one bin after another in arrival order; `first_fit_decreasing`;
            `modified_first_fit_decreasing` (Johnson and Garey, "A 71/60 theorem for bin packing", Journal of Complexity
            1, 1985); `first_fit_shuffle`, first-fit in a random order; `best_fit_decreasing`; `optimal`, which searches
            for fewer bins if best-fit needs more than the lower bound.
        seed: seed of `first_fit_shuffle`.

    Raises:
        PackingError: a length is invalid or over the capacity, the algorithm is unknown, or the seed is not an integer.
    """
    sizes, room = check_lengths(lengths), check_count(capacity, "capacity")
    if sizes.size and sizes.max() > room:
        row = int(np.flatnonzero(sizes > room)[0])
        raise PackingError(
            f"sequence {row} has {sizes[row]} tokens, over the capacity of {room}; raise the capacity or shorten it"
        )
    return bins_of(pack_labels(sizes, room, algorithm, seed=check_seed(seed)))


def pack_labels(sizes: np.ndarray, capacity: int, algorithm: str, *, seed: int = 0) -> np.ndarray:
    """Return the bin of each row, int64 [B]; bins are numbered from 0 without gaps.

    The sizes, int64 [B], are not checked.

    Raises:
        PackingError: the algorithm is unknown.
    """
    if not isinstance(algorithm, str) or algorithm not in PACKERS:
        raise PackingError(f"algorithm is {algorithm!r}; choose one of {', '.join(get_args(Algorithm))}")
    return PACKERS[algorithm](sizes, capacity, seed)


def bins_of(labels: np.ndarray, count: int | None = None) -> list[np.ndarray]:
    """Return the ascending rows of each label.

    `count` adds empty bins at the end.

    >>> [bin.tolist() for bin in bins_of(np.array([0, 1, 0]), count=3)]
    [[0, 2], [1], []]
    """
    sizes = np.bincount(labels, minlength=count or 0)
    if sizes.size == 0:
        return []
    rows, bounds = ascending(labels), np.concatenate(([0], np.cumsum(sizes))).tolist()
    return [rows[first:stop] for first, stop in pairwise(bounds)]


def lower_bound(lengths: Integers, capacity: int) -> int:
    """Return a lower bound on the number of bins.

    The bound is the larger of ceil(Σ lengths / capacity) and L2 of Martello and Toth ("Lower bounds and reduction
    procedures for the bin packing problem", Discrete Applied Mathematics 28, 1990): for a threshold a, each row over
    capacity − a needs a bin to itself, no two rows over half the capacity share a bin, and the other rows of at least a
    fill the room that those leave.

    >>> lower_bound([6, 6, 6], capacity=10)
    3

    Raises:
        PackingError: a length is invalid or over the capacity.
    """
    sizes, room = check_lengths(lengths), check_count(capacity, "capacity")
    if sizes.size and sizes.max() > room:
        raise PackingError(f"a length is {sizes.max()}, over the capacity of {room}; raise the capacity or shorten it")
    return fewest_bins(sizes, room)


def fewest_bins(sizes: np.ndarray, room: int) -> int:
    """Return `lower_bound` of unchecked sizes, int64 [B]: all have to fit, but may exceed the limit on lengths."""
    if sizes.size == 0:
        return 0
    ascending = np.sort(sizes)
    totals = np.concatenate(([0], np.cumsum(ascending)))
    half = int(np.searchsorted(ascending, room // 2, side="right"))
    thresholds = np.unique(np.concatenate(([0], ascending[:half])))
    small = np.searchsorted(ascending, thresholds, side="left")
    unshared = np.searchsorted(ascending, room - thresholds, side="right")
    free = (unshared - half) * room - (totals[unshared] - totals[half])
    rest = np.maximum(totals[half] - totals[small] - free, 0)
    bound = (sizes.size - half) + -(-rest // room)
    return max(1, int(-(-totals[-1] // room)), int(bound.max()))


def _concatenative(sizes: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    return kernels.next_fit(sizes, capacity)


def _first_fit_decreasing(sizes: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    order = decreasing(sizes)
    return _restore_order(order, kernels.first_fit(sizes[order], np.arange(sizes.size), capacity))


def _restore_order(order: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the labels of rows in `order`, put back into row order."""
    restored = np.empty_like(labels)
    restored[order] = labels
    return restored


def _modified_first_fit_decreasing(sizes: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    order = decreasing(sizes)
    return _restore_order(order, modified_first_fit(sizes[order], capacity))


def _first_fit_shuffle(sizes: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    return kernels.first_fit(sizes, shuffled(sizes.size, seed), capacity)


def _best_fit_decreasing(sizes: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    order = decreasing(sizes)
    if capacity > _MAX_BUCKETS:
        return best_fit_sorted(sizes, order, capacity)
    return _restore_order(order, best_fit(sizes[order], capacity))


def best_fit_sorted(sizes: np.ndarray, order: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each row, by best-fit in `order`, from a list of bins sorted by free room."""
    labels = np.zeros(sizes.size, dtype=np.int64)
    free: list[tuple[int, int]] = []
    count = 0
    for row in order:
        size = int(sizes[row])
        at = bisect_left(free, (size, -1))
        if at < len(free):
            room, label = free.pop(at)
        else:
            room, label = capacity, count
            count += 1
        labels[row] = label
        insort(free, (room - size, label))
    return labels


def optimal(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, bool]:
    """Return the bin of each row, and whether the search hit its limit."""
    labels = _best_fit_decreasing(sizes, capacity, 0)
    return improve(labels, sizes, capacity, lower_bound(sizes, capacity))


def _optimal(sizes: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    return optimal(sizes, capacity)[0]


PACKERS: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "concatenative": _concatenative,
    "first_fit_decreasing": _first_fit_decreasing,
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
    "first_fit_shuffle": _first_fit_shuffle,
    "best_fit_decreasing": _best_fit_decreasing,
    "optimal": _optimal,
}

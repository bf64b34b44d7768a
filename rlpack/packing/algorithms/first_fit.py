"""Modified first-fit decreasing (MFFD): Johnson and Garey, "A 71/60 theorem for bin packing", J. Complexity 1, 1985.

At a capacity of 1, a large row takes more than 1/2, a medium one more than 1/3, a small one more than 1/6.

1. Sort the rows by decreasing size into large, medium, small and tiny ones.
2. Give each large row a bin, in order; the last bin has the most room.
3. Forward through the bins: add the longest remaining medium row that fits, if any.
4. Backward through the bins without a medium row: if the two shortest remaining small rows fit together, add the
   shortest, and then the longest small row that still fits.
5. Forward through all bins: while any remaining row fits, add the longest one that does.
6. Pack the remaining rows into new bins by first-fit decreasing.
"""

import numpy as np

from rlpack.packing.algorithms.jit import compiled
from rlpack.packing.algorithms.kernels import first_fit


def modified_first_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each row, int64 [B], for decreasing `sizes`."""
    large, medium, small = (int((parts * sizes > capacity).sum()) for parts in (2, 3, 6))
    labels, skip = np.full(sizes.size, -1), np.arange(sizes.size + 1)
    labels[:large] = skip[:large]
    skip[:large] += 1
    room = capacity - sizes[:large]
    ascending = -sizes
    _add_medium(ascending, labels, skip, room, (large, medium))
    _add_two_small(ascending, labels, skip, room, (medium, small))
    _fill_up(ascending, labels, skip, room)
    rest = np.flatnonzero(labels < 0)
    labels[rest] = large + first_fit(sizes, rest, capacity)[rest]
    return labels


@compiled
def _longest_left(ascending: np.ndarray, skip: np.ndarray, room: int, first: int) -> int:
    """Return the longest unplaced row from `first` on that fits into `room`, or the number of rows if none does.

    `skip` leads from a placed row towards the next unplaced one: a disjoint-set forest with path halving.
    """
    row = first + int(np.searchsorted(ascending[first:], -room, side="left"))
    while skip[row] != row:
        skip[row] = skip[skip[row]]
        row = int(skip[row])
    return row


@compiled
def _add_medium(
    ascending: np.ndarray, labels: np.ndarray, skip: np.ndarray, room: np.ndarray, bounds: tuple[int, int]
) -> None:
    """Run step 3 of the module docstring; `bounds` delimit the medium rows."""
    first, stop = bounds
    for label in range(room.size):
        row = _longest_left(ascending, skip, room[label], first)
        if row < stop:
            labels[row], skip[row] = label, row + 1
            room[label] += ascending[row]


@compiled
def _add_two_small(
    ascending: np.ndarray, labels: np.ndarray, skip: np.ndarray, room: np.ndarray, bounds: tuple[int, int]
) -> None:
    """Run step 4 of the module docstring; `bounds` delimit the small rows.

    A bin with a medium row has no room for a small one: 1/2 + 1/3 + 1/6 = 1.
    """
    first, stop = bounds
    last = stop - 1
    for label in range(room.size - 1, -1, -1):
        while last >= first and labels[last] >= 0:
            last -= 1
        second = last - 1
        while second >= first and labels[second] >= 0:
            second -= 1
        if second < first or -ascending[last] - ascending[second] > room[label]:
            continue
        labels[last], skip[last] = label, last + 1
        room[label] += ascending[last]
        row = _longest_left(ascending, skip, room[label], first)
        labels[row], skip[row] = label, row + 1
        room[label] += ascending[row]


@compiled
def _fill_up(ascending: np.ndarray, labels: np.ndarray, skip: np.ndarray, room: np.ndarray) -> None:
    """Run step 5 of the module docstring."""
    for label in range(room.size):
        row = _longest_left(ascending, skip, room[label], 0)
        while row < labels.size:
            labels[row], skip[row] = label, row + 1
            room[label] += ascending[row]
            row = _longest_left(ascending, skip, room[label], 0)

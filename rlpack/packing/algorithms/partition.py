"""Divide weights into k parts of similar sums."""

import heapq

import numpy as np

from rlpack.packing.algorithms import kernels
from rlpack.packing.algorithms.jit import compiled
from rlpack.packing.algorithms.packers import bins_of
from rlpack.packing.algorithms.sorting import by_first_row, decreasing
from rlpack.packing.analysis.cost import integer_costs
from rlpack.packing.errors import PackingError
from rlpack.packing.lengths import UNLIMITED, Integers, check_count, to_list_or_array
from rlpack.packing.rebalance import rebalance

# Differencing takes time proportional to rows × parts. Beyond this product, parts have so many rows that largest-first
# is as good.
_DIFFERENCING_LIMIT = 2**24


def partition(weights: Integers, k: int, *, equal_size: bool = False) -> list[np.ndarray]:
    """Return k parts with similar sums of weights, each as the ascending indices of its rows, int64.

    Largest differencing (Karmarkar and Karp, "The differencing method of set partitioning", 1982) for k ways:
    repeatedly merge the two partial partitions whose parts differ most, the heaviest part of one with the lightest part
    of the other. With very many rows and parts, each row goes to the lightest part, heaviest rows first, and then rows
    are exchanged.

    >>> [part.tolist() for part in partition([8, 7, 6, 5, 4], 2)]
    [[0, 2], [1, 3, 4]]

    Args:
        weights: finite numbers of at least 0, one per row.
        k: number of parts; with fewer rows than parts, some are empty.
        equal_size: give every part the same number of rows, or one less if k does not divide them.

    Raises:
        PackingError: a weight is negative, not finite or not a number.
    """
    return bins_of(balance(integer_costs(check_weights(weights)), check_count(k, "k"), equal_size=equal_size), k)


def check_weights(weights: Integers) -> np.ndarray:
    """Return weights as int64 or float64 [B].

    Raises:
        PackingError: a weight is negative, not finite or not a number; the message names its row.
    """
    values = to_list_or_array(weights, "weight")
    if isinstance(values, list):
        for row, weight in enumerate(values):
            if isinstance(weight, (bool, np.bool_)) or not isinstance(weight, (int, float, np.number)):
                kind = type(weight).__name__
                raise PackingError(f"weight of row {row} is {weight!r}, of type {kind}; give one number per row")
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype == object:  # Python integers that are too large for NumPy
        row = next(row for row, weight in enumerate(values) if abs(weight) >= 2**63)
        raise PackingError(f"weight of row {row} is {values[row]}; it has to be a float or have at most 62 bits")
    if array.dtype.kind not in "iuf":
        raise PackingError(f"weights are {array.dtype} of shape {array.shape}; give one number per row")
    wrong = ~np.isfinite(array) | (array < 0)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise PackingError(f"weight of row {row} is {array[row]}; it has to be a finite number of at least 0")
    return array


def balance(weights: np.ndarray, k: int, *, equal_size: bool = False) -> np.ndarray:
    """Return the part of each row, for integer costs, int64 [B]; parts are numbered by their first rows."""
    if weights.size == 0:
        return np.zeros(0, dtype=np.int64)
    if not equal_size and weights.size * k > _DIFFERENCING_LIMIT:
        return by_first_row(_largest_first(weights, k))
    # For equal sizes, rows start in blocks of k of similar weight, one row per part; dummies fill the last block.
    dummies = -weights.size % k if equal_size else 0
    padded = np.concatenate((weights, np.zeros(dummies, dtype=np.int64)))
    order = decreasing(weights)
    order = np.concatenate((order, np.arange(weights.size, padded.size)))
    return by_first_row(_differencing(padded, order, k, k if equal_size else 1)[: weights.size])


def _largest_first(weights: np.ndarray, k: int) -> np.ndarray:
    """Assign rows, heaviest first, to the lightest part, then rebalance; return the part of each row, int64 [B]."""
    order, slots = decreasing(weights), np.zeros_like(weights)
    parts = np.empty_like(weights)
    parts[order] = kernels.spread(slots, weights[order], k, UNLIMITED)
    return rebalance(parts, slots, weights, ranks=k, num_bins=k, capacity=UNLIMITED)[0]


@compiled
def _differencing(weights: np.ndarray, order: np.ndarray, k: int, block: int) -> np.ndarray:
    """Return, for each row, the row that identifies its part.

    A partial partition (a state) is a list of at most k parts that hold rows, heaviest first. Empty parts are left out,
    so all states together have at most as many parts as there are rows. The sum of a part is relative to the lightest
    part of its state. Rows of a part are linked by `next_row`, parts of a state by `next_part`.
    """
    total = weights.size
    sums = weights.copy()
    next_part, next_row, last_row = np.full(total, -1), np.full(total, -1), np.arange(total)
    sizes = np.full(total, block)
    heads = order.copy()  # heaviest part of each state, indexed by the position of its first row in `order`
    heap = [(0, 0) for _ in range(0)]
    for start in range(0, total, block):
        _link(order[start : start + block], k, sums, next_part)
        heap.append((-int(sums[order[start]]), start))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, state = heapq.heappop(heap)
        _, other = heapq.heappop(heap)
        ours = _walk(heads[state], sizes[state], next_part)
        theirs = _walk(heads[other], sizes[other], next_part)
        # Our part i is merged with their part k-1-i; if one of the two is empty, the other stays unchanged.
        for at in range(max(0, k - theirs.size), ours.size):
            part, joined = ours[at], theirs[k - 1 - at]
            sums[part] += sums[joined]
            next_row[last_row[part]] = joined
            last_row[part] = last_row[joined]
        parts = np.concatenate((ours, theirs[: k - ours.size]))
        parts = parts[np.argsort(-sums[parts], kind="mergesort")]
        _link(parts, k, sums, next_part)
        heads[state], sizes[state] = parts[0], parts.size
        heapq.heappush(heap, (-int(sums[parts[0]]), state))
    final = heap[0][1]
    owner = np.zeros(total, dtype=np.int64)
    for part in _walk(heads[final], sizes[final], next_part):
        row = part
        while row >= 0:
            owner[row] = part
            row = next_row[row]
    return owner


@compiled
def _link(parts: np.ndarray, k: int, sums: np.ndarray, next_part: np.ndarray) -> None:
    """Link `parts`, heaviest first, to a state; if there are k, make their sums relative to the lightest."""
    lightest = sums[parts[-1]] if parts.size == k else 0
    for at in range(parts.size):
        sums[parts[at]] -= lightest
        next_part[parts[at]] = parts[at + 1] if at + 1 < parts.size else -1


@compiled
def _walk(head: int, count: int, next_part: np.ndarray) -> np.ndarray:
    """Return the parts of a state, heaviest first."""
    parts = np.zeros(count, dtype=np.int64)
    part = head
    for at in range(count):
        parts[at] = part
        part = next_part[part]
    return parts

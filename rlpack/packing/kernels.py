"""The compiled inner loops of packing and dispatch.

Sizes are int64, one a row; a bin goes by its number, in order of opening. Modified first-fit decreasing has a module
of its own, `rlpack.packing.modified_first_fit`.
"""

import heapq

import numpy as np

from rlpack.packing.compile import compiled


@compiled
def next_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each row: the last one, or a new one when the last has no room."""
    labels = np.zeros(sizes.size, dtype=np.int64)
    label, used = 0, 0
    for row in range(sizes.size):
        if used + sizes[row] > capacity:
            label += 1
            used = 0
        used += sizes[row]
        labels[row] = label
    return labels


@compiled
def first_fit(sizes: np.ndarray, order: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each row of `order`: the first with room, found in a tree of the greatest free room."""
    labels = np.zeros(sizes.size, dtype=np.int64)
    leaves = 1
    while leaves < order.size:
        leaves *= 2
    room = np.full(2 * leaves, capacity)
    for row in order:
        size = sizes[row]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        labels[row] = node - leaves
        room[node] -= size
        node //= 2
        while node >= 1:
            room[node] = max(room[2 * node], room[2 * node + 1])
            node //= 2
    return labels


@compiled
def best_fit(sizes: np.ndarray, order: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each row of `order`: the one that it leaves the least room in.

    Bins lie in buckets by free room, each a linked list; a tree counts the bins below each of its nodes.
    """
    labels = np.zeros(sizes.size, dtype=np.int64)
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    filled = np.zeros(2 * leaves, dtype=np.int32)
    first = np.zeros(capacity + 1, dtype=np.int32)  # a bin's number plus one; 0 is none
    after = np.zeros(sizes.size + 2, dtype=np.int32)
    bins = 0
    for row in order:
        leaf = _next_filled(filled, leaves + int(sizes[row]), leaves)
        if leaf:
            free = leaf - leaves
            label = first[free]
            first[free] = after[label]
            _add_along(filled, leaf, -1)
        else:
            bins += 1
            free, label = capacity, bins
        labels[row] = label - 1
        free -= int(sizes[row])
        after[label] = first[free]
        first[free] = label
        _add_along(filled, leaves + free, 1)
    return labels


@compiled
def _next_filled(filled: np.ndarray, leaf: int, leaves: int) -> int:
    """Return the first leaf from `leaf` on with a bin, or 0."""
    node = leaf
    while node > 1 and filled[node] == 0:
        while node > 1 and node % 2 == 1:  # a right child: what is further right hangs higher up
            node //= 2
        if node > 1:
            node += 1
    if node <= 1:
        return 0
    while node < leaves:
        node *= 2
        if filled[node] == 0:
            node += 1
    return node


@compiled
def _add_along(filled: np.ndarray, leaf: int, number: int) -> None:
    """Add `number` to a leaf and all nodes above it."""
    node = leaf
    while node >= 1:
        filled[node] += number
        node //= 2


@compiled
def least_loaded(weights: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """Return the bin of each row, rows of `order` going to the lightest of `count` bins, the first among equals."""
    labels = np.zeros(weights.size, dtype=np.int64)
    heap = [(0, label) for label in range(count)]
    for row in order:
        load, label = heap[0]
        labels[row] = label
        heapq.heapreplace(heap, (load + int(weights[row]), label))
    return labels


@compiled
def chunk(counts: np.ndarray, widths: np.ndarray, costs: np.ndarray, limits: tuple[int, int, int]) -> np.ndarray:
    """Cut a sequence of items into padded microbatches, greedily and in order; returns each item's microbatch.

    An item is `counts` rows, padded to `widths`; a row of that width costs `costs`, which grows with the width.
    A microbatch is closed when one more item would pass a limit: rows, rows × width, rows × cost. An item that alone
    passes a limit stands alone.
    """
    max_rows, max_slots, max_cost = limits
    labels = np.zeros(counts.size, dtype=np.int64)
    label, rows, width, cost = 0, 0, 0, 0
    for item in range(counts.size):
        more = rows + counts[item]
        wide, dear = max(width, widths[item]), max(cost, costs[item])
        if rows > 0 and (more > max_rows or more * wide > max_slots or more * dear > max_cost):
            label += 1
            more, wide, dear = counts[item], widths[item], costs[item]
        rows, width, cost = more, wide, dear
        labels[item] = label
    return labels


@compiled
def dispatch(slots: np.ndarray, ranks: int, loads: np.ndarray) -> np.ndarray:
    """Deal microbatches, sorted by cost, to ranks: `ranks` of them at each index, one to each rank.

    At each index the one with the most slots goes to the rank that has had the fewest. `loads`, int64 [ranks], are
    the ranks' slots so far and are updated. Returns the rank of each microbatch.
    """
    dealt = np.zeros(slots.size, dtype=np.int64)
    for start in range(0, slots.size, ranks):
        stop = min(start + ranks, slots.size)
        receivers = np.argsort(loads, kind="mergesort")
        heaviest = np.argsort(-slots[start:stop], kind="mergesort")
        for at in range(stop - start):
            dealt[start + heaviest[at]] = receivers[at]
        for at in range(start, stop):
            loads[dealt[at]] += slots[at]
    return dealt

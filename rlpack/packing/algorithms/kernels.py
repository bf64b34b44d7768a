"""The compiled inner loops of packing and dispatch.

Sizes are int64, one a row; a bin goes by its number, in order of opening. Modified first-fit decreasing has a module
of its own, `rlpack.packing.algorithms.first_fit`.
"""

import heapq

import numpy as np

from rlpack.packing.algorithms.jit import compiled


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
def spread(slots: np.ndarray, costs: np.ndarray, count: int, capacity: int) -> np.ndarray:
    """Return the bin of each row; in order, rows go to the cheapest of `count` bins with room, to −1 where none has.

    A bin without room for a row waits aside, the roomiest first, until a row comes that it has room for.
    """
    labels = np.full(slots.size, -1)
    used, loads = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    heap = [(0, label) for label in range(count)]
    aside = [(0, 0) for _ in range(0)]
    for row in range(slots.size):
        while len(aside) > 0 and aside[0][0] + slots[row] <= capacity:
            label = heapq.heappop(aside)[1]
            heapq.heappush(heap, (loads[label], label))
        while len(heap) > 0 and used[heap[0][1]] + slots[row] > capacity:
            label = heapq.heappop(heap)[1]
            heapq.heappush(aside, (used[label], label))
        if len(heap) == 0:
            return labels
        label = heap[0][1]
        labels[row] = label
        used[label] += slots[row]
        loads[label] += costs[row]
        heapq.heapreplace(heap, (loads[label], label))
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
def deal(slots: np.ndarray) -> np.ndarray:
    """Deal the microbatches of each index to ranks, one to each; `slots` are int64 [indices, ranks].

    The indices come in order of how far apart their slots lie; at each, the microbatch with the most slots goes to the
    rank that has had the fewest. Returns the rank of each microbatch, of the same shape.
    """
    indices, ranks = slots.shape
    dealt = np.zeros((indices, ranks), dtype=np.int64)
    loads = np.zeros(ranks, dtype=np.int64)
    apart = np.zeros(indices, dtype=np.int64)
    for index in range(indices):
        apart[index] = slots[index].max() - slots[index].min()
    for index in np.argsort(-apart, kind="mergesort"):
        receivers = np.argsort(loads, kind="mergesort")
        heaviest = np.argsort(-slots[index], kind="mergesort")
        for at in range(ranks):
            dealt[index, heaviest[at]] = receivers[at]
        for at in range(ranks):
            loads[dealt[index, at]] += slots[index, at]
    return dealt

"""The compiled inner loops of packing and of dealing microbatches to ranks.

Sizes are int64, one per row; bins are numbered in order of opening.
"""

import heapq

import numpy as np

from rlpack.packing.algorithms.jit import compiled


@compiled
def next_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each row by next-fit: the last bin, or a new one if the last has no room."""
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
    """Return the bin of each row, by first-fit in `order`, from a max-tree of the bins' free room."""
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
    """Return the bin of each row: the cheapest with room.

    Rows are placed in order. If a row fits nowhere, it and all later rows get −1. A bin without room for the current
    row waits in a heap, ordered by free room, until a row fits into it.
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
    """Return the padded microbatch of each item, cut greedily and in order.

    An item is `counts` rows padded to `widths`; one row of that width costs `costs`, which grows with the width. A
    microbatch is closed before the item that would make it exceed a limit on rows, rows × width, or rows × cost. An
    item that exceeds a limit on its own gets its own microbatch.
    """
    max_rows, max_slots, max_cost = limits
    labels = np.zeros(counts.size, dtype=np.int64)
    label, rows, width, cost = 0, 0, 0, 0
    for item in range(counts.size):
        more = rows + counts[item]
        wide, highest = max(width, widths[item]), max(cost, costs[item])
        if rows > 0 and (more > max_rows or more * wide > max_slots or more * highest > max_cost):
            label += 1
            more, wide, highest = counts[item], widths[item], costs[item]
        rows, width, cost = more, wide, highest
        labels[item] = label
    return labels


@compiled
def deal(slots: np.ndarray) -> np.ndarray:
    """Return the rank of each microbatch, int64 [indices, ranks]; every rank gets one microbatch of each index.

    Indices are dealt in order of decreasing spread of their `slots`, int64 [indices, ranks]. At each index, the
    microbatch with the most slots goes to the rank with the fewest slots so far.
    """
    indices, ranks = slots.shape
    rank_of = np.zeros((indices, ranks), dtype=np.int64)
    loads = np.zeros(ranks, dtype=np.int64)
    spread_of = np.zeros(indices, dtype=np.int64)
    for index in range(indices):
        spread_of[index] = slots[index].max() - slots[index].min()
    for index in np.argsort(-spread_of, kind="mergesort"):
        receivers = np.argsort(loads, kind="mergesort")
        heaviest = np.argsort(-slots[index], kind="mergesort")
        for at in range(ranks):
            rank_of[index, heaviest[at]] = receivers[at]
        for at in range(ranks):
            loads[rank_of[index, at]] += slots[index, at]
    return rank_of

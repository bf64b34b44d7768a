"""Form the microbatches of one optimizer step, and cut them until there are enough.

A bin is a set of items; `labels`, int64 [I], says which bin each item is in, bins counting from 0 without gaps.
No function here lets a bin pass the token budget.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from rlpack.packing import kernels
from rlpack.packing.batching import Batching
from rlpack.packing.items import UNLIMITED, Items
from rlpack.packing.packers import decreasing, pack_labels
from rlpack.packing.partitioning import balance

# Differencing takes time in items × bins; beyond this, greedy balance is as good and quicker.
_DIFFERENCING_LIMIT = 2**16


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


def form(batching: Batching, items: Items, seed: int) -> np.ndarray:
    """Return labels of as few bins as the mode's algorithm finds: packed, dynamic or, in item order, fixed."""
    if batching.mode == "packed":
        assert batching.max_tokens is not None
        return pack_labels(items.slots, batching.max_tokens, batching.algorithm, seed=seed)
    if batching.mode == "dynamic":
        return _chunk_decreasing(batching, items, UNLIMITED)
    limits = (batching.rows, batching.max_tokens or UNLIMITED, UNLIMITED)
    return kernels.chunk(items.counts, items.widths, items.unit_costs, limits)


def rebalance(batching: Batching, items: Items, count: int) -> np.ndarray | None:
    """Return labels of at most `count` bins whose costs are as like as can be; None if that breaks the budget."""
    if items.size == 0 or batching.mode == "fixed":
        return None
    if batching.mode == "dynamic":
        return _least_dear(batching, items, count)
    assert batching.max_tokens is not None
    if items.size * count <= _DIFFERENCING_LIMIT:
        labels = balance(items.costs, count)
    else:
        labels = kernels.least_loaded(items.costs, decreasing(items.costs), count)
        labels = np.unique(labels, return_inverse=True)[1]
    return None if _sums(labels, items.slots, count).max() > batching.max_tokens else labels


def rebalance_tail(batching: Batching, items: Items, labels: np.ndarray, count: int, ranks: int) -> np.ndarray | None:
    """Return labels that keep the dearest bins as they are, and balance the rest over the last index of all ranks.

    None if there is nothing to keep, or if balancing breaks the budget.
    """
    costs = measure(batching, items, labels).costs
    kept = (count - 1) // ranks * ranks
    if not 0 < kept < costs.size:
        return None
    order = np.argsort(-costs, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    moved = place[labels]
    rest = np.flatnonzero(moved >= kept)
    balanced = rebalance(batching, items.take(rest), count - kept)
    if balanced is None:
        return None
    moved[rest] = kept + balanced
    return moved


def cut(batching: Batching, items: Items, labels: np.ndarray, count: int) -> np.ndarray:
    """Return labels of `count` bins, reached by halving the dearest bin of several items as long as there is one."""
    bins = measure(batching, items, labels)
    if bins.costs.size >= count:
        return labels
    labels = labels.copy()
    order = np.argsort(labels, kind="stable")
    members: list[np.ndarray] = np.split(order, np.cumsum(np.bincount(labels, minlength=bins.costs.size))[:-1])
    heap = [(-int(cost), at) for at, cost in enumerate(bins.costs) if members[at].size > 1]
    heapq.heapify(heap)
    while len(members) < count and heap:
        _, at = heapq.heappop(heap)
        left, right = _halve(batching, items, members[at])
        labels[right] = len(members)
        members[at] = left
        members.append(right)
        for half, name in ((left, at), (right, len(members) - 1)):
            if half.size > 1:
                heapq.heappush(heap, (-_cost(batching, items, half), name))
    return labels


def _sums(labels: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    # float64 holds these integers exactly: ticks are at most 2**32 a row.
    return np.bincount(labels, weights=values, minlength=count).astype(np.int64)


def _chunk_decreasing(batching: Batching, items: Items, max_cost: int) -> np.ndarray:
    order = decreasing(items.widths)
    limits = (UNLIMITED, batching.max_tokens or UNLIMITED, max_cost)
    labels = np.empty(items.size, dtype=np.int64)
    labels[order] = kernels.chunk(items.counts[order], items.widths[order], items.unit_costs[order], limits)
    return labels


def _least_dear(batching: Batching, items: Items, count: int) -> np.ndarray:
    """Return at most `count` runs of like width, the dearest of which is as cheap as bisection finds."""
    best = _chunk_decreasing(batching, items, UNLIMITED)
    low, high = 0, int(measure(batching, items, best).costs.max())
    while low + 1 < high and (high - low) * 1000 > high:
        middle = (low + high) // 2
        labels = _chunk_decreasing(batching, items, middle)
        if int(labels.max()) < count:
            best, high = labels, middle
        else:
            low = middle
    return best


def _cost(batching: Batching, items: Items, members: np.ndarray) -> int:
    if batching.mode == "packed":
        return int(items.costs[members].sum())
    return int(items.counts[members].sum() * items.unit_costs[members].max())


def _halve(batching: Batching, items: Items, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two parts, neither empty, of like cost: any when packed, else of like width or in arrival order."""
    if batching.mode == "packed":
        ordered = members[decreasing(items.costs[members])]
        left, right, balance_ = [ordered[0]], [ordered[1]], int(items.costs[ordered[0]] - items.costs[ordered[1]])
        for item in ordered[2:]:
            lighter, sign = (right, -1) if balance_ > 0 else (left, 1)
            lighter.append(item)
            balance_ += sign * int(items.costs[item])
        return np.array(left), np.array(right)
    ordered = members[decreasing(items.widths[members])] if batching.mode == "dynamic" else members
    counts, units = items.counts[ordered], items.unit_costs[ordered]
    ahead = np.cumsum(counts) * np.maximum.accumulate(units)
    behind = (np.cumsum(counts[::-1]) * np.maximum.accumulate(units[::-1]))[::-1]
    at = 1 + int(np.argmin(np.maximum(ahead[:-1], behind[1:])))
    return ordered[:at], ordered[at:]

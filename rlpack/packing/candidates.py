"""Candidates for the packed or dynamic bins of one optimizer step, and a lower bound on their cost.

`labels`, int64 [I], give the bin of each item; bins are numbered from 0 without gaps. No bin exceeds the token budget.
LPT (longest processing time first, Graham 1969) puts items into the cheapest bin with room, costliest items first.
"""

from collections.abc import Iterator

import numpy as np

from rlpack.packing.algorithms import kernels
from rlpack.packing.algorithms.contiguous import partition_sorted
from rlpack.packing.algorithms.partition import balance
from rlpack.packing.algorithms.sorting import decreasing
from rlpack.packing.analysis.cost import lockstep_cost
from rlpack.packing.batching import Batching
from rlpack.packing.lengths import UNLIMITED
from rlpack.packing.row_sets import RowSets

# Differencing takes time proportional to items × bins; above this product, LPT is as good and faster.
_DIFFERENCING_LIMIT = 2**13
# Padded runs may exceed the fewest slots by one part in this many, if ranks then wait less for each other.
_SLOTS_FOR_EVENNESS = 250


def candidates(
    batching: Batching, items: RowSets, packed: np.ndarray, num_bins: int, ranks: int
) -> Iterator[np.ndarray]:
    """Yield labels of at most `num_bins` bins, most promising first.

    No bin is above the budget.

    Args:
        batching: the mode and the budget.
        items: the items to put into bins.
        packed: labels of as few bins as the mode's packer finds.
        num_bins: maximum number of bins.
        ranks: number of bins at one index.
    """
    if items.size == 0:
        yield packed
    elif batching.mode == "dynamic":
        yield from _contiguous(batching, items, num_bins)
    else:
        lpt = _lpt_labels(batching, items, num_bins)
        if lpt is not None:
            yield lpt
        others = list(_other_labels(batching, items, packed, num_bins, ranks))
        yield from sorted(others, key=lambda labels: lockstep_cost(items.merged_costs(labels, "packed"), ranks))


def lockstep_bound(batching: Batching, items: RowSets, ranks: int) -> int:
    """Return a lower bound of Σ_i max_rank cost(rank, i).

    The bound holds for every way of dealing packed rows to the ranks.

    An index costs at least as much as its costliest row. Number the rows from 1 by decreasing length, and let R be the
    number of ranks. The first k indices then cost at least as much as the first k of rows 1, R + 1, 2 R + 1, …, as long
    as no two of these fit into one bin. The R · k bins of these indices hold at most as many of the costliest rows as
    the budget allows; the remaining rows go to the other indices.
    """
    total = int(items.costs.sum())
    bound = -(-total // ranks)
    if batching.mode != "packed" or items.size == 0 or (items.counts > 1).any():
        return bound
    order = decreasing(items.slots)
    slots, costs = np.minimum(items.slots[order], batching.budget), items.costs[order]
    firsts = np.arange(0, items.size, ranks)
    firsts = firsts[(firsts == 0) | (2 * slots[firsts] > batching.budget)]
    heads = np.cumsum(costs[firsts])
    ends = np.searchsorted(np.cumsum(slots), (firsts + ranks) * batching.budget)
    covered = np.cumsum(costs)[np.minimum(ends, items.size - 1)]
    rest = np.maximum(total - np.minimum(covered, heads * ranks), 0)
    return max(bound, int((heads + rest // ranks).max()))


def _other_labels(
    batching: Batching, items: RowSets, packed: np.ndarray, num_bins: int, ranks: int
) -> Iterator[np.ndarray]:
    """Yield candidates other than full LPT: the packer's bins, LPT for the last index, and differencing."""
    yield packed
    tail = _lpt_tail(batching, items, packed, num_bins, ranks)
    if tail is not None:
        yield tail
    if items.size * num_bins <= _DIFFERENCING_LIMIT:
        differenced = balance(items.costs, num_bins)
        if items.merged_slots(differenced, "packed").max() <= batching.budget:
            yield differenced


def _lpt_labels(batching: Batching, items: RowSets, num_bins: int) -> np.ndarray | None:
    """Return labels of packed bins of similar cost, by LPT; None if an item fits nowhere."""
    order = decreasing(items.costs)
    placed = kernels.spread(items.slots[order], items.costs[order], num_bins, batching.budget)
    if placed.size and placed.min() < 0:
        return None
    in_use = np.bincount(placed, minlength=num_bins) > 0
    labels = np.empty_like(placed)
    labels[order] = (np.cumsum(in_use) - 1)[placed]
    return labels


def _lpt_tail(batching: Batching, items: RowSets, packed: np.ndarray, num_bins: int, ranks: int) -> np.ndarray | None:
    """Return labels that keep the costliest bins and distribute the other items over the last index by LPT.

    The result is None if there is nothing to keep, or if an item fits nowhere.
    """
    costs = items.merged_costs(packed, "packed")
    num_unchanged = (num_bins - 1) // ranks * ranks
    if not 0 < num_unchanged < costs.size:
        return None
    place = np.empty_like(costs)
    place[decreasing(costs)] = np.arange(costs.size)
    labels = place[packed]
    rest = np.flatnonzero(labels >= num_unchanged)
    lpt_of_rest = _lpt_labels(batching, items.select(rest), num_bins - num_unchanged)
    if lpt_of_rest is None:
        return None
    labels[rest] = num_unchanged + lpt_of_rest
    return labels


def _contiguous(batching: Batching, items: RowSets, num_bins: int) -> Iterator[np.ndarray]:
    """Yield labels of runs of items of similar width.

    The runs with the fewest slots come first. Tighter budgets give more even runs; these follow if they take hardly any
    more slots.
    """
    order = decreasing(items.longest_slots)
    counts, widths = items.counts[order], items.longest_slots[order]
    labels = np.empty(items.size, dtype=np.int64)
    labels[order] = partition_sorted(counts, widths, num_bins, batching.budget)
    yield labels
    fewest = int(items.merged_slots(labels, "dynamic").sum())
    tightest = _tightest_budget(batching, counts, widths, num_bins)
    for share in (0, 1, 3):
        evened = np.empty_like(labels)
        budget = tightest + (batching.budget - tightest) * share // 8
        evened[order] = partition_sorted(counts, widths, num_bins, budget)
        if int(items.merged_slots(evened, "dynamic").sum()) <= fewest + fewest // _SLOTS_FOR_EVENNESS:
            yield evened


def _tightest_budget(batching: Batching, counts: np.ndarray, widths: np.ndarray, num_bins: int) -> int:
    """Find the smallest budget at which `num_bins` runs hold all rows, by bisection."""
    high = min(batching.budget, int(counts.sum() * widths[0]))
    low = 0
    while low + 1 < high and (high - low) * 1000 > high:
        middle = (low + high) // 2
        labels = kernels.chunk(counts, widths, widths, (UNLIMITED, middle, UNLIMITED))
        if int(labels[-1]) < num_bins:
            high = middle
        else:
            low = middle
    return high

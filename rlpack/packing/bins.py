"""Bins: the microbatches of one optimizer step.

`labels`, int64 [I], give the bin of each item; bins are numbered from 0 without gaps. Invariants:

1. No bin exceeds the token budget, except one that holds a single oversized item.
2. The number of bins is a multiple of the ranks; the number per rank meets `min_microbatches` and `divisible_by`.
3. Bins of similar cost are at the same index on all ranks, unless `balance` is "none" or the mode is fixed.
"""

from dataclasses import replace

import numpy as np

from rlpack.packing.algorithms import kernels
from rlpack.packing.algorithms.halving import halve_costliest
from rlpack.packing.algorithms.packers import bins_of, optimal, pack_labels
from rlpack.packing.algorithms.partition import balance
from rlpack.packing.algorithms.sorting import ascending, by_first_row, decreasing
from rlpack.packing.analysis.cost import lockstep_cost
from rlpack.packing.batching import Batching
from rlpack.packing.candidates import candidates, lockstep_bound
from rlpack.packing.lengths import UNLIMITED, align
from rlpack.packing.rebalance import rebalance
from rlpack.packing.request import PlanRequest
from rlpack.packing.row_sets import RowSets

# A step within this fraction of its lower bound is not improved further.
_TOLERANCE = 2**-11
# Most exchanges that a plan may try: about five nanoseconds each.
_MIN_WORK, _WORK_PER_ROW = 2**20, 64


def pack_items(batching: Batching, items: RowSets, seed: int) -> tuple[np.ndarray, bool]:
    """Pack items into as few bins as the mode's packer finds; return labels and whether its search hit its limit.

    Packed bins are filled by `batching.algorithm`, dynamic ones by decreasing width, fixed ones in arrival order.
    """
    if batching.mode == "packed":
        if batching.algorithm == "optimal":
            return optimal(items.slots, batching.budget)
        return pack_labels(items.slots, batching.budget, batching.algorithm, seed=seed), False
    if batching.mode == "dynamic":
        order, max_rows = decreasing(items.longest_slots), UNLIMITED
    else:
        order, max_rows = np.arange(items.size), batching.micro_batch_size
    labels = np.empty(items.size, dtype=np.int64)
    limits = (max_rows, batching.budget, UNLIMITED)
    labels[order] = kernels.chunk(items.counts[order], items.longest_slots[order], items.longest_costs[order], limits)
    return labels, False


def split_bins(batching: Batching, items: RowSets, labels: np.ndarray, num_bins: int) -> np.ndarray:
    """Split bins until there are `num_bins`; return the labels.

    The costliest bin with several items is halved repeatedly, as long as there is one.
    """
    sizes = np.bincount(labels)
    if sizes.size >= num_bins:
        return labels
    packed = batching.mode == "packed"
    costs = items.costs if packed else items.longest_costs
    keys = items.costs if packed else items.longest_slots
    in_order = batching.mode == "fixed" or (packed and batching.balance == "none")
    members = np.arange(items.size) if in_order else decreasing(keys)
    members = members[ascending(labels[members])]
    return halve_costliest(labels, members, sizes, num_bins, items.counts, costs, packed, in_order)


def bin_step(request: PlanRequest, items: RowSets, oversized: np.ndarray) -> tuple[np.ndarray, int, bool]:
    """Place the items of one optimizer step in a grid of microbatches, indices × ranks.

    Args:
        request: the checked arguments of `make_plan`.
        items: the items of the step, in arrival order.
        oversized: items that get their own microbatch, bool [I].

    Returns:
        The cell of each item, index * ranks + column, int64 [I]; the number of indices; whether the search for fewer
        bins hit its limit. In fixed mode, with `equal_rows` and with `balance=none`, the column is the rank; else the
        columns of an index are still to be dealt to the ranks.
    """
    if request.batching.divides_rows_first:
        return _bin_per_rank(request, items, oversized)
    if request.batching.balance == "none":
        return _bin_as_packed(request, items, oversized)
    return _bin_by_cost(request, items, oversized)


def _bin_per_rank(request: PlanRequest, items: RowSets, oversized: np.ndarray) -> tuple[np.ndarray, int, bool]:
    """Divide the items among the ranks, equally many for each; each forms its own bins."""
    batching, ranks = request.batching, request.dp_size
    parts = _equal_parts(request, items)
    packed = [_pack_all(request, items.select(part), oversized[part]) for part in parts]
    num_indices = _num_indices(batching, max(_num_bins(labels) for labels, _ in packed))
    cells = np.empty(items.size, dtype=np.int64)
    for rank, (part, (labels, _)) in enumerate(zip(parts, packed, strict=True)):
        own = items.select(part)
        if batching.mode == "fixed" or batching.balance == "none":
            index = by_first_row(split_bins(batching, own, labels, num_indices))
        else:
            alone = replace(request, dp_size=1)
            sharing = own.select(~oversized[part])
            labels = _best_bins(alone, own, sharing, oversized[part], labels[~oversized[part]], num_indices)
            index = _cells_by_cost(own.merged_costs(labels, batching.mode), 1, num_indices)[labels]
        cells[part] = index * ranks + rank
    return cells, num_indices, any(hit_limit for _, hit_limit in packed)


def _equal_parts(request: PlanRequest, items: RowSets) -> list[np.ndarray]:
    """Return the items of each rank that has any, ascending; the numbers of items differ by at most one.

    Ranks get similar costs if `batching.equal_rows` is set and `balance` isn't "none"; otherwise each gets a run of
    items.
    """
    batching, count = request.batching, min(request.dp_size, max(1, items.size))
    if batching.equal_rows and batching.balance != "none" and items.size:
        return bins_of(balance(items.costs, count, equal_size=True))
    return np.array_split(np.arange(items.size), count)


def _pack_all(request: PlanRequest, items: RowSets, oversized: np.ndarray) -> tuple[np.ndarray, bool]:
    """Run `pack_items`, with oversized items in the last bins; return labels and whether the search hit its limit."""
    if request.batching.mode == "fixed" or not oversized.any():  # chunks in arrival order hold such an item alone
        return pack_items(request.batching, items, request.seed)
    packed, hit_limit = pack_items(request.batching, items.select(~oversized), request.seed)
    return _with_oversized(packed, oversized), hit_limit


def _bin_as_packed(request: PlanRequest, items: RowSets, oversized: np.ndarray) -> tuple[np.ndarray, int, bool]:
    """Keep the packer's bins, in the order of their first items, and give each rank a run of them.

    Bins are split only where there are too few.
    """
    ranks = request.dp_size
    labels, hit_limit = _pack_all(request, items, oversized)
    num_indices = _num_indices(request.batching, -(-_num_bins(labels) // ranks))
    labels = by_first_row(split_bins(request.batching, items, labels, num_indices * ranks))
    runs = np.array_split(np.arange(_num_bins(labels)), ranks)
    cells = np.concatenate([np.arange(run.size) * ranks + rank for rank, run in enumerate(runs)])
    return cells[labels], num_indices, hit_limit


def _bin_by_cost(request: PlanRequest, items: RowSets, oversized: np.ndarray) -> tuple[np.ndarray, int, bool]:
    """Form bins that make the step short, and put bins of similar cost at the same index."""
    sharing = items.select(~oversized) if oversized.any() else items
    packed, hit_limit = pack_items(request.batching, sharing, request.seed)
    num_bins = _num_bins(packed) + int(oversized.sum())
    num_indices = _num_indices(request.batching, -(-num_bins // request.dp_size))
    labels = _best_bins(request, items, sharing, oversized, packed, num_indices)
    costs = items.merged_costs(labels, request.batching.mode)
    return _cells_by_cost(costs, request.dp_size, num_indices)[labels], num_indices, hit_limit


def _best_bins(
    request: PlanRequest,
    items: RowSets,
    sharing: RowSets,
    oversized: np.ndarray,
    packed: np.ndarray,
    num_indices: int,
) -> np.ndarray:
    """Return the labels of the candidate with the lowest lock-step cost, or of the first that is good enough.

    `sharing` are the items that are not oversized, and `packed` their labels in as few bins as the packer finds.
    """
    batching, ranks, num_bins = request.batching, request.dp_size, num_indices * request.dp_size
    num_shared = num_bins - int(oversized.sum())
    enough, work = _good_enough(request, items, num_indices), _work(request)
    best, lowest = None, 0
    for candidate in candidates(batching, sharing, packed, num_shared, ranks):
        labels = _with_oversized(split_bins(batching, sharing, candidate, num_shared), oversized)
        if batching.mode == "packed":
            labels, unused = rebalance(
                labels,
                items.slots,
                items.costs,
                ranks=ranks,
                num_bins=num_bins,
                capacity=batching.budget,
                enough=enough,
                work=work // 2,
            )
            work -= work // 2 - unused
        cost = lockstep_cost(items.merged_costs(labels, batching.mode), ranks)
        if best is None or cost < lowest:
            best, lowest = labels, cost
        if lowest <= enough:
            break
    assert best is not None
    return best


def _with_oversized(shared: np.ndarray, oversized: np.ndarray) -> np.ndarray:
    """Return labels of all items, with a bin for each oversized one."""
    labels = np.empty(oversized.size, dtype=np.int64)
    labels[~oversized] = shared
    labels[oversized] = _num_bins(shared) + np.arange(int(oversized.sum()))
    return labels


def _cells_by_cost(costs: np.ndarray, ranks: int, num_indices: int) -> np.ndarray:
    """Return the cell of each bin, int64 [K]; bins of similar cost share an index.

    Some stages of a pipeline are idle while it fills during the first microbatch and drains during the last. The
    lightest bins go there.
    """
    place = np.empty_like(costs)
    place[decreasing(costs)] = np.arange(costs.size)
    index_of = np.roll(np.arange(num_indices), -1) if num_indices > 2 else np.arange(num_indices)
    return index_of[place // ranks] * ranks + place % ranks


def _num_indices(batching: Batching, per_rank: int) -> int:
    """Round microbatches per rank up to the minimum and the divisor."""
    return int(align(np.array(max(per_rank, batching.min_microbatches)), batching.divisible_by))


def _good_enough(request: PlanRequest, items: RowSets, num_indices: int) -> float:
    """Return the lock-step cost below which a step is not improved further."""
    bound = lockstep_bound(request.batching, items, request.dp_size)
    # If all costs are multiples of a grain (such as the alignment), the costs at an index can't differ by less.
    grain = int(np.gcd.reduce(items.costs))
    return bound * (1 + _TOLERANCE) + min(num_indices * grain, 2 * bound * _TOLERANCE)


def _work(request: PlanRequest) -> int:
    """Return how many exchanges one optimizer step may try, so that planning time grows linearly with the rows."""
    return max(_MIN_WORK, _WORK_PER_ROW * request.lengths.size) // max(1, request.num_steps)


def _num_bins(labels: np.ndarray) -> int:
    return int(labels.max(initial=-1)) + 1

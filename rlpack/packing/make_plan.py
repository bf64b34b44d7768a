"""make_plan: from lengths to a plan.

for each optimizer step:
    bins  = the mode's packer                # as few as it finds
    bins  = formed otherwise, levelled by cost, if that shortens the step
    bins  = cut until ranks, divisor and minimum are served
    bins  = made alike by exchanging rows
    grid  = bins of like cost at the same index on all ranks

In fixed mode rows stay in arrival order: each rank gets a run of them and chunks it by itself.
"""

from dataclasses import dataclass, replace

import numpy as np

from rlpack.packing.algorithms import kernels
from rlpack.packing.algorithms.sorting import ascending, decreasing
from rlpack.packing.analysis.cost import Cost
from rlpack.packing.analysis.plan_metrics import measure_plan
from rlpack.packing.batching import Batching
from rlpack.packing.bins import candidates, cut, form, lockstep_bound, measure
from rlpack.packing.errors import PackingError
from rlpack.packing.grouping import split_groups as split
from rlpack.packing.lengths import Integers, align, check_count, check_integers, check_lengths, check_seed
from rlpack.packing.plan import MicrobatchPlan, Request
from rlpack.packing.rebalance import refine
from rlpack.packing.rows import Items, Rows, multiple_of, resolve_rows

# A step this close to the bound of its lock step, as a part of it, is not improved further.
_CLOSE = 2**-11
# Exchanges that a plan looks at, at most: about five nanoseconds each.
_LEAST_WORK, _WORK_PER_ROW = 2**20, 64
# More is a slip of the pen that takes all memory: a plan holds every microbatch of every rank, empty ones too.
MAX_RANKS, _MOST_CELLS = 2**20, 2**26


def make_plan(
    lengths: Integers,
    batching: Batching,
    *,
    dp_size: int,
    mini_batch_size: int | None = None,
    groups: Integers | None = None,
    split_groups: bool = False,
    cost: Cost | None = None,
    seed: int = 0,
) -> MicrobatchPlan:
    """Return which rows share a microbatch, on which rank, in which optimizer step.

    >>> plan = make_plan([3, 6, 2, 3], Batching(max_tokens=8), dp_size=2)
    >>> [[mb.rows.tolist() for mb in plan.microbatches(rank, step=0)] for rank in range(2)]
    [[[1, 2]], [[0, 3]]]

    Args:
        lengths: tokens of each row, whole numbers of at least 0.
        batching: the mode, the token budget and the alignments.
        dp_size: number of data-parallel ranks.
        mini_batch_size: rows of an optimizer step, taken in arrival order; the last step may hold fewer. None makes
            one step of all rows.
        groups: an id for each row; rows of one id stay in one microbatch.
        split_groups: whether a group that no microbatch can hold may be split, into as few as the mode's algorithm
            finds; without, it is an error. How many were split is counted in the metrics.
        cost: model of a row's cost, for balance; None counts slots.
        seed: of the `first_fit_shuffle` packer.

    Raises:
        PackingError: a length is no length, a row or group is over the budget and `overlong` does not say what to do,
            a group spans two optimizer steps, or a count is below 1.
    """
    request = _checked(lengths, batching, dp_size, mini_batch_size, groups, cost, seed)
    num_split = 0
    if split_groups and request.groups is not None:
        request, num_split = split(request)
    rows = resolve_rows(request)
    steps = np.arange(request.lengths.size) // request.rows_per_step
    step_of_item = np.zeros(rows.items.size, dtype=np.int64)
    step_of_item[rows.item] = steps
    dropped = np.zeros(rows.items.size, dtype=bool)
    dropped[rows.item] = rows.dropped
    bounds = np.searchsorted(step_of_item, np.arange(request.num_steps + 1))
    column_of_item, index_of_item = np.full((2, rows.items.size), -1)
    step_bounds = np.zeros(request.num_steps + 1, dtype=np.int64)
    search_limit_hits = 0
    for step in range(request.num_steps):
        here = np.arange(bounds[step], bounds[step + 1])
        here = here[~dropped[here]]
        plan_step = _fixed_step if batching.mode == "fixed" else _balanced_step
        grid = plan_step(request, rows.items.take(here), rows.alone[here])
        column_of_item[here], index_of_item[here] = grid.column, grid.index + step_bounds[step]
        step_bounds[step + 1] = step_bounds[step] + grid.count
        search_limit_hits += grid.search_stopped
    if batching.mode != "fixed":
        column_of_item = _deal(request, rows.items, column_of_item, index_of_item)
    plan = _assemble(request, rows, column_of_item[rows.item], index_of_item[rows.item], step_bounds)
    return replace(plan, metrics=replace(plan.metrics, search_limit_hits=search_limit_hits, groups_split=num_split))


@dataclass(frozen=True, eq=False)
class _Grid:
    """Where the items of one optimizer step are.

    Attributes:
        column: place of each item at its index, int64 [I]: a rank in fixed mode, one still to be dealt to a rank else.
        index: of each item's microbatch, int64 [I].
        count: indices.
        search_stopped: whether the search for fewer microbatches ended at its budget.
    """

    column: np.ndarray
    index: np.ndarray
    count: int
    search_stopped: bool = False


def _checked(
    lengths: Integers,
    batching: Batching,
    dp_size: int,
    mini_batch_size: int | None,
    groups: Integers | None,
    cost: Cost | None,
    seed: int,
) -> Request:
    if not isinstance(batching, Batching):
        raise PackingError(f"batching is a {type(batching).__name__}; give a Batching")
    if cost is not None and not isinstance(cost, Cost):
        raise PackingError(f"cost is a {type(cost).__name__}; give a Cost, or None to count slots")
    counts = check_lengths(lengths)
    ids = None if groups is None else check_integers(groups, "group")
    if ids is not None and ids.size != counts.size:
        raise PackingError(f"groups has {ids.size} entries for {counts.size} rows; give one a row")
    size = None if mini_batch_size is None else check_count(mini_batch_size, "mini_batch_size")
    ranks = check_count(dp_size, "dp_size", MAX_RANKS)
    request = Request(counts, batching, ranks, size, ids, cost, check_seed(seed))
    least = int(align(np.array(max(1, batching.min_microbatches)), batching.divisible_by))
    cells = ranks * least * request.num_steps
    if cells > _MOST_CELLS:
        raise PackingError(
            f"dp_size is {ranks} with at least {least} microbatches on each rank in each of {request.num_steps} "
            f"optimizer steps, which makes {cells} in all, over the limit of {_MOST_CELLS}; lower "
            "batching.min_microbatches or batching.divisible_by, or raise the mini-batch size"
        )
    return request


def _target(batching: Batching, per_rank: int) -> int:
    """Return the number of microbatches on each rank that serves the minimum and the divisor."""
    return int(align(np.array(max(per_rank, batching.min_microbatches)), batching.divisible_by))


def _balanced_step(request: Request, items: Items, alone: np.ndarray) -> _Grid:
    """Plan a packed or dynamic step."""
    batching, ranks = request.batching, request.dp_size
    regular, single = np.flatnonzero(~alone), np.flatnonzero(alone)
    sharing = items.take(regular)
    formed, search_stopped = form(batching, sharing, request.seed)
    wanted = _target(batching, -(-(int(formed.max(initial=-1)) + 1 + single.size) // ranks))
    wanted_sharing = wanted * ranks - single.size
    enough, work = _good_enough(request, items, wanted), _work(request)
    best = None
    for candidate in candidates(batching, sharing, formed, wanted_sharing, ranks):
        labels = np.empty(items.size, dtype=np.int64)
        labels[regular] = cut(batching, sharing, candidate, wanted_sharing)
        labels[single] = np.arange(single.size) + int(labels[regular].max(initial=-1)) + 1
        if batching.mode == "packed":
            shape = (wanted * ranks, batching.max_tokens or 0)
            labels, left = refine(labels, items.slots, items.costs, ranks, shape, enough=enough, work=work // 2)
            work -= work // 2 - left
        bins = measure(batching, items, labels)
        if best is None or bins.lockstep_cost(ranks) < best.lockstep_cost(ranks):
            best = bins
        if best.lockstep_cost(ranks) <= enough:
            break
    assert best is not None
    order = decreasing(best.costs)
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    columns, index = place[best.labels] % ranks, place[best.labels] // ranks
    # A pipeline fills with its first microbatch and drains with its last, while some of its stages have nothing to do:
    # these two are the lightest.
    at = np.roll(np.arange(wanted), -1) if wanted > 2 else np.arange(wanted)
    return _Grid(columns, at[index], wanted, search_stopped)


def _good_enough(request: Request, items: Items, count: int) -> float:
    """Return a lock-step cost of a step of `count` indices that is not improved further."""
    bound = lockstep_bound(request.batching, items, request.dp_size)
    # Costs that are all multiples of a grain (the alignment, say) can't be levelled further than to it at each index.
    grain = int(np.gcd.reduce(items.costs))
    return bound * (1 + _CLOSE) + min(count * grain, 2 * bound * _CLOSE)


def _work(request: Request) -> int:
    """Return how many exchanges one optimizer step may look at, so that a plan's time grows with its rows."""
    return max(_LEAST_WORK, _WORK_PER_ROW * request.lengths.size) // max(1, request.num_steps)


def _deal(request: Request, items: Items, column: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the rank of each item, by its place at its index, so that ranks get like totals of slots.

    Indices whose microbatches differ most are dealt first, while there is time to make up for it.
    """
    kept = np.flatnonzero(index >= 0)
    ranks, count = request.dp_size, int(index.max(initial=-1)) + 1
    cell = index * ranks + column
    bins = measure(request.batching, items.take(kept), cell[kept])
    slots = np.zeros(count * ranks, dtype=np.int64)
    slots[: bins.slots.size] = bins.slots
    dealt = kernels.dispatch(slots.reshape(count, ranks))
    rank = np.full_like(column, -1)
    rank[kept] = dealt.ravel()[cell[kept]]
    return rank


def _fixed_step(request: Request, items: Items, alone: np.ndarray) -> _Grid:
    """Plan a step in arrival order."""
    batching = request.batching
    # Ranks without an item have nothing to plan; of a small step on many ranks they are nearly all.
    runs = np.array_split(np.arange(items.size), request.dp_size) if items.size >= request.dp_size else _single(items)
    formed = [form(batching, items.take(run), request.seed)[0] for run in runs]
    wanted = _target(batching, max((int(labels.max(initial=-1)) + 1 for labels in formed), default=0))
    rank, index = np.empty((2, items.size), dtype=np.int64)
    for at, (run, labels) in enumerate(zip(runs, formed, strict=True)):
        rank[run] = at
        index[run] = _in_arrival_order(cut(batching, items.take(run), labels, wanted))
    return _Grid(rank, index, wanted)


def _single(items: Items) -> list[np.ndarray]:
    """Return a run for each item."""
    return list(np.arange(items.size).reshape(-1, 1))


def _in_arrival_order(labels: np.ndarray) -> np.ndarray:
    """Renumber labels by their first items."""
    return np.cumsum(np.diff(labels, prepend=labels[:1]) != 0)


def _assemble(
    request: Request, rows: Rows, rank: np.ndarray, index: np.ndarray, step_bounds: np.ndarray
) -> MicrobatchPlan:
    """Lay the decision out as a plan: the microbatch of each row is (rank, index); both are −1 for a dropped row."""
    kept = np.flatnonzero(~rows.dropped)
    count = int(step_bounds[-1])
    total = request.dp_size * count
    cell = rank[kept] * count + index[kept]
    order = kept[ascending(cell)]
    inverse = np.full(rows.lengths.size, -1)
    inverse[order] = np.arange(order.size)
    counts = np.bincount(cell, minlength=total).astype(np.int64)
    widths = np.zeros(total, dtype=np.int64)
    if request.batching.mode == "packed":
        np.add.at(widths, cell, rows.aligned[kept])
    else:
        np.maximum.at(widths, cell, rows.aligned[kept])
    widths = np.maximum(widths, multiple_of(request.batching))
    steps = np.arange(rows.lengths.size) // request.rows_per_step
    shape = (request.dp_size, count)
    counts, widths = counts.reshape(shape), widths.reshape(shape)
    return MicrobatchPlan(
        request=request,
        metrics=measure_plan(request, rows, cell, counts, widths, step_bounds),
        lengths=rows.lengths,
        order=order,
        inverse=inverse,
        step_of_row=np.where(rows.dropped, -1, steps),
        truncated=np.flatnonzero(~rows.dropped & (rows.lengths < request.lengths)),
        dropped=np.flatnonzero(rows.dropped),
        counts=counts,
        widths=widths,
        step_bounds=step_bounds,
    )

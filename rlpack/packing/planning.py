"""make_plan: from lengths to a plan.

for each optimizer step:
    bins  = the mode's packer                # as few as it finds
    bins  = cut until ranks, divisor and minimum are served
    bins  = balanced by cost, all or the last on each rank, if that shortens the step
    grid  = bins of like cost at the same index on all ranks

In fixed mode rows stay in arrival order: each rank gets a run of them and chunks it by itself.
"""

from typing import Any

import numpy as np

from rlpack.packing import kernels
from rlpack.packing.batching import Batching
from rlpack.packing.binning import cut, form, measure, rebalance, rebalance_tail
from rlpack.packing.cost import Cost
from rlpack.packing.errors import PackingError
from rlpack.packing.items import Items, Rows, multiple_of, resolve_rows
from rlpack.packing.lengths import Integers, align, check_count, check_integers, check_lengths
from rlpack.packing.measures import measure_plan
from rlpack.packing.plan import MicrobatchPlan, Request


def make_plan(
    lengths: Integers,
    batching: Batching,
    *,
    dp_size: int,
    mini_batch_size: int | None = None,
    groups: Integers | None = None,
    cost: Cost | None = None,
    seed: int = 0,
) -> MicrobatchPlan:
    """Return which rows share a microbatch, on which rank, in which optimizer step.

    >>> plan = make_plan([3, 6, 2, 3], Batching(max_tokens=8), dp_size=2)
    >>> [[mb.rows.tolist() for mb in plan.microbatches(rank, step=0)] for rank in range(2)]
    [[[0, 2, 3]], [[1]]]

    Args:
        lengths: tokens of each row, whole numbers of at least 0.
        batching: the mode, the token budget and the alignments.
        dp_size: number of data-parallel ranks.
        mini_batch_size: rows of an optimizer step, taken in arrival order; the last step may hold fewer. None makes
            one step of all rows.
        groups: an id for each row; rows of one id stay in one microbatch.
        cost: model of a row's cost, for balance; None counts slots.
        seed: of the `first_fit_shuffle` packer.

    Raises:
        PackingError: a length is no length, a row or group is over the budget and `overlong` does not say what to do,
            a group spans two optimizer steps, or a count is below 1.
    """
    request = _checked(lengths, batching, dp_size, mini_batch_size, groups, cost, seed)
    rows = resolve_rows(request)
    steps = np.arange(request.lengths.size) // request.rows_per_step
    step_of_item = np.zeros(rows.items.size, dtype=np.int64)
    step_of_item[rows.item] = steps
    dropped = np.zeros(rows.items.size, dtype=bool)
    dropped[rows.item] = rows.dropped
    bounds = np.searchsorted(step_of_item, np.arange(request.num_steps + 1))
    rank_of_item, index_of_item = np.full((2, rows.items.size), -1)
    loads = np.zeros(request.dp_size, dtype=np.int64)
    step_bounds = np.zeros(request.num_steps + 1, dtype=np.int64)
    for step in range(request.num_steps):
        here = np.arange(bounds[step], bounds[step + 1])
        here = here[~dropped[here]]
        plan_step = _fixed_step if batching.mode == "fixed" else _balanced_step
        ranks, index, count = plan_step(request, rows.items.take(here), rows.alone[here], loads)
        rank_of_item[here], index_of_item[here] = ranks, index + step_bounds[step]
        step_bounds[step + 1] = step_bounds[step] + count
    return _assemble(request, rows, rank_of_item[rows.item], index_of_item[rows.item], step_bounds)


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
    counts = check_lengths(lengths)
    ids = None if groups is None else check_integers(groups, "group")
    if ids is not None and ids.size != counts.size:
        raise PackingError(f"groups has {ids.size} entries for {counts.size} rows; give one a row")
    size = None if mini_batch_size is None else check_count(mini_batch_size, "mini_batch_size")
    return Request(counts, batching, check_count(dp_size, "dp_size"), size, ids, cost, _check_seed(seed))


def _check_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise PackingError(f"seed is {seed!r}; it has to be a whole number")
    return int(seed)


def _target(batching: Batching, per_rank: int) -> int:
    """Return the number of microbatches on each rank that serves the minimum and the divisor."""
    return int(align(np.array(max(per_rank, batching.min_microbatches)), batching.divisible_by))


def _balanced_step(
    request: Request, items: Items, alone: np.ndarray, loads: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return rank and index of each item, and the count of microbatches on each rank, of a packed or dynamic step."""
    batching, ranks = request.batching, request.dp_size
    regular, single = np.flatnonzero(~alone), np.flatnonzero(alone)
    sharing = items.take(regular)
    formed = form(batching, sharing, request.seed)
    wanted = _target(batching, -(-(int(formed.max(initial=-1)) + 1 + single.size) // ranks))
    wanted_sharing = wanted * ranks - single.size
    labels = np.empty(items.size, dtype=np.int64)
    best = None
    balanced = rebalance(batching, sharing, wanted_sharing)
    for candidate in (formed, balanced, rebalance_tail(batching, sharing, formed, wanted_sharing, ranks)):
        if candidate is None:
            continue
        sized = cut(batching, sharing, candidate, wanted_sharing)
        labels[regular] = sized
        labels[single] = np.arange(single.size) + int(sized.max(initial=-1)) + 1
        bins = measure(batching, items, labels.copy())
        if best is None or bins.lockstep_cost(ranks) < best.lockstep_cost(ranks):
            best = bins
    assert best is not None
    order = np.argsort(-best.costs, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    dealt = kernels.dispatch(best.slots[order], ranks, loads)
    return dealt[place[best.labels]], place[best.labels] // ranks, wanted


def _fixed_step(
    request: Request, items: Items, alone: np.ndarray, loads: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return rank and index of each item, and the count of microbatches on each rank, of a step in arrival order."""
    batching = request.batching
    runs = np.array_split(np.arange(items.size), request.dp_size)
    formed = [form(batching, items.take(run), request.seed) for run in runs]
    wanted = _target(batching, max(int(labels.max(initial=-1)) + 1 for labels in formed))
    rank, index = np.empty((2, items.size), dtype=np.int64)
    for at, (run, labels) in enumerate(zip(runs, formed, strict=True)):
        rank[run] = at
        index[run] = _in_arrival_order(cut(batching, items.take(run), labels, wanted))
    return rank, index, wanted


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
    order = kept[np.argsort(cell, kind="stable")]
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

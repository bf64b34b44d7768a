"""make_plan: from lengths to a plan, in one pass.

    request = check_request(...)                  # the arguments, checked
    rows    = resolve_rows(request)               # truncated, dropped, gathered into items
    for each optimizer step:
        bins  = pack_items(items)                 # as few as the mode's packer finds
        bins  = the best of candidates(bins)      # each split to the count that is needed, then rebalanced
        cells = bins in a grid                    # bins of similar cost at the same index
    cells   = deal_to_ranks(cells)                # similar totals of slots on all ranks
    plan    = lay_out(rows, cells)                # with its metrics

In fixed mode rows stay in arrival order: each rank gets a run of them and chunks it by itself. With `equal_rows`, too,
rows are divided among ranks first. With `balance=none` the packer's bins stay as they are, in arrival order, and each
rank gets a run of them.

Two types carry the data from the request to the plan: `Rows`, and `RowSets` for items and bins.
`rlpack.packing.analysis.invariants` numbers the guarantees of a plan.
"""

from dataclasses import replace

import numpy as np

from rlpack.packing.algorithms import kernels
from rlpack.packing.algorithms.sorting import ascending
from rlpack.packing.analysis.cost import Cost
from rlpack.packing.analysis.metrics import measure
from rlpack.packing.batching import Batching
from rlpack.packing.bins import bin_step
from rlpack.packing.lengths import Integers
from rlpack.packing.plan import MicrobatchPlan
from rlpack.packing.prefixes import owners_in_microbatches, owners_of, shared_tokens
from rlpack.packing.request import check_request
from rlpack.packing.rows import Rows, resolve_rows


def make_plan(  # noqa: PLR0913 - the request
    lengths: Integers,
    batching: Batching,
    *,
    dp_size: int,
    mini_batch_size: int | None = None,
    groups: Integers | None = None,
    split_groups: bool = False,
    prefixes: Integers | None = None,
    cost: Cost | None = None,
    seed: int = 0,
) -> MicrobatchPlan:
    """Plan which rows share a microbatch, rank and optimizer step.

    >>> plan = make_plan([3, 6, 2, 3], Batching(max_tokens=8), dp_size=2)
    >>> [[mb.rows.tolist() for mb in plan.microbatches(rank, step=0)] for rank in range(2)]
    [[[1, 2]], [[0, 3]]]

    Args:
        lengths: tokens of each row, integers of at least 0.
        batching: the mode, the token budget and the alignments.
        dp_size: number of data-parallel ranks.
        mini_batch_size: rows of an optimizer step, in arrival order; the last step may hold fewer. None makes one step
            of all rows.
        groups: group id of each row; the rows of a group stay in one microbatch.
        split_groups: split a group that no microbatch can hold, into as few as the mode's packer finds. The default
            raises an error. The metrics count the groups that were split. With `prefixes`, groups are also split so
            that all ranks get similar loads, and where optimizer steps cut them.
        prefixes: tokens at the start of each row that all rows of its group have in common. A microbatch computes them
            once. Needs `groups` and `batching.share_prompts`.
        cost: cost model of a row, for balancing and metrics; None counts slots. `batching.balance` may balance slots.
        seed: seed of the `first_fit_shuffle` packer.

    Raises:
        PackingError: a length is invalid, a row or group is over the budget and `overlong` is "error", a group spans
            two optimizer steps, or a count is below 1.
    """
    request = check_request(
        lengths,
        batching,
        dp_size=dp_size,
        mini_batch_size=mini_batch_size,
        groups=groups,
        split_groups=split_groups,
        prefixes=prefixes,
        cost=cost,
        seed=seed,
    )
    rows = resolve_rows(request)
    cells, step_bounds, search_limit_hits = _bin_steps(rows)
    return _lay_out(rows, _deal_to_ranks(rows, cells), step_bounds, search_limit_hits)


def _bin_steps(rows: Rows) -> tuple[np.ndarray, np.ndarray, int]:
    """Form the microbatches of all optimizer steps.

    Returns:
        The cell of each item, index * ranks + column, int64 [I], −1 for a dropped one; the first index of each
        optimizer step, and their number, int64 [steps + 1]; the number of steps whose search hit its limit.
    """
    cells = np.full(rows.items.size, -1)
    step_bounds, search_limit_hits = [0], 0
    for items in rows.items_of_steps():
        in_step, num_indices, hit = bin_step(rows.request, rows.items.select(items), rows.oversized[items])
        cells[items] = step_bounds[-1] * rows.request.dp_size + in_step
        step_bounds.append(step_bounds[-1] + num_indices)
        search_limit_hits += hit
    return cells, np.array(step_bounds), search_limit_hits


def _deal_to_ranks(rows: Rows, cells: np.ndarray) -> np.ndarray:
    """Return the rank and index of each item, int64 [2, I].

    Ranks get similar totals of slots: the indices whose microbatches differ most are dealt first, so that later ones
    can compensate.
    """
    ranks, mode = rows.request.dp_size, rows.request.batching.mode
    index, column = cells // ranks, cells % ranks
    if rows.request.batching.divides_rows_first or rows.request.batching.balance == "none":
        return np.stack((np.where(cells < 0, -1, column), index))
    planned = np.flatnonzero(cells >= 0)
    slots = np.zeros((int(index.max(initial=-1)) + 1, ranks), dtype=np.int64)
    in_use = rows.items.select(planned).merged_slots(cells[planned], mode)
    slots.ravel()[: in_use.size] = in_use
    rank = np.full_like(index, -1)
    rank[planned] = kernels.deal(slots)[index[planned], column[planned]]
    return np.stack((rank, index))


def _lay_out(rows: Rows, placement: np.ndarray, step_bounds: np.ndarray, search_limit_hits: int) -> MicrobatchPlan:
    """Return the plan for a placement of items.

    `placement` is the rank and index of each item, int64 [2, I]; −1 if it is dropped.
    """
    request, batching = rows.request, rows.request.batching
    rank, index = placement[:, rows.item]
    planned = np.flatnonzero(~rows.dropped)
    shape = (request.dp_size, int(step_bounds[-1]))
    microbatch = rank[planned] * shape[1] + index[planned]
    owners = np.arange(rows.item.size)
    if request.prompts is not None and request.prefixes is not None:
        prefixes = request.prefixes[owners_of(rows.item)]
        owners[planned] = planned[owners_in_microbatches(microbatch, request.prompts[planned], prefixes[planned])]
        rows = replace(rows, shared=shared_tokens(rows.lengths, request.prefixes, owners))
    order = planned[ascending(microbatch)]
    inverse = np.full(rows.item.size, -1)
    inverse[order] = np.arange(order.size)
    counts = np.bincount(microbatch, minlength=shape[0] * shape[1]).astype(np.int64)
    padded_lengths = np.zeros_like(counts)
    merge_slots = np.add if batching.mode == "packed" else np.maximum
    merge_slots.at(padded_lengths, microbatch, rows.own_slots[planned])
    counts, padded_lengths = counts.reshape(shape), np.maximum(padded_lengths, batching.alignment).reshape(shape)
    return MicrobatchPlan(
        request=request,
        metrics=measure(rows, order, counts, padded_lengths, step_bounds, search_limit_hits=search_limit_hits),
        lengths=rows.lengths,
        shared=rows.shared,
        owners=owners,
        order=order,
        inverse=inverse,
        step_of_row=np.where(rows.dropped, -1, request.step_of_row),
        truncated=np.flatnonzero(~rows.dropped & (rows.lengths < request.lengths)),
        dropped=np.flatnonzero(rows.dropped),
        counts=counts,
        padded_lengths=padded_lengths,
        step_bounds=step_bounds,
    )

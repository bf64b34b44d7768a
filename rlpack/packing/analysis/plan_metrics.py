"""Compute the metrics of a plan from its grid of microbatches."""

from itertools import pairwise

import numpy as np

from rlpack.packing.algorithms.packers import fewest_bins
from rlpack.packing.analysis.metrics import PackingMetrics
from rlpack.packing.plan import Request
from rlpack.packing.rows import Rows


def measure_plan(
    request: Request, rows: Rows, cell: np.ndarray, counts: np.ndarray, widths: np.ndarray, step_bounds: np.ndarray
) -> PackingMetrics:
    """Return the metrics of a grid of microbatches.

    Args:
        request: what was asked for.
        rows: the batch's rows.
        cell: microbatch of each row that was kept, counted through the flattened grid.
        counts: rows of each microbatch, int64 [ranks, M].
        widths: padded length of each, int64 [ranks, M].
        step_bounds: first microbatch of each optimizer step, and M.
    """
    used = counts > 0
    slots = widths if request.batching.mode == "packed" else widths * np.maximum(counts, 1)
    in_use = slots[used]
    largest = int(in_use.max(initial=0))
    capacity = request.batching.max_tokens or max(largest, 1)
    real, total = int(rows.lengths.sum()), int(slots.sum())
    costs = _costs(request, rows, cell, counts, widths)
    dearest = (costs.argmax(axis=0) if costs.size else np.zeros(0, dtype=np.int64), np.arange(costs.shape[1]))
    firsts = step_bounds[:-1]
    loads = np.add.reduceat(slots * used, firsts, axis=1) if firsts.size else slots[:, :0]
    return PackingMetrics(
        num_microbatches=int(used.sum()),
        bin_utilisation=_ratio(real, in_use.size * capacity),
        waste_ratio=1.0 - _ratio(real, total),
        bin_balance=_ratio(int(in_use.sum()), in_use.size * largest),
        packing_efficiency=_ratio(_fewest(request, rows, capacity), in_use.size),
        rank_imbalance=_overhead(loads),
        lockstep_overhead=_overhead(costs),
        dummy_microbatches=int(used.size - used.sum()),
        overlong=int(rows.overlong.sum()),
        dropped=int(rows.dropped.sum()),
        truncated_tokens=int((request.lengths - rows.lengths)[~rows.dropped].sum()),
        real_tokens=real,
        slots=total,
        microbatches_per_rank=counts.shape[1],
        critical_slots=int(slots[dearest].sum()),
        critical_squares=float(_squares(request, rows, cell, counts, widths)[dearest].sum()),
    )


def _ratio(part: float, whole: float) -> float:
    """Return part / whole, and 1 (nothing lost, all alike) where there is nothing at all."""
    return part / whole if whole else 1.0


def _overhead(loads: np.ndarray) -> float:
    """Return Σ of the ranks' maxima over Σ of the ranks' means, less 1; `loads` is [ranks, ...]."""
    longest = float(loads.max(axis=0, initial=0).sum())
    return max(0.0, _ratio(longest * loads.shape[0], float(loads.sum())) - 1.0)


def _costs(request: Request, rows: Rows, cell: np.ndarray, counts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return the cost of each microbatch, float64 [ranks, M]; a filler's is 0."""
    cost = request.cost
    if request.batching.mode == "packed":
        aligned = rows.aligned[~rows.dropped]
        weights = aligned if cost is None else cost.of(aligned)
        return np.bincount(cell, weights=weights, minlength=counts.size).reshape(counts.shape)
    return counts * (widths.astype(np.float64) if cost is None else cost.of(widths))


def _squares(request: Request, rows: Rows, cell: np.ndarray, counts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return Σ slots² of the sequences of each microbatch, float64 [ranks, M]."""
    if request.batching.mode != "packed":
        return counts * widths.astype(np.float64) ** 2
    aligned = rows.aligned[~rows.dropped].astype(np.float64)
    return np.bincount(cell, weights=aligned**2, minlength=counts.size).reshape(counts.shape)


def _fewest(request: Request, rows: Rows, capacity: int) -> int:
    """Return a number of microbatches that no plan can go below, over all optimizer steps."""
    slots = np.minimum(rows.items.slots, capacity)
    step, dropped = np.zeros(slots.size, dtype=np.int64), np.zeros(slots.size, dtype=bool)
    step[rows.item] = np.arange(rows.item.size) // request.rows_per_step
    dropped[rows.item] = rows.dropped
    bounds = np.searchsorted(step, np.arange(request.num_steps + 1))
    slices = [slice(first, stop) for first, stop in pairwise(bounds)]
    return sum(fewest_bins(slots[here][~dropped[here]], capacity) for here in slices)

"""Metrics of a plan: how well it uses its slots, and how evenly its ranks are loaded."""

from dataclasses import asdict, dataclass

import numpy as np

from rlpack.packing.algorithms.packers import fewest_bins
from rlpack.packing.analysis.cost import Cost
from rlpack.packing.batching import Batching
from rlpack.packing.rows import Rows


@dataclass(frozen=True)
class PackingMetrics:
    """Metrics of a whole plan.

    Dummy microbatches count towards slots and microbatches per rank, but not as microbatches or bins.

    Attributes:
        num_microbatches: microbatches that hold rows, over all ranks and optimizer steps.
        bin_utilization: real tokens / (microbatches × token budget); without a budget, × the largest microbatch.
        waste_ratio: slots that hold no real token / all slots: the share of the computation that is wasted. As in
            `bin_utilization`, a prompt that rows share counts once.
        bin_balance: mean / maximum number of slots of a microbatch; 1 if all are equal.
        packing_efficiency: lower bound on the number of microbatches / microbatches.
        rank_imbalance: maximum / mean number of slots of a rank, − 1, weighted over optimizer steps.
        lockstep_overhead: Σ_i max_rank cost(rank, i) / (Σ cost / ranks) − 1: how much longer a step takes than on ranks
            that never wait for each other at a microbatch; 0 is the bound.
        dummy_microbatches: microbatches without rows.
        overlong: rows over the token budget, however they were handled.
        dropped: rows left out.
        truncated_tokens: tokens cut off.
        real_tokens: tokens that are not padding.
        shared_tokens: real tokens that aren't computed because another row of the microbatch has the same prompt.
        slots: all slots, padding and dummy microbatches included.
        microbatches_per_rank: microbatches of a rank, over all optimizer steps, dummy ones included.
        critical_slots: slots of the costliest microbatch of each index, summed: a step waits for these.
        critical_squares: squared slots of the sequences of these microbatches, summed: their attention.
        search_limit_hits: optimizer steps in which the search of `algorithm=optimal` hit its limit with more
            microbatches than the lower bound.
        groups_split: groups that no microbatch could hold and that were split.
    """

    num_microbatches: int
    bin_utilization: float
    waste_ratio: float
    bin_balance: float
    packing_efficiency: float
    rank_imbalance: float
    lockstep_overhead: float
    dummy_microbatches: int
    overlong: int
    dropped: int
    truncated_tokens: int
    real_tokens: int
    shared_tokens: int
    slots: int
    microbatches_per_rank: int
    critical_slots: int
    critical_squares: float
    search_limit_hits: int = 0
    groups_split: int = 0

    def as_dict(self) -> dict[str, float]:
        """Return the name and value of every metric, for logging."""
        return {name: float(value) for name, value in asdict(self).items()}


def measure(
    rows: Rows,
    order: np.ndarray,
    counts: np.ndarray,
    padded_lengths: np.ndarray,
    step_bounds: np.ndarray,
    *,
    search_limit_hits: int,
) -> PackingMetrics:
    """Return the metrics of a grid of microbatches.

    Args:
        rows: the rows of the batch.
        order: rows in dispatch order, rank by rank, int64 [B − dropped].
        counts: rows of each microbatch, int64 [ranks, M].
        padded_lengths: padded length of each microbatch, int64 [ranks, M].
        step_bounds: first microbatch of each optimizer step, and M, int64 [steps + 1].
        search_limit_hits: optimizer steps in which the search for fewer microbatches hit its limit.
    """
    request, batching = rows.request, rows.request.batching
    in_use = counts > 0
    slots = microbatch_slots(batching, counts, padded_lengths)
    used_slots = slots[in_use]
    largest = int(used_slots.max(initial=0))
    capacity = batching.max_tokens or max(largest, 1)
    real_tokens, shared_tokens, all_slots = int(rows.lengths.sum()), int(rows.shared.sum()), int(slots.sum())
    computed_tokens = real_tokens - shared_tokens
    lengths, shared = rows.lengths[order], rows.shared[order]
    costs = microbatch_costs(batching, lengths, counts, padded_lengths, request.cost, shared)
    squares = microbatch_costs(batching, lengths, counts, padded_lengths, Cost(linear=0.0, quadratic=1.0), shared)
    costliest = (costs.argmax(axis=0) if costs.size else np.zeros(0, dtype=np.int64), np.arange(costs.shape[1]))
    return PackingMetrics(
        num_microbatches=int(in_use.sum()),
        bin_utilization=_ratio(computed_tokens, used_slots.size * capacity),
        waste_ratio=1.0 - _ratio(computed_tokens, all_slots),
        bin_balance=_ratio(int(used_slots.sum()), used_slots.size * largest),
        packing_efficiency=_ratio(_fewest_microbatches(rows, capacity), used_slots.size),
        rank_imbalance=_overhead(_slots_per_step(slots * in_use, step_bounds)),
        lockstep_overhead=_overhead(costs),
        dummy_microbatches=int(in_use.size - in_use.sum()),
        overlong=int((batching.slots_of(request.lengths) > batching.budget).sum()),
        dropped=int(rows.dropped.sum()),
        truncated_tokens=int((request.lengths - rows.lengths)[~rows.dropped].sum()),
        real_tokens=real_tokens,
        shared_tokens=shared_tokens,
        slots=all_slots,
        microbatches_per_rank=counts.shape[1],
        critical_slots=int(slots[costliest].sum()),
        critical_squares=float(squares[costliest].sum()),
        search_limit_hits=search_limit_hits,
        groups_split=rows.num_groups_split,
    )


def microbatch_slots(batching: Batching, counts: np.ndarray, padded_lengths: np.ndarray) -> np.ndarray:
    """Return the slots of each microbatch, padding included.

    The result is int64, of the shape of `counts`.
    """
    return padded_lengths if batching.mode == "packed" else padded_lengths * np.maximum(counts, 1)


def microbatch_costs(
    batching: Batching,
    lengths: np.ndarray,
    counts: np.ndarray,
    padded_lengths: np.ndarray,
    cost: Cost | None,
    shared: np.ndarray | None = None,
) -> np.ndarray:
    """Return the cost of each microbatch; a dummy one costs 0.

    The result is float64, of the shape of `counts`.

    Args:
        batching: the mode and the alignment.
        lengths: tokens of each row, in dispatch order, int64 [n].
        counts: rows of each microbatch, int64.
        padded_lengths: padded length of each microbatch, int64, of the same shape.
        cost: cost model of a row; None for its slots.
        shared: leading tokens of each row that another row of the microbatch holds, int64 [n]; None for none.
    """
    if batching.mode != "packed":
        return counts * (padded_lengths.astype(np.float64) if cost is None else cost.of(padded_lengths))
    slots = batching.slots_of(lengths)
    microbatch = np.repeat(np.arange(counts.size), counts.ravel())
    own = slots if shared is None else slots - shared
    weights = own if cost is None else cost.of_rest(slots, shared)
    return np.bincount(microbatch, weights=weights, minlength=counts.size).reshape(counts.shape)


def _ratio(part: float, whole: float) -> float:
    """Return part / whole; 1, the best value, if `whole` is 0."""
    return part / whole if whole else 1.0


def _overhead(loads: np.ndarray) -> float:
    """Return Σ maximum / Σ mean over ranks, minus 1.

    `loads` is [ranks, ...].
    """
    longest = float(loads.max(axis=0, initial=0).sum())
    return max(0.0, _ratio(longest * loads.shape[0], float(loads.sum())) - 1.0)


def _slots_per_step(slots: np.ndarray, step_bounds: np.ndarray) -> np.ndarray:
    """Return the slots per rank and optimizer step, int64 [ranks, steps]."""
    first = step_bounds[:-1]
    return np.add.reduceat(slots, first, axis=1) if first.size else slots[:, :0]


def _fewest_microbatches(rows: Rows, capacity: int) -> int:
    """Return a lower bound on the number of microbatches."""
    slots = np.minimum(rows.items.slots, capacity)
    return sum(fewest_bins(slots[items], capacity) for items in rows.items_of_steps())

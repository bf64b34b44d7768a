"""Tokens of each data rank, before and after the plan balances them.

The names and meanings are those of verl's `log_seqlen_unbalance`, so that runs of both frameworks can be compared.
"""

import numpy as np

from rlpack.packing.plan import MicrobatchPlan


def sequence_length_metrics(plan: MicrobatchPlan) -> dict[str, float]:
    """Return sums of tokens per data rank, over the whole batch.

    - `seqlen/min`, `max`, `mean`, `minmax_diff`: if rows were split over ranks in arrival order, as evenly as possible.
    - `seqlen/balanced_min`, `balanced_max`: in the plan.

    Only tokens that the plan keeps are counted. verl's own sums differ if the number of rows isn't divisible by the
    number of ranks: verl adds a chunk for the remainder.

    >>> from rlpack.packing import Batching, make_plan
    >>> metrics = sequence_length_metrics(make_plan([8, 8, 1, 1], Batching(max_tokens=16), dp_size=2))
    >>> [metrics[f"seqlen/{name}"] for name in ("min", "max", "balanced_min", "balanced_max")]
    [2.0, 16.0, 9.0, 9.0]
    """
    arrival = [float(part.sum()) for part in np.array_split(plan.lengths, plan.num_ranks)]
    rows_per_rank = np.cumsum(plan.counts.sum(axis=1))[:-1]
    balanced = [float(part.sum()) for part in np.split(plan.lengths[plan.order], rows_per_rank)]
    return {
        "seqlen/min": min(arrival),
        "seqlen/max": max(arrival),
        "seqlen/mean": sum(arrival) / plan.num_ranks,
        "seqlen/minmax_diff": max(arrival) - min(arrival),
        "seqlen/balanced_min": min(balanced),
        "seqlen/balanced_max": max(balanced),
    }

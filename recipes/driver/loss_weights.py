"""Loss weights: the driver fixes each token's weight over whole optimizer steps, before the first microbatch.

Losses and metrics are therefore plain sums, whatever ranks hold the rows. All tokens of a row that count have the
same weight, so weights are per-row columns, which ranks spread over the tokens of `response_mask`.
"""

import torch
from torch import Tensor

from rlpack.algorithms.aggregation import Aggregation, count_denominators, row_weights
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.store import Store
from rlpack.config.schema import Algorithm
from rlpack.packing import MicrobatchPlan


def planned_response_lengths(batch: BatchedDataDict, plan: MicrobatchPlan, store: Store) -> Tensor:
    """Return the response tokens of each row that the plan keeps, int64 [B].

    Args:
        batch: `response_lengths` int64 [B], and `response_mask`, of which only truncated rows are fetched.
        plan: a plan of these rows.
        store: where the mask is stored.
    """
    counts = batch["response_lengths"].clone()
    counts[torch.from_numpy(plan.dropped)] = 0
    if len(plan.truncated):
        masks = store.fetch(batch.keep(["response_mask"]).select(plan.truncated)).ragged("response_mask")
        truncated = masks.with_lengths(torch.from_numpy(plan.lengths[plan.truncated]))
        counts[torch.from_numpy(plan.truncated)] = truncated.count_nonzero()
    return counts


def step_weights(counts: Tensor, plan: MicrobatchPlan, settings: Algorithm) -> dict[str, Tensor]:
    """Return the columns `loss_weight` and `token_weight`, f32 [B].

    Over the counted tokens of an optimizer step, `token_weight` adds up to 1. Rows that the plan drops have weight 0.

    Args:
        counts: response tokens of each row that enter the loss, after the plan's truncation, int64 [B].
        plan: the plan of the update on these rows.
        settings: the `algorithm` section, which says how token losses are aggregated.
    """
    loss_weight, token_weight = torch.zeros(2, counts.numel())
    step_of_row = torch.from_numpy(plan.step_of_row)
    for step in range(plan.num_steps):
        rows = step_of_row == step
        denominators = count_denominators(counts[rows], constant=settings.aggregation_constant)
        kinds: list[tuple[Tensor, Aggregation]] = [(loss_weight, settings.aggregation), (token_weight, "token_mean")]
        for weight, kind in kinds:
            weight[rows] = row_weights(counts[rows], aggregation=kind, denominators=denominators)
    return {"loss_weight": loss_weight, "token_weight": token_weight}


def has_tokens(counts: Tensor, plan: MicrobatchPlan) -> list[bool]:
    """Return whether each optimizer step of a plan trains on a token; `counts` as for `step_weights`."""
    steps = set(plan.step_of_row[(counts > 0).numpy()].tolist())
    return [step in steps for step in range(plan.num_steps)]

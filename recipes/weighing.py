"""What each token counts for: weights that the driver fixes over whole optimizer steps, before the first microbatch.

So losses and metrics are plain sums wherever their rows land.
"""

import torch
from torch import Tensor

from rlpack.algorithms.aggregation import Aggregation, count_denominators, token_weights
from rlpack.config.schema import Algorithm
from rlpack.data.ragged import Ragged
from rlpack.packing import MicrobatchPlan


def counted_tokens(mask: Ragged, plan: MicrobatchPlan) -> Ragged:
    """Return the tokens of `mask`, bool [T], that the plan neither truncates nor drops."""
    position = torch.arange(mask.values.shape[0]) - mask.offsets[:-1][mask.segment_ids]
    lengths, steps = torch.from_numpy(plan.lengths), torch.from_numpy(plan.step_of_row)
    rows = mask.segment_ids
    return mask.with_values(mask.values & (position < lengths[rows]) & (steps[rows] >= 0))


def step_weights(mask: Ragged, plan: MicrobatchPlan, settings: Algorithm) -> dict[str, Ragged]:
    """Return `loss_weight` and `token_weight` f32 of every token; over an optimizer step the latter add up to 1.

    Tokens that the plan truncates or drops count nowhere.

    Args:
        mask: the response tokens that count, bool [T].
        plan: of the actor's update on these rows, [B].
        settings: how token losses become one number.
    """
    counted = counted_tokens(mask, plan)
    loss_weight, token_weight = (torch.zeros(mask.values.shape[0]) for _ in range(2))
    step_of_token = torch.from_numpy(plan.step_of_row)[mask.segment_ids]
    for step in range(plan.num_steps):
        part, where = counted.select(plan.step_of_row == step), step_of_token == step
        counts = count_denominators(part, constant=settings.sequence_sum_constant)
        kinds: list[tuple[Tensor, Aggregation]] = [(loss_weight, settings.aggregation), (token_weight, "token_mean")]
        for weight, kind in kinds:
            weight[where] = token_weights(part.values, part.lengths, aggregation=kind, denominators=counts)
    return {"loss_weight": mask.with_values(loss_weight), "token_weight": mask.with_values(token_weight)}

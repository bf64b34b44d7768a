"""GRPO's advantages, of which a response that repeats itself keeps only a part when they are above 0."""

import torch
from torch import Tensor

from rlpack.algorithms.advantages import group_relative


def original(rewards: Tensor, group_ids: Tensor, valid: Tensor, repeated: Tensor, *, power: float = 1.0) -> Tensor:
    """Return one advantage a row, f32 [B]: above 0 times `(1 - repeated)^power`, so luck is not learned by heart.

    Args:
        rewards: f32 [B].
        group_ids: rows with the same id are samples of one prompt, int64 [B].
        valid: rows that have a reward, bool [B].
        repeated: the share of a response that stood in it before, f32 [B]; a column of the role in examples/judge_role.
        power: how strongly a repetition counts.
    """
    advantages = group_relative(rewards, group_ids, valid=valid)
    return torch.where(advantages > 0, advantages * (1.0 - repeated) ** power, advantages)

"""GRPO's advantages, with positive ones reduced for responses that repeat themselves."""

import torch
from torch import Tensor

from rlpack.algorithms.advantages import group_relative


def original(rewards: Tensor, group_ids: Tensor, valid: Tensor, repeated: Tensor, *, power: float = 1.0) -> Tensor:
    """Return one advantage per row, f32 [B]; positive ones are multiplied by `(1 - repeated) ** power`.

    Args:
        rewards: f32 [B].
        group_ids: int64 [B]; rows with the same id are samples of one prompt.
        valid: whether a row has a reward, bool [B].
        repeated: fraction of repeated n-grams in a response, f32 [B]; a column of the role in examples/judge_role.
        power: how strongly repetition counts.
    """
    advantages = group_relative(rewards, group_ids, valid=valid)
    return torch.where(advantages > 0, advantages * (1.0 - repeated) ** power, advantages)

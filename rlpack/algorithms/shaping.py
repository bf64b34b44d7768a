"""Overlong penalty and informative groups (DAPO, Yu et al. 2025, arXiv:2503.14476)."""

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError


def soft_overlong_penalty(lengths: Tensor, *, longest: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Return the length penalty to add to each reward, 0 or negative, f32 [B].

    Soft overlong punishment (equation 13): 0 for short responses, then linear down to -penalty over the last `buffer`
    tokens before `longest`.

    >>> soft_overlong_penalty(torch.tensor([5, 8, 10]), longest=10, buffer=4, penalty=1.0)
    tensor([-0.0000, -0.5000, -1.0000])

    Args:
        lengths: tokens of each response, [B].
        longest: largest possible response length.
        buffer: tokens over which the penalty grows; 0 disables it.
        penalty: size of the penalty at `longest`.

    Raises:
        AlgorithmError: the buffer is negative or exceeds `longest`.
    """
    if not 0 <= buffer <= longest:
        raise AlgorithmError(
            f"the overlong buffer (dapo.overlong_buffer) is {buffer} of {longest} tokens; set it from 0 to {longest}"
        )
    if buffer == 0:
        return torch.zeros(lengths.shape)
    return -penalty * ((lengths - (longest - buffer)).float() / buffer).clamp(0.0, 1.0)


def informative_rows(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Return whether each row's group has valid rewards that differ, bool [B].

    Groups whose valid rewards are all equal have zero advantages and give no gradient.

    >>> valid = torch.ones(4, dtype=torch.bool)
    >>> informative_rows(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([4, 4, 7, 7]), valid)
    tensor([ True,  True, False, False])

    Args:
        rewards: one per row, [B].
        group_ids: group of each row, int64 [B].
        valid: rows to include, bool [B].
    """
    groups = group_ids.unique(return_inverse=True)[1]
    count = int(groups.max()) + 1 if groups.numel() else 0
    low, high = torch.full((count,), torch.inf), torch.full((count,), -torch.inf)
    low.scatter_reduce_(0, groups, rewards.float().where(valid, torch.inf), "amin")
    high.scatter_reduce_(0, groups, rewards.float().where(valid, -torch.inf), "amax")
    return (high > low)[groups]

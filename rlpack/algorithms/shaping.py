"""What is added to rewards, and which groups are worth training on."""

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError


def soft_overlong(lengths: Tensor, *, longest: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Return what a response's length adds to its reward, f32 [B]: 0, then falling in a line to -penalty.

    Soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13): the line runs over the last `buffer`
    tokens before `longest`.

    >>> soft_overlong(torch.tensor([5, 8, 10]), longest=10, buffer=4, penalty=1.0)
    tensor([-0.0000, -0.5000, -1.0000])

    Args:
        lengths: tokens of the responses, [B].
        longest: the most tokens that a response can have.
        buffer: tokens over which the punishment grows; 0 for none.
        penalty: at `longest`.

    Raises:
        AlgorithmError: the buffer is below 0 or over the longest response.
    """
    if not 0 <= buffer <= longest:
        raise AlgorithmError(f"the buffer is {buffer} tokens of {longest}; dapo.overlong_buffer is from 0 to these")
    if buffer == 0:
        return torch.zeros(lengths.shape)
    return -penalty * ((lengths - (longest - buffer)).float() / buffer).clamp(0.0, 1.0)


def informative(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Return whether each row's group has valid rewards that differ, bool [B]: others give no gradient.

    >>> informative(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([4, 4, 7, 7]), torch.ones(4, dtype=torch.bool))
    tensor([ True,  True, False, False])

    Args:
        rewards: [B].
        group_ids: int64 [B].
        valid: rows that count, bool [B].
    """
    groups = group_ids.unique(return_inverse=True)[1]
    count = int(groups.max()) + 1 if groups.numel() else 0
    low, high = torch.full((count,), torch.inf), torch.full((count,), -torch.inf)
    low.scatter_reduce_(0, groups, rewards.float().where(valid, torch.inf), "amin")
    high.scatter_reduce_(0, groups, rewards.float().where(valid, -torch.inf), "amax")
    return (high > low)[groups]

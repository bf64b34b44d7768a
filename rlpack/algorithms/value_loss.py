"""The critic's loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError


class ValueLossTerms(NamedTuple):
    """Losses of tokens, with gradient, [T], and which of them the bound holds, bool [T]."""

    token_losses: Tensor
    clipped: Tensor


def squared_error(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None) -> ValueLossTerms:
    """Return `½·max((V - R)², (clip(V, V_old ± ε) - R)²)` of each token, as PPO's authors' code has it.

    The bound (Schulman et al. 2017, arXiv:1707.06347; section 3.5 of Engstrom et al. 2020, arXiv:2005.12729) keeps
    values near those that advantages were computed with: beyond it, a value that goes on towards its return gets no
    gradient.

    >>> squared_error(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([3.0]), clip=0.5).token_losses
    tensor([3.1250])

    Args:
        values: of the critic, with gradient, [T].
        old_values: before its update, [T].
        returns: what values should be, [T].
        clip: ε; None for no bound.

    Raises:
        AlgorithmError: columns differ in their shapes, or the bound is not above 0.
    """
    if not values.shape == old_values.shape == returns.shape:
        shapes = f"{list(values.shape)}, {list(old_values.shape)} and {list(returns.shape)}"
        raise AlgorithmError(f"values, old_values and returns are {shapes}; all need one entry a token, [T]")
    losses = (values - returns).square()
    if clip is None:
        return ValueLossTerms(losses / 2, torch.zeros_like(losses, dtype=torch.bool))
    if not clip > 0:
        raise AlgorithmError(f"the bound on values is {clip}; critic.value_clip has to be above 0, or null for none")
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return ValueLossTerms(torch.maximum(losses, bounded) / 2, (bounded > losses).detach())

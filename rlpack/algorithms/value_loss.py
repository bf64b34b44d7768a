"""The critic's loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError


class ValueLossTerms(NamedTuple):
    """Token losses with gradient, [T], and which of them are clipped, bool [T]."""

    token_losses: Tensor
    clipped: Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None
) -> ValueLossTerms:
    """Return `½·max((V - R)², (clip(V, V_old ± ε) - R)²)` of each token.

    Value clipping as in the reference implementation of PPO (Schulman et al. 2017, arXiv:1707.06347; section 3.5 of
    Engstrom et al. 2020, arXiv:2005.12729): a value that has moved by more than ε towards its return gets no gradient.

    >>> clipped_value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([3.0]), clip=0.5).token_losses
    tensor([3.1250])

    Args:
        values: current values of the critic, with gradient, [T].
        old_values: values before the critic's update, [T].
        returns: targets of the values, [T].
        clip: ε; None disables clipping.

    Raises:
        AlgorithmError: shapes differ, or ε is not above 0.
    """
    if not values.shape == old_values.shape == returns.shape:
        shapes = f"{list(values.shape)}, {list(old_values.shape)} and {list(returns.shape)}"
        raise AlgorithmError(f"values, old_values and returns are {shapes}; all need one entry per token, [T]")
    losses = (values - returns).square()
    if clip is None:
        return ValueLossTerms(losses / 2, torch.zeros_like(losses, dtype=torch.bool))
    if not clip > 0:
        raise AlgorithmError(f"the value clip range is {clip}; set critic.value_clip above 0, or to null for none")
    change = values - old_values
    bounded = (old_values + change.clamp(-clip, clip) - returns).square()
    # Within the range, old + (value - old) may differ from the value by rounding.
    return ValueLossTerms(torch.maximum(losses, bounded) / 2, ((bounded > losses) & (change.abs() > clip)).detach())

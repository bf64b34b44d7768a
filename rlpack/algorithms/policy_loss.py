"""The clipped policy loss of PPO and its relatives, one number a token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """What `clipped_policy_loss` found, flat over T tokens; everything is 0 or False outside the mask.

    Attributes:
        token_losses: to be summed under the weights of `aggregation.row_weights`, [T].
        ratio: new over old probability, without gradient, [T]; above 0 inside the mask, so a maximum may ignore it.
        clipped_low: tokens whose gradient the lower bound removed (negative advantage), bool [T].
        clipped_high: tokens whose gradient the upper bound removed (positive advantage), bool [T].
    """

    token_losses: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return `-min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A)` a token, with r = π / π_old.

    PPO (Schulman et al. 2017, arXiv:1707.06347) with two separate bounds (clip-higher, DAPO, arXiv:2503.14476). With
    `dual_clip` = c the loss of a negative advantage is at most `-c·A` (Ye et al. 2020, arXiv:1912.09729), since r has
    no bound there. The log-ratio is clamped to ±20, where e^r would soon overflow; no gradient passes beyond it.

    Outside the mask losses and gradients are exactly 0, whatever the columns hold there, NaN included.

    >>> loss = clipped_policy_loss(
    ...     torch.tensor([0.5, 0.5, 0.5]).log(), torch.tensor([0.25, 0.25, 0.5]).log(), torch.tensor([1.0, -1.0, 1.0]),
    ...     torch.tensor([True, True, False]), clip_low=0.2, clip_high=0.3)
    >>> loss.token_losses
    tensor([-1.3000,  2.0000,  0.0000])
    >>> loss.clipped_high
    tensor([ True, False, False])

    Args:
        logprobs: under the policy that is trained, with gradient, [T].
        old_logprobs: under the policy before this step's first update, [T].
        advantages: [T], one number a token.
        mask: sampled tokens, bool [T].
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
        dual_clip: bound on the ratio for negative advantages, above 1; None for none.

    Raises:
        AlgorithmError: columns have different shapes, or a bound is outside its range.
    """
    _check_bounds(clip_low, clip_high, dual_clip)
    shapes = {tuple(column.shape) for column in (logprobs, old_logprobs, advantages, mask)}
    if len(shapes) > 1 or mask.dtype != torch.bool:
        raise AlgorithmError(f"columns have shapes {sorted(shapes)} and a mask of {mask.dtype}; need four [T] and bool")
    # `where` before any arithmetic: 0 · NaN would still be NaN, in the value and in the gradient.
    log_ratio = torch.where(mask, logprobs, 0.0) - torch.where(mask, old_logprobs, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    detached = torch.where(mask, ratio.detach(), 0.0)
    return PolicyLoss(
        token_losses=torch.where(mask, losses, 0.0),
        ratio=detached,
        clipped_low=(detached < 1 - clip_low) & (advantages < 0),
        clipped_high=(detached > 1 + clip_high) & (advantages > 0),
    )


def _check_bounds(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    """Refuse bounds that would make no trust region."""
    if not 0 <= clip_low < 1:
        raise AlgorithmError(f"clip_low is {clip_low}; algorithm.clip_low is from 0 to below 1")
    if not clip_high >= 0:
        raise AlgorithmError(f"clip_high is {clip_high}; algorithm.clip_high is 0 or more")
    if dual_clip is not None and not dual_clip > 1:
        raise AlgorithmError(f"dual_clip is {dual_clip}; algorithm.dual_clip is above 1, or null")

"""Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv:2503.14286), by token."""

import torch

from rlpack.algorithms.policy_loss import PolicyLoss, PolicyTokens


def tapered(tokens: PolicyTokens, *, taper: float = 1.0) -> PolicyLoss:
    """Return `-A·log π` a token where A is above 0, `-min(r, taper)·A·log π` elsewhere, no gradient through r.

    What was good is imitated at full weight however unlikely it has become; what was bad is pushed down only as long as
    the policy still says it, so nothing is driven to minus infinity.

    Args:
        tokens: of a microbatch, [T].
        taper: upper bound of a bad token's weight.
    """
    good, ratio = tokens.advantages > 0, tokens.ratio.detach()
    weights = torch.where(good, 1.0, ratio.clamp(max=taper))
    losses = -weights * tokens.advantages * tokens.logprobs
    return PolicyLoss.of(tokens, losses, ratio, torch.zeros_like(good), ~good & (ratio > taper))

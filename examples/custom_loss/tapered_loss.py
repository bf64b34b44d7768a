"""Tapered off-policy REINFORCE per token (Le Roux et al. 2025, arXiv:2503.14286)."""

import torch

from rlpack.algorithms.policy_loss import PolicyLoss, PolicyTokens


def tapered(tokens: PolicyTokens, *, taper: float = 1.0) -> PolicyLoss:
    """Return `-A·log π` for tokens with A > 0, else `-min(r, taper)·A·log π`; no gradient flows through r.

    Tokens with a positive advantage have full weight, however unlikely they have become. Tokens with a negative one
    lose weight as they become unlikely, so their log-probs don't diverge to minus infinity.

    Args:
        tokens: the tokens of a microbatch, [T].
        taper: upper bound of the weight of tokens with a negative advantage.
    """
    good, ratio = tokens.advantages > 0, tokens.ratio.detach()
    weights = torch.where(good, 1.0, ratio.clamp(max=taper))
    losses = -weights * tokens.advantages * tokens.logprobs
    return PolicyLoss.of(tokens, losses, ratio, torch.zeros_like(good), ~good & (ratio > taper))

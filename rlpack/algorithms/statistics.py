"""Losses that look at the whole optimizer step: they declare what they need, and get it from a pass before the update.

A figure of a microbatch would differ with batching. So a loss marked by `needs_statistics` is called with `statistics`,
computed once from all tokens of the optimizer step, over all microbatches and ranks, with the weights that the step
begins with.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import torch

from rlpack.algorithms.policy_loss import PolicyLoss, PolicyTokens

L = TypeVar("L", bound=Callable[..., PolicyLoss])
# From the tokens of a whole step (on the CPU, without gradients) and the loss's own arguments to its figures.
Compute = Callable[..., dict[str, float]]

_MARK = "__rlpack_statistics__"


def needs_statistics(compute: Compute) -> Callable[[L], L]:
    """Mark a loss as one that is to be given `statistics=compute(tokens of the step, **arguments)`."""

    def mark(loss: L) -> L:
        setattr(loss, _MARK, compute)
        return loss

    return mark


def statistics_of(loss: Callable[..., Any]) -> Compute | None:
    """Return what computes the figures that `loss` needs; None if it needs none."""
    return vars(loss).get(_MARK)


def join(parts: list[PolicyTokens]) -> PolicyTokens:
    """Return the tokens of all parts as one, on the CPU, without gradients.

    >>> column = torch.zeros(2)
    >>> part = PolicyTokens(column, column, column, torch.ones(2, dtype=torch.bool), torch.tensor([2]))
    >>> join([part, part]).lengths
    tensor([2, 2])
    """
    columns = [[vars(part)[field.name].detach().cpu() for part in parts] for field in fields(PolicyTokens)]
    return PolicyTokens(*(torch.cat(column) for column in columns))


def _covariances(tokens: PolicyTokens, *, share: float = 2e-4, **_: Any) -> dict[str, float]:
    """Return the means that a token's covariance is taken around, and the covariance that a `share` of tokens pass.

    It lies between the last of these and the next token's, so that rounding in the update's own pass changes nothing.
    """
    logprobs, advantages = tokens.logprobs[tokens.mask].double(), tokens.advantages[tokens.mask].double()
    if not logprobs.numel():
        return {"logprob_mean": 0.0, "advantage_mean": 0.0, "threshold": float("inf")}
    means = logprobs.mean(), advantages.mean()
    products = (logprobs - means[0]) * (advantages - means[1])
    count = max(1, int(share * products.numel()))
    threshold = products.topk(min(count + 1, products.numel())).values[-2:].mean().item()
    return {"logprob_mean": means[0].item(), "advantage_mean": means[1].item(), "threshold": threshold}


@needs_statistics(_covariances)
def kl_cov(tokens: PolicyTokens, *, statistics: dict[str, float], share: float = 2e-4, coef: float = 1.0) -> PolicyLoss:
    """Return `-r·A`, with `coef`·|log r| added for the tokens that would lower the entropy most.

    KL-Cov (Cui et al. 2025, arXiv:2505.22617): they are the `share` of all tokens of the optimizer step whose
    log-probability and advantage lie furthest above, or both below, their means: by (log π - mean)·(A - mean).

    Args:
        tokens: of the microbatch.
        statistics: the means, and the threshold that the share reaches.
        share: part of the tokens that is held back.
        coef: weight of the divergence from the old policy.
    """
    centred = tokens.logprobs.detach() - statistics["logprob_mean"], tokens.advantages - statistics["advantage_mean"]
    held = (centred[0].double() * centred[1].double() >= statistics["threshold"]) & tokens.mask
    distance = (tokens.logprobs - tokens.old_logprobs).abs()
    losses = -tokens.ratio * tokens.advantages + torch.where(held, coef * distance, 0.0)
    return PolicyLoss.of(tokens, losses, tokens.ratio, torch.zeros_like(held), held)

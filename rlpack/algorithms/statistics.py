"""Losses that depend on statistics of the whole optimizer step.

Statistics of a microbatch would depend on batching. A loss marked with `needs_statistics` is instead called with
`statistics`, which a pass before the update computes once from all tokens of the optimizer step, over all microbatches
and ranks, with the weights at the beginning of the step.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import torch

from rlpack.algorithms.policy_loss import PolicyLoss, PolicyTokens

L = TypeVar("L", bound=Callable[..., PolicyLoss])
# Maps the tokens of a whole step (on the CPU, without gradients) and the loss's own arguments to its statistics.
StatisticsFunction = Callable[..., dict[str, float]]

_MARK = "__rlpack_statistics__"


def needs_statistics(compute: StatisticsFunction) -> Callable[[L], L]:
    """Mark a loss to be called with `statistics=compute(tokens of the step, **arguments)`."""

    def mark(loss: L) -> L:
        setattr(loss, _MARK, compute)
        return loss

    return mark


def statistics_of(loss: Callable[..., Any]) -> StatisticsFunction | None:
    """Return the function that computes the statistics of `loss`; None if it needs none."""
    return vars(loss).get(_MARK)


def concat_tokens(parts: list[PolicyTokens]) -> PolicyTokens:
    """Return the tokens of all parts, concatenated, on the CPU, without gradients.

    >>> column = torch.zeros(2)
    >>> part = PolicyTokens(column, column, column, torch.ones(2, dtype=torch.bool), torch.tensor([2]))
    >>> concat_tokens([part, part]).lengths
    tensor([2, 2])
    """
    columns = [[vars(part)[field.name].detach().cpu() for part in parts] for field in fields(PolicyTokens)]
    return PolicyTokens(*(torch.cat(column) for column in columns))


def _covariances(tokens: PolicyTokens, *, share: float = 2e-4, **_: Any) -> dict[str, float]:
    """Return the means of log-probs and advantages, and the covariance threshold.

    At most `share` of the tokens, at least one, reach the threshold. Tokens that tie with the first excluded one are
    excluded, so with equal advantages none is penalized. The threshold is halfway between two covariances, so that
    rounding in the update's pass changes nothing.
    """
    logprobs, advantages = tokens.logprobs[tokens.mask].double(), tokens.advantages[tokens.mask].double()
    if not logprobs.numel():
        return {"logprob_mean": 0.0, "advantage_mean": 0.0, "threshold": float("inf")}
    means = logprobs.mean(), advantages.mean()
    products = (logprobs - means[0]) * (advantages - means[1])
    return {
        "logprob_mean": means[0].item(),
        "advantage_mean": means[1].item(),
        "threshold": _threshold_above(products, max(1, int(share * products.numel()))),
    }


def _threshold_above(products: torch.Tensor, count: int) -> float:
    """Return a threshold that the largest `count` products exceed, but none that equals a smaller one.

    >>> _threshold_above(torch.tensor([1.0, 4.0, 2.0]), 1)
    3.0
    >>> _threshold_above(torch.tensor([1.0, 4.0, 2.0, 2.0]), 2)
    3.0
    """
    if count >= products.numel():
        return -float("inf")
    largest_excluded = products.topk(count + 1).values[-1]
    above = products[products > largest_excluded]
    return (above.min() + largest_excluded).item() / 2 if above.numel() else float("inf")


@needs_statistics(_covariances)
def kl_cov(tokens: PolicyTokens, *, statistics: dict[str, float], share: float = 2e-4, coef: float = 1.0) -> PolicyLoss:
    """Return `-r·A`, with `coef`·|log r| added for the tokens that would lower the entropy most.

    KL-Cov (Cui et al. 2025, arXiv:2505.22617): these are the `share` of the optimizer step's tokens with the largest
    covariance (log π - mean)·(A - mean) of log-probability and advantage.

    Args:
        tokens: tokens of the microbatch.
        statistics: the two means, and the threshold of the covariance.
        share: largest fraction of the tokens that are penalized; of tokens that tie, all or none are.
        coef: weight of the divergence from the old policy.
    """
    logprobs, advantages = tokens.logprobs.detach().double(), tokens.advantages.double()  # as in the statistics
    products = (logprobs - statistics["logprob_mean"]) * (advantages - statistics["advantage_mean"])
    penalized = (products >= statistics["threshold"]) & tokens.mask
    distance = (tokens.logprobs - tokens.old_logprobs).abs()
    losses = -tokens.ratio * tokens.advantages + torch.where(penalized, coef * distance, 0.0)
    return PolicyLoss.of(tokens, losses, tokens.ratio, torch.zeros_like(penalized), penalized)

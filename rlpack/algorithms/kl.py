"""Estimators of the KL divergence from sampled tokens."""

import math
from typing import Literal

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError

KLEstimator = Literal["k1", "k2", "k3", "abs"]

MAX_EXPONENT = 20.0


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    estimator: KLEstimator,
    *,
    bound: float | None = None,
    straight_through: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Return an estimate of KL(π ‖ π_ref) at each token sampled from π, [T].

    With d = log π - log π_ref (Schulman 2020, http://joschu.net/blog/kl-approx.html): `k1` = d, unbiased, often
    negative; `k2` = d²/2, whose gradient is that of the divergence; `k3` = e^(-d) - 1 + d, unbiased and never
    negative; `abs` = |d|, never negative and biased. Only k3 grows exponentially, at tokens that are much rarer under
    π: its exponent is clamped at 20 and its value at `bound`, and there is no gradient beyond either
    unless `straight_through` is true. Tokens that are much likelier under π reach the bound, too.

    >>> kl_estimate(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]), "k3")
    tensor([0.0000, 0.3679])

    Args:
        logprobs: under the policy, with gradient, [T].
        reference_logprobs: under the reference, [T].
        estimator: k1, k2, k3 or abs.
        bound: largest value of k3 at a token, nats; with None, only the exponent is clamped.
        straight_through: whether to combine the estimator's value with the gradient of `k2`, which for tokens sampled
            from π is that of the divergence (Tang and Munos 2025, arXiv:2506.09477). The gradient of k1 has mean zero,
            that of k3 is biased.
        mask: response tokens, bool [T]; others get 0 and no gradient, even if a column is NaN there.

    Raises:
        AlgorithmError: the estimator is unknown, or shapes differ.
    """
    if logprobs.shape != reference_logprobs.shape:
        shapes = f"{list(logprobs.shape)} and {list(reference_logprobs.shape)}"
        raise AlgorithmError(f"logprobs and reference_logprobs are {shapes}; both need one entry per token, [T]")
    if mask is not None:
        logprobs, reference_logprobs = torch.where(mask, logprobs, 0.0), torch.where(mask, reference_logprobs, 0.0)
    difference = logprobs - reference_logprobs
    if straight_through and estimator != "k2":
        carrier = difference.square() / 2
        value = kl_estimate(logprobs.detach(), reference_logprobs, estimator, bound=bound)
        return value + (carrier - carrier.detach())  # the value stays bit-identical
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        bounded = difference.clamp(min=-MAX_EXPONENT)
        # expm1: near d = 0, the usual case in training, e^(-d) - 1 would lose all digits.
        return (torch.expm1(-bounded) + bounded).clamp(max=bound if bound is not None else math.inf)
    if estimator == "abs":
        return difference.abs()
    raise AlgorithmError(f"the KL estimator is {estimator!r}; set algorithm.kl_estimator to k1, k2, k3 or abs")


def at_bound(kl: Tensor, estimator: KLEstimator, bound: float | None) -> Tensor | None:
    """Return which estimates are at `bound`, bool [T]; None if the estimator has no bound.

    >>> at_bound(torch.tensor([0.5, 10.0]), "k3", 10.0)
    tensor([False,  True])
    """
    return kl.detach() >= bound if estimator == "k3" and bound is not None else None


def next_kl_coef(kl_coef: float, measured: float, *, target: float, horizon: float, rows: int) -> float:
    """Return the KL coefficient of the next step, adapted towards a target divergence.

    `β ← β·(1 + e·rows / horizon)`, where e is the relative error of the measured divergence, clamped to ±0.2 (Ziegler
    et al. 2019, arXiv:1909.08593, section 2.2).

    >>> round(next_kl_coef(0.1, 12.0, target=6.0, horizon=1000.0, rows=100), 6)
    0.102

    Args:
        kl_coef: coefficient β of the last step.
        measured: mean over responses of the summed divergence, nats; if not finite, the coefficient stays.
        target: target of `measured`, nats.
        horizon: rows over which the coefficient can change by a fifth.
        rows: responses of the last step.
    """
    if not math.isfinite(measured):
        return kl_coef
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * min(1.0, rows / horizon))

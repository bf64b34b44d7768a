"""Estimators of the KL divergence from sampled tokens."""

import math
from typing import Literal

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError

KLEstimator = Literal["k1", "k2", "k3"]

MAX_EXPONENT = 20.0


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    estimator: KLEstimator,
    *,
    straight_through: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Return an estimate of KL(π ‖ π_ref) for each token sampled from π, [T].

    With d = log π - log π_ref (Schulman 2020, http://joschu.net/blog/kl-approx.html): `k1` = d, unbiased, often
    negative; `k2` = d²/2, whose gradient is that of the divergence; `k3` = e^(-d) - 1 + d, unbiased and never
    negative. The exponent is held at 20: a token that π has all but given up adds a bounded value and no gradient.

    >>> kl_estimate(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]), "k3")
    tensor([0.0000, 0.3679])

    Args:
        logprobs: under the policy, with gradient, [T].
        reference_logprobs: under the reference, [T].
        estimator: k1, k2 or k3.
        straight_through: whether the value is the estimator's and the gradient that of `k2`. On tokens sampled from π
            it is the divergence's own (Tang and Munos 2025, arXiv:2506.09477); k1's is zero in the mean, and k3's
            is biased.
        mask: tokens that count, bool [T]; others give 0 and no gradient even where a column holds NaN.

    Raises:
        AlgorithmError: the estimator is unknown, or shapes differ.
    """
    if logprobs.shape != reference_logprobs.shape:
        shapes = f"{list(logprobs.shape)} and {list(reference_logprobs.shape)}"
        raise AlgorithmError(f"logprobs and reference_logprobs are {shapes}; both need one entry a token, [T]")
    if mask is not None:
        logprobs, reference_logprobs = torch.where(mask, logprobs, 0.0), torch.where(mask, reference_logprobs, 0.0)
    difference = logprobs - reference_logprobs
    if straight_through and estimator != "k2":
        carrier = difference.square() / 2
        value = kl_estimate(logprobs.detach(), reference_logprobs, estimator)
        return value + carrier - carrier.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        held = difference.clamp(min=-MAX_EXPONENT)
        # expm1: near d = 0, where training lives, e^(-d) - 1 would lose all digits.
        return torch.expm1(-held) + held
    raise AlgorithmError(f"the KL estimator is {estimator!r}; algorithm.kl_estimator is k1, k2 or k3")


def next_coefficient(coefficient: float, measured: float, *, target: float, horizon: float, rows: int) -> float:
    """Return the KL coefficient of the next step, so that the divergence comes near its target.

    `β ← β·(1 + e·rows / horizon)`, where e is the part by which the measured divergence of a response is over the
    target, held within ±0.2 (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    >>> round(next_coefficient(0.1, 12.0, target=6.0, horizon=1000.0, rows=100), 6)
    0.102

    Args:
        coefficient: of the step that was taken.
        measured: mean over responses of the summed divergence, nats; one that is not finite changes nothing.
        target: what it should be, nats.
        horizon: rows over which the coefficient can change by a fifth.
        rows: responses of the step.
    """
    if not math.isfinite(measured):
        return coefficient
    error = min(max(measured / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * min(1.0, rows / horizon))

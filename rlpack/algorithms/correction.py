"""Off-policy correction: importance weights, rejection, and metrics of the mismatch between two policies.

Responses are sampled from μ, the policy version that the generation engine held at the time, and used to train π_old,
the trainer's policy before the update. The two differ by rounding, and also by updates if batches are generated ahead
of training. With d = log π_old − log μ at a sampled token, the weight exp(d) corrects the loss of that token (Yao et
al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; decoupled PPO, Hilton et al. 2021,
arXiv:2110.00641). Definitions follow verl's `rollout_correction`. d, or its sum, is clamped to ±20 before it is
exponentiated. Nothing here has a gradient.

Letters: T tokens, B rows. Columns may hold any values outside the mask.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from rlpack.algorithms.aggregation import row_sums
from rlpack.algorithms.policy_loss import MAX_LOG_RATIO
from rlpack.batch.ragged import Ragged

Level = Literal["token", "sequence"]


def importance_weights(
    logprobs: Tensor, sampled: Tensor, mask: Ragged, *, level: Level, upper: float, lower: float | None = None
) -> Tensor:
    """Return the weight of each token, f32 [T], 0 outside the mask.

    `token` weights each token by its own ratio; `sequence` weights all tokens of a row by the product of the row's
    ratios. Without `lower`, a weight above `upper` becomes `upper` (truncated importance sampling). With it, weights
    outside [lower, upper] become 0 (IcePop, Ling Team 2025, arXiv:2510.18855).

    >>> mask = Ragged.from_rows([[True, True]], torch.bool)
    >>> old, sampled = torch.tensor([0.5, 0.9]).log(), torch.tensor([0.25, 0.1]).log()
    >>> importance_weights(old, sampled, mask, level="token", upper=4.0)
    tensor([2., 4.])
    >>> importance_weights(old, sampled, mask, level="token", upper=4.0, lower=0.5)
    tensor([2., 0.])

    Args:
        logprobs: log π_old, [T].
        sampled: log μ, [T].
        mask: response tokens, bool, B rows.
        level: `token` or `sequence`, see above.
        upper: largest weight.
        lower: smallest weight that is kept; None truncates instead.
    """
    difference = _differences(logprobs, sampled, mask)
    if level == "sequence":
        difference = row_sums(difference, mask)[mask.segment_ids]
    weights = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if lower is None:
        weights = weights.clamp(max=upper)
    else:
        weights = torch.where((weights >= lower) & (weights <= upper), weights, 0.0)
    return torch.where(mask.values, weights, 0.0).float()


def mean_weight(weights: Tensor, tokens: Tensor, level: Level) -> float:
    """Return the mean importance weight, by which weights are divided to normalize them; 0 without tokens.

    It is the mean over tokens, or over rows if `level` is `sequence`.

    >>> mean_weight(torch.tensor([4.0, 6.0]), torch.tensor([1, 4]), "token")
    2.0
    >>> mean_weight(torch.tensor([4.0, 6.0]), torch.tensor([1, 4]), "sequence")
    2.75

    Args:
        weights: the sum of each row's weights, [B].
        tokens: the tokens of each row, integers [B]; rows with 0 don't count.
        level: `token` or `sequence`.
    """
    rows = tokens > 0
    if not rows.any():
        return 0.0
    weights, tokens = weights[rows], tokens[rows]
    return (weights.sum() / tokens.sum() if level == "token" else (weights / tokens).mean()).item()


def kept_tokens(logprobs: Tensor, sampled: Tensor, mask: Ragged, criteria: Mapping[str, tuple[float, float]]) -> Tensor:
    """Return which response tokens meet all criteria, bool [T].

    With d clamped to ±20: k1 = −d, k2 = d²/2, k3 = exp(d) − 1 − d. `token_*` applies to each token. `seq_sum_*`,
    `seq_mean_*` and `seq_max_*` apply to whole rows, through the sum, mean or maximum over their tokens; `seq_max_k1`
    drops a row if k1 of any token is out of bounds. k1 has to lie between the logarithms of the two bounds; all other
    values must not exceed the upper bound.

    `binary_kl` (KPop in verl) applies to each token. It compares the Bernoulli distributions with the token's
    probabilities under π_old and μ, clamped to [1e-6, 1 - 1e-6], and takes the larger of the KL divergences in the two
    directions.

    >>> mask = Ragged.from_rows([[True, True], [True]], torch.bool)
    >>> old, sampled = torch.tensor([0.5, 0.5, 0.5]).log(), torch.tensor([0.5, 0.1, 0.5]).log()
    >>> kept_tokens(old, sampled, mask, {"token_k2": (0.0, 0.5)}).tolist()
    [True, False, True]
    >>> kept_tokens(old, sampled, mask, {"seq_max_k2": (0.0, 0.5)}).tolist()
    [False, False, True]

    Args:
        logprobs: log π_old, [T].
        sampled: log μ, [T].
        mask: response tokens, bool, B rows.
        criteria: maps each criterion, such as `seq_mean_k1`, to its lower and upper bound; only k1 uses the lower
            bound. Bounds on k1 are ratios μ / π_old, all others are in nats.
    """
    difference = _differences(logprobs, sampled, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values = {"k1": -difference, "k2": difference.square() / 2, "k3": difference.exp() - 1 - difference}
    counts = row_sums(torch.ones_like(difference), mask).clamp(min=1)
    kept = mask.values.clone()
    for criterion, (lower, upper) in criteria.items():
        level, _, estimator = ("token", "", criterion) if criterion == "binary_kl" else criterion.rpartition("_")
        value = _binary_kl(logprobs, sampled, mask) if criterion == "binary_kl" else values[estimator]
        if level in ("seq_sum", "seq_mean"):
            value = row_sums(value, mask) / (1.0 if level == "seq_sum" else counts)
        outside = value > (math.log(upper) if estimator == "k1" else upper)
        if estimator == "k1":
            outside |= value < math.log(lower)
        if level == "seq_max":
            outside = row_sums(outside, mask) > 0
        kept &= ~(outside if level == "token" else outside[mask.segment_ids])
    return kept


def mismatch_sums(logprobs: Tensor, sampled: Tensor, mask: Ragged) -> dict[str, Tensor]:
    """Return the sums over each row's response tokens that `mismatch_totals` reduces, f64 [B] each.

    `mismatch_difference` is Σ d, `_gap` Σ |d|, `_largest` max |d|, `_k3` Σ (exp(d) − 1 − d), `_ratio` Σ exp(d), and
    `_square` Σ exp(d)²; d is clamped to ±20 in the last three.
    """
    difference = _differences(logprobs, sampled, mask)
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    largest = difference.new_zeros(mask.num_rows)
    largest = largest.scatter_reduce(0, mask.segment_ids, difference.abs(), "amax")
    return {
        "mismatch_difference": row_sums(difference, mask),
        "mismatch_gap": row_sums(difference.abs(), mask),
        "mismatch_largest": largest,
        "mismatch_k3": row_sums(bounded.exp() - 1 - bounded, mask),
        "mismatch_ratio": row_sums(bounded.exp(), mask),
        "mismatch_square": row_sums((2 * bounded).exp(), mask),
    }


def correction_sums(
    logprobs: Tensor, sampled: Tensor, mask: Ragged, weights: Tensor | None, free: Tensor | None, kept: Tensor | None
) -> dict[str, Tensor]:
    """Return `mismatch_sums` and each row's sums of weights and rejections, f64 [B] each, for `mismatch_totals`.

    `mismatch_weight` is Σ w and `_weight_square` Σ w², `_bounded` and `_rejected` count tokens whose weight was bounded
    and tokens that were rejected; `_tokens` counts all.

    Args:
        logprobs: log π_old, [T].
        sampled: log μ, [T].
        mask: tokens to include, bool, B rows.
        weights: importance weights, [T]; None for none.
        free: the same weights before they were bounded.
        kept: tokens that were not rejected, bool [T]; None without rejection.
    """
    sums = mismatch_sums(logprobs, sampled, mask)
    sums["mismatch_tokens"] = row_sums(torch.ones_like(logprobs, dtype=torch.float64), mask)
    if weights is not None and free is not None:
        sums["mismatch_weight"] = row_sums(weights.double(), mask)
        sums["mismatch_weight_square"] = row_sums(weights.double().square(), mask)
        sums["mismatch_bounded"] = row_sums((weights != free).double(), mask)
    if kept is not None:
        sums["mismatch_rejected"] = row_sums((~kept).double(), mask)
    return sums


def mismatch_totals(sums: Mapping[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """Reduce sums per row to 0-dimensional totals: their sums, and the maximum of `mismatch_largest`.

    Totals over disjoint sets of rows can be added; those whose names end in `_max` are merged by the maximum.
    `mismatch_rows` counts the rows with tokens, and `mismatch_perplexity` is the sum over them of exp(−mean d).

    Args:
        sums: the result of `mismatch_sums` or `correction_sums`, f64 [B] each.
        tokens: response tokens of each row, integers [B].
    """
    rows = tokens > 0
    means = (sums["mismatch_difference"] / tokens.clamp(min=1))[rows]
    totals = {name: column.sum() for name, column in sums.items() if name != "mismatch_largest"}
    totals["mismatch_tokens"] = tokens.sum()
    totals["mismatch_rows"] = rows.sum()
    largest = sums["mismatch_largest"]
    totals["mismatch_largest_max"] = largest.max() if largest.numel() else largest.new_zeros(())
    totals["mismatch_perplexity"] = (-means).clamp(max=MAX_LOG_RATIO).exp().sum()
    if "mismatch_rejected" in sums:
        totals["mismatch_rejected_rows"] = (sums["mismatch_rejected"] >= tokens)[rows].sum()
    return totals


def mismatch_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Return metrics of the mismatch between π_old and μ by name, from totals over rows; {} without tokens.

    - `mismatch/kl` = −mean d, the k1 estimate of KL(μ ‖ π_old), and `k3` its non-negative estimate;
    - `mismatch/chi2` = mean exp(2 d) − 1, the χ² divergence of tokens;
    - `mismatch/gap` = mean |d|, and `largest_gap` its maximum;
    - `mismatch/perplexity_ratio` = the mean over rows of exp(−mean d), the perplexity under π_old over that under μ;
    - `mismatch/effective_share`, Kish's effective sample size (Σ w)² / Σ w² as a share of the tokens. w is the
      importance weight, or exp(d) without weights;
    - with weights: `mismatch/weight_mean`, and `weights_bounded`, the share of tokens whose weight was bounded;
    - with rejection: `mismatch/rejected_tokens`, and `rejected_rows`, rows in which every token was rejected.

    Args:
        totals: the result of `mismatch_totals`, as floats.
    """
    total = totals["mismatch_tokens"]
    if not total:
        return {}
    metrics = {
        "mismatch/kl": -(totals["mismatch_difference"] / total),
        "mismatch/k3": totals["mismatch_k3"] / total,
        "mismatch/chi2": totals["mismatch_square"] / total - 1.0,
        "mismatch/gap": totals["mismatch_gap"] / total,
        "mismatch/largest_gap": totals["mismatch_largest_max"],
        "mismatch/perplexity_ratio": totals["mismatch_perplexity"] / totals["mismatch_rows"],
    }
    weight, square = totals["mismatch_ratio"], totals["mismatch_square"]
    if "mismatch_weight" in totals:
        weight, square = totals["mismatch_weight"], totals["mismatch_weight_square"]
        metrics["mismatch/weight_mean"] = weight / total
        metrics["mismatch/weights_bounded"] = totals["mismatch_bounded"] / total
    metrics["mismatch/effective_share"] = weight**2 / (square * total) if square > 0 else 0.0
    if "mismatch_rejected" in totals:
        metrics["mismatch/rejected_tokens"] = totals["mismatch_rejected"]
        metrics["mismatch/rejected_rows"] = totals["mismatch_rejected_rows"]
    return metrics


def lag_masks(mask: Ragged, versions: Tensor, newest: int, lags: Iterable[int]) -> dict[int, Ragged]:
    """Return the response tokens of each lag, as masks of the same rows.

    >>> mask = Ragged.from_rows([[False, True, True]], torch.bool)
    >>> [part.values.tolist() for part in lag_masks(mask, torch.tensor([-1, 3, 4]), 4, [0, 1]).values()]
    [[False, False, True], [False, True, False]]

    Args:
        mask: response tokens, bool, B rows.
        versions: the policy version that sampled each token, integers [T].
        newest: the newest policy version, whose weights compute log π_old.
        lags: how many versions the tokens of each mask are behind the newest.
    """
    return {lag: mask.with_values(mask.values & (newest - versions == lag)) for lag in lags}


def _binary_kl(logprobs: Tensor, sampled: Tensor, mask: Ragged) -> Tensor:
    """Return the larger of the two KL divergences of `binary_kl`, f64 [T]; 0 outside the mask."""
    columns = (torch.where(mask.values, column, 0.0).double() for column in (logprobs, sampled))
    own, other = (column.exp().clamp(1e-6, 1 - 1e-6) for column in columns)

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()

    return torch.maximum(divergence(own, other), divergence(other, own))


def _differences(logprobs: Tensor, sampled: Tensor, mask: Ragged) -> Tensor:
    """Return d, f64 [T]; 0 outside the mask."""
    # `where` first: outside the mask, a column may be infinite or NaN.
    own, other = (torch.where(mask.values, column, 0.0).double() for column in (logprobs, sampled))
    return own - other

"""Off-policy correction against the published definitions, written out row by row in double precision."""

import math

import numpy as np
import pytest
import torch

from rlpack.algorithms.correction import (
    importance_weights,
    kept_tokens,
    mismatch_metrics,
    mismatch_sums,
    mismatch_totals,
)
from rlpack.batch.ragged import Ragged
from rlpack.config.sections.correction_settings import CRITERIA, bounds_of

ROWS = [7, 1, 0, 12, 3]


class Case:
    """Random rows with prompts, an empty response, and NaN outside of responses."""

    def __init__(self, seed: int, spread: float) -> None:
        rng = np.random.default_rng(seed)
        masks, own, sampled = [], [], []
        for tokens in ROWS:
            prompt = int(rng.integers(1, 4))
            masks.append([False] * prompt + [True] * tokens)
            other = -rng.exponential(1.0, tokens)
            sampled.append([math.nan] * prompt + other.tolist())
            own.append([math.inf] * prompt + (other + rng.normal(0, spread, tokens)).tolist())
        self.mask = Ragged.from_rows(masks, torch.bool)
        self.own, self.sampled = (Ragged.from_rows(rows, torch.float64).values for rows in (own, sampled))
        inside = [np.array(mask) for mask in masks]
        self.differences = [
            (np.array(a)[m] - np.array(b)[m]).astype(float) for a, b, m in zip(own, sampled, inside, strict=True)
        ]

    def of_tokens(self, column: torch.Tensor) -> list[np.ndarray]:
        """Return a column's response tokens, row by row."""
        rows = self.mask.with_values(column).rows()
        return [row[mask].numpy() for row, mask in zip(rows, self.mask.rows(), strict=True)]


CASES = [Case(seed, spread) for seed, spread in enumerate((0.02, 0.5, 3.0, 50.0))]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("band", [(None, 2.0), (0.5, 2.0), (0.9, 1.1), (None, 1e9)])
def test_weights_are_truncated_ratios_or_those_in_the_band(case, level, band):
    lower, upper = band
    found = importance_weights(case.own, case.sampled, case.mask, level=level, upper=upper, lower=lower)
    assert not found[~case.mask.values].any()
    for row, differences in zip(case.of_tokens(found), case.differences, strict=True):
        exponents = differences if level == "token" else np.full(differences.size, differences.sum())
        expected = np.exp(np.clip(exponents, -20, 20))
        if lower is None:
            expected = np.minimum(expected, upper)
        else:
            expected = np.where((expected >= lower) & (expected <= upper), expected, 0)
        np.testing.assert_allclose(row, expected, rtol=1e-6)


def expected_kept(differences: np.ndarray, criterion: str, lower: float, upper: float) -> np.ndarray:
    """Return the tokens of a row that a criterion keeps, by verl's definition."""
    bounded = np.clip(differences, -20, 20)
    values = {"k1": -bounded, "k2": 0.5 * bounded**2, "k3": np.exp(bounded) - 1 - bounded}[criterion[-2:]]
    low, high = (math.log(lower), math.log(upper)) if criterion.endswith("k1") else (-math.inf, upper)
    if not differences.size:
        return np.zeros(0, dtype=bool)
    if criterion.startswith("token"):
        return (values >= low) & (values <= high)
    if criterion.startswith("seq_max"):
        return np.full(values.size, values.max() <= high and values.min() >= low)
    statistic = values.sum() if criterion.startswith("seq_sum") else values.mean()
    return np.full(values.size, low <= statistic <= high)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("criterion", sorted(set(CRITERIA) - {"binary_kl"}))
@pytest.mark.parametrize("value", [0.05, 0.5, 2.0, [0.8, 1.25]])
def test_every_criterion_keeps_what_its_definition_says(case, criterion, value):
    if not criterion.endswith("k1") and isinstance(value, list):
        pytest.skip("k2 and k3 have one bound")
    if criterion.endswith("k1") and value in (0.05, 0.5):
        value = [value, 1.5]
    bounds = bounds_of(criterion, value)
    kept = kept_tokens(case.own, case.sampled, case.mask, {criterion: bounds})
    assert not kept[~case.mask.values].any()
    for row, differences in zip(case.of_tokens(kept), case.differences, strict=True):
        np.testing.assert_array_equal(row, expected_kept(differences, criterion, *bounds))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bound", [1e-4, 0.05, 1.0])
def test_the_criterion_of_two_bernoulli_distributions_judges_tokens(case, bound):
    kept = kept_tokens(case.own, case.sampled, case.mask, {"binary_kl": bounds_of("binary_kl", bound)})
    found = case.of_tokens(kept)
    for row, own, sampled in zip(found, case.of_tokens(case.own), case.of_tokens(case.sampled), strict=True):
        p, q = (np.clip(np.exp(logprobs), 1e-6, 1 - 1e-6) for logprobs in (own, sampled))
        forward = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
        backward = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
        np.testing.assert_array_equal(row, np.maximum(forward, backward) <= bound)


def test_a_token_has_to_pass_all_criteria():
    case = CASES[1]
    both = {"token_k1": (0.8, 1.25), "seq_mean_k2": (0.0, 0.11)}
    kept = kept_tokens(case.own, case.sampled, case.mask, both)
    single = [kept_tokens(case.own, case.sampled, case.mask, {name: bounds}) for name, bounds in both.items()]
    assert torch.equal(kept, single[0] & single[1])
    assert 0 < kept.sum() < min(one.sum() for one in single)


def metrics_of(own: torch.Tensor, sampled: torch.Tensor, mask: Ragged, tokens: torch.Tensor) -> dict[str, float]:
    totals = mismatch_totals(mismatch_sums(own, sampled, mask), tokens)
    return mismatch_metrics({name: total.item() for name, total in totals.items()})


@pytest.mark.parametrize("case", CASES[:3])
def test_divergences_of_a_batch_are_those_of_its_tokens(case):
    tokens = torch.tensor(ROWS)
    found = metrics_of(case.own, case.sampled, case.mask, tokens)
    every = np.concatenate(case.differences)
    bounded = np.clip(every, -20, 20)
    expected = {
        "kl": -every.mean(),
        "k3": (np.exp(bounded) - 1 - bounded).mean(),
        "chi2": np.exp(2 * bounded).mean() - 1,
        "gap": np.abs(every).mean(),
        "largest_gap": np.abs(every).max(),
        "perplexity_ratio": np.mean([np.exp(-row.mean()) for row in case.differences if row.size]),
        "effective_share": np.exp(bounded).sum() ** 2 / (np.exp(2 * bounded).sum() * bounded.size),
    }
    assert found == pytest.approx({f"mismatch/{name}": value for name, value in expected.items()}, rel=1e-6)


def test_divergences_of_the_same_policy_are_zero():
    case = CASES[0]
    found = metrics_of(case.own, case.own, case.mask, torch.tensor(ROWS))
    assert found == dict.fromkeys(found, 0.0) | {"mismatch/perplexity_ratio": 1.0, "mismatch/effective_share": 1.0}


def test_no_tokens_have_no_divergence():
    empty = Ragged(torch.zeros(0, dtype=torch.bool), torch.zeros(2, dtype=torch.int64))
    values = torch.zeros(0)
    assert metrics_of(values, values, empty, torch.zeros(2, dtype=torch.int64)) == {}
    assert importance_weights(values, values, empty, level="sequence", upper=2.0).shape == (0,)


@pytest.mark.parametrize("value", [0.0, -1.0, [], [0.5, 1.0, 2.0], [2.0, 0.5], math.nan])
def test_bounds_that_make_no_range_are_refused(value):
    with pytest.raises(ValueError, match=r"it takes one or two positive numbers|its lower bound 2 exceeds"):
        bounds_of("token_k1", value)


def test_a_range_is_for_k1_alone():
    with pytest.raises(ValueError, match="it takes one number, the largest divergence"):
        bounds_of("seq_sum_k2", [0.5, 2.0])

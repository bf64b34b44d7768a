import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.kl import at_bound, kl_estimate, next_kl_coef


def test_estimators_equal_their_formulas():
    new = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    reference = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)
    for estimator, expected in {
        "k1": [0.5, -1.0, 0.0],
        "k2": [0.125, 0.5, 0.0],
        "k3": [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0, 0.0],
        "abs": [0.5, 1.0, 0.0],
    }.items():
        assert kl_estimate(new, reference, estimator).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_an_unbiased_estimator_over_the_policy_is_the_divergence(estimator):
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    # Exact expectation over all six tokens, not a sample.
    mean = (policy.exp() * kl_estimate(policy, reference, estimator)).sum()
    torch.testing.assert_close(mean, torch.nn.functional.kl_div(reference, policy, reduction="sum", log_target=True))


def test_the_mean_gradient_of_k2_is_that_of_the_divergence():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    divergence = torch.nn.functional.kl_div(reference, policy, reduction="sum", log_target=True)
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    # The sampling probabilities carry no gradient, as in training.
    (result,) = torch.autograd.grad((policy.exp().detach() * kl_estimate(policy, reference, "k2")).sum(), logits)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_gradients_equal_finite_differences(estimator):
    new = torch.tensor([-1.0, -4.0, -0.3], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.4, -1.0, -0.4], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, estimator), (new,))


def test_k3_keeps_its_digits_near_zero_and_is_never_negative():
    difference = torch.tensor([1e-3, -1e-3])
    result = kl_estimate(difference, torch.zeros(2), "k3")
    torch.testing.assert_close(result, difference**2 / 2, rtol=1e-3, atol=0)
    spread = torch.linspace(-30, 30, 301)
    assert (kl_estimate(spread, torch.zeros(301), "k3") >= 0).all()


def test_a_token_that_the_policy_gave_up_adds_a_bounded_value_without_gradient():
    new = torch.tensor([-300.0], requires_grad=True)
    result = kl_estimate(new, torch.zeros(1), "k3")
    result.sum().backward()
    assert result.item() == pytest.approx(math.exp(20) - 21)
    assert new.grad is not None
    assert new.grad.item() == 0


@given(differences=st.lists(st.floats(-80, 80), min_size=1, max_size=9), bound=st.sampled_from([0.5, 10.0, None]))
@settings(max_examples=100, deadline=None)
def test_k3_is_its_formula_up_to_the_bound_and_has_no_gradient_beyond(differences: list[float], bound: float | None):
    new = torch.tensor(differences, dtype=torch.float64, requires_grad=True)
    result = kl_estimate(new, torch.zeros_like(new), "k3", bound=bound)
    result.sum().backward()
    assert new.grad is not None
    reached = at_bound(result, "k3", bound)
    for place, d in enumerate(differences):
        value, slope = math.expm1(-d) + d, -math.expm1(-d)
        if d < -20:
            value, slope = math.expm1(20) - 20, 0.0
        if bound is not None and value > bound:
            value, slope = bound, 0.0
        assert result[place].item() == pytest.approx(value, rel=1e-9, abs=1e-12)
        assert new.grad[place].item() == pytest.approx(slope, rel=1e-9, abs=1e-12)
        assert reached is None or bool(reached[place]) == (value == bound)


def test_one_token_that_the_policy_gave_up_does_not_swamp_a_batch_in_single_precision():
    new = torch.full((1000,), -1.0)
    new[7] = -60.0
    reference = torch.full((1000,), -1.1)
    ordinary = math.exp(-0.1) - 0.9
    mean = kl_estimate(new, reference, "k3", bound=10.0).mean().item()
    assert mean == pytest.approx((999 * ordinary + 10) / 1000, rel=1e-4)
    assert kl_estimate(new, reference, "k3").mean().item() > 1e5


def test_the_value_of_a_straight_through_estimate_is_bounded_and_its_gradient_is_that_of_k2():
    new = torch.tensor([-9.0, -1.0], requires_grad=True)
    result = kl_estimate(new, torch.tensor([-2.0, -1.5]), "k3", bound=10.0, straight_through=True)
    result.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-7.0, 0.5]
    reached = at_bound(result, "k3", 10.0)
    assert reached is not None
    assert reached.tolist() == [True, False]
    assert at_bound(result, "k1", 10.0) is None


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_masked_tokens_are_zero_without_gradient_even_where_they_hold_nan(estimator):
    new = torch.tensor([-1.0, math.nan], requires_grad=True)
    result = kl_estimate(new, torch.tensor([-2.0, math.nan]), estimator, mask=torch.tensor([True, False]))
    result.sum().backward()
    assert result[1] == 0
    assert new.grad is not None
    assert new.grad[1] == 0


def test_an_unknown_estimator_and_unlike_columns_are_refused():
    with pytest.raises(AlgorithmError, match=r"algorithm\.kl_estimator"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(AlgorithmError, match="one entry per token"):
        kl_estimate(torch.zeros(2), torch.zeros(1), "k1")


@pytest.mark.parametrize(
    ("measured", "expected"),
    [(6.0, 0.1), (6.6, 0.1 * 1.01), (100.0, 0.1 * 1.02), (0.0, 0.1 * 0.98), (float("nan"), 0.1)],
)
def test_the_coefficient_goes_towards_the_target_by_a_fifth_a_horizon_at_most(measured: float, expected: float) -> None:
    result = next_kl_coef(0.1, measured, target=6.0, horizon=1000.0, rows=100)
    assert result == pytest.approx(expected)

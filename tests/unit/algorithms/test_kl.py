import math

import pytest
import torch

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.kl import kl_estimate, next_kl_coef


def test_estimators_equal_their_formulas():
    new = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    reference = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)
    for estimator, expected in {
        "k1": [0.5, -1.0, 0.0],
        "k2": [0.125, 0.5, 0.0],
        "k3": [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0, 0.0],
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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_equal_finite_differences(estimator):
    new = torch.tensor([-1.0, -4.0, -0.3], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.4, -1.0, -0.3], dtype=torch.float64)
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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
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

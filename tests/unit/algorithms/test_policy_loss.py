import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.algorithms import policy_loss
from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.policy_loss import PolicyLoss, PolicyTokens, check_policy_loss
from tests.unit.algorithms import reference

logprob = st.floats(-6, 0, width=32)
tokens = st.lists(st.tuples(logprob, logprob, st.floats(-3, 3, width=32)), min_size=1, max_size=12)
bounds = {"clip_low": 0.2, "clip_high": 0.28}


def clipped_policy_loss(new, old, advantages, mask, **settings):
    """The clipped loss of tokens of one row."""
    lengths = torch.tensor([mask.shape[0]])
    return policy_loss.ppo_clip(PolicyTokens(new, old, advantages, mask, lengths), **settings)


def columns(tokens, dtype=torch.float64):
    return [torch.tensor(column, dtype=dtype) for column in zip(*tokens, strict=True)]


@given(tokens=tokens, dual_clip=st.sampled_from([None, 1.5, 3.0]))
@settings(max_examples=100, deadline=None)
def test_losses_equal_the_formula_token_by_token(tokens, dual_clip):
    new, old, advantages = columns(tokens)
    mask = torch.ones(len(tokens), dtype=torch.bool)
    result = clipped_policy_loss(new, old, advantages, mask, dual_clip=dual_clip, **bounds)
    expected = [reference.token_loss(*token, 0.2, 0.28, dual_clip) for token in tokens]
    torch.testing.assert_close(result.token_losses, torch.tensor(expected, dtype=torch.float64))


def test_gradients_equal_finite_differences_away_from_the_kinks():
    # ratios 0.5, 0.9, 1.1, 1.6, 4 under both signs; the dual clip binds at 4 with a negative advantage
    ratios = torch.tensor([0.5, 0.9, 1.1, 1.6, 4.0], dtype=torch.float64).repeat(2)
    advantages = torch.tensor([1.5, -0.7], dtype=torch.float64).repeat_interleave(5)
    old = torch.full_like(ratios, -2.0)
    mask = torch.ones_like(ratios, dtype=torch.bool)

    def total(new):
        return clipped_policy_loss(new, old, advantages, mask, dual_clip=3.0, **bounds).token_losses

    new = (old + ratios.log()).requires_grad_()
    assert torch.autograd.gradcheck(total, (new,))
    # In closed form: -A·r where no bound binds, else 0.
    total(new).sum().backward()
    free = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
    torch.testing.assert_close(new.grad, -advantages * ratios * free)


def test_at_the_first_update_the_gradient_is_that_of_reinforce():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -2.0])
    for clip in (0.0, 0.2):
        loss = clipped_policy_loss(
            new, new.detach(), advantages, torch.tensor([True, True]), clip_low=clip, clip_high=clip
        )
        (gradient,) = torch.autograd.grad(loss.token_losses.sum(), new)
        torch.testing.assert_close(gradient, -advantages)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_masked_tokens_have_zero_loss_and_gradient_whatever_they_hold(broken):
    new = torch.tensor([-1.0, broken], requires_grad=True)
    old, advantages = torch.tensor([-1.5, broken]), torch.tensor([1.0, broken])
    loss = clipped_policy_loss(new, old, advantages, torch.tensor([True, False]), dual_clip=2.0, **bounds)
    loss.token_losses.sum().backward()
    assert loss.token_losses[1] == 0
    assert new.grad is not None
    assert new.grad[1] == 0
    assert new.grad.isfinite().all()
    assert loss.ratio[1] == 0
    assert not loss.clipped_low[1]
    assert not loss.clipped_high[1]


def test_a_token_counts_as_clipped_only_where_its_gradient_is_lost():
    ratios = torch.tensor([0.5, 0.5, 2.0, 2.0, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    loss = clipped_policy_loss(
        ratios.log(), torch.zeros(5), advantages, torch.ones(5, dtype=torch.bool), dual_clip=None, **bounds
    )
    assert loss.clipped_low.tolist() == [False, True, False, False, False]
    assert loss.clipped_high.tolist() == [False, False, True, False, False]
    torch.testing.assert_close(loss.ratio, ratios)
    assert not loss.ratio.requires_grad


def test_a_token_that_the_dual_clip_bounds_counts_as_clipped():
    new = torch.tensor([2.9, 3.1]).log().requires_grad_()
    mask = torch.ones(2, dtype=torch.bool)
    loss = clipped_policy_loss(new, torch.zeros(2), -torch.ones(2), mask, dual_clip=3.0, **bounds)
    loss.token_losses.sum().backward()
    assert new.grad is not None
    assert (new.grad == 0).tolist() == loss.clipped_high.tolist() == [False, True]
    assert not loss.clipped_low.any()


def test_a_log_ratio_far_out_stays_finite():
    new = torch.tensor([500.0, -500.0], requires_grad=True)
    loss = clipped_policy_loss(new, torch.zeros(2), -torch.ones(2), torch.ones(2, dtype=torch.bool), **bounds)
    loss.token_losses.sum().backward()
    assert loss.ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert new.grad is not None
    assert new.grad.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
    ],
)
def test_bounds_that_make_no_trust_region_are_refused(change, text):
    column = torch.zeros(1)
    with pytest.raises(AlgorithmError, match=f"algorithm.{text}"):
        clipped_policy_loss(column, column, column, torch.ones(1, dtype=torch.bool), **(bounds | change))


def test_columns_of_different_lengths_are_refused_and_never_broadcast():
    with pytest.raises(AlgorithmError, match=r"\(1,\), \(2,\)"):
        clipped_policy_loss(torch.zeros(2), torch.zeros(1), torch.zeros(2), torch.ones(2, dtype=torch.bool), **bounds)


def two_rows(new, old, advantages):
    """The tokens of two rows, of three and two tokens; the last token of the first row is masked."""
    mask = torch.tensor([True, True, False, True, True])
    return PolicyTokens(new, old, advantages, mask, torch.tensor([3, 2]))


@pytest.mark.parametrize(
    ("losses", "shape"),
    [
        (torch.ones(()), r"\[\]"),
        (torch.ones(2), r"\[2\]"),
        (torch.ones(4), r"\[4\]"),
        (torch.ones(5, 1), r"\[5, 1\]"),
    ],
    ids=["mean", "per row", "masked tokens", "column"],
)
def test_losses_of_another_shape_than_the_tokens_are_refused_and_never_broadcast(losses, shape):
    batch = two_rows(torch.zeros(5), torch.zeros(5), torch.zeros(5))
    none = torch.zeros_like(batch.mask)
    with pytest.raises(AlgorithmError, match=rf"a tensor of shape {shape} as losses for 5 tokens; .* of shape \[5\]"):
        PolicyLoss.of(batch, losses, batch.ratio, none, none)


def test_a_constant_ratio_or_flag_holds_for_every_sampled_token():
    batch = two_rows(torch.zeros(5), torch.zeros(5), torch.zeros(5))
    loss = PolicyLoss.of(batch, torch.ones(5), torch.tensor(1.0), torch.tensor(False), torch.tensor(True))
    assert check_policy_loss(loss, batch.mask) is loss
    assert loss.ratio.tolist() == [1, 1, 0, 1, 1]
    assert loss.clipped_low.tolist() == [False] * 5
    assert loss.clipped_high.tolist() == [True, True, False, True, True]


def test_gspo_clips_by_the_geometric_mean_ratio_of_the_row():
    ratios = [[1.0, 4.0], [0.5, 0.5]]
    new = torch.tensor([1.0, 4.0, 7.0, 0.5, 0.5], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    loss = policy_loss.gspo(two_rows(new, torch.zeros_like(new), advantages), clip_low=0.25, clip_high=1.5)
    means = [math.prod(row) ** (1 / len(row)) for row in ratios]  # 2 and 0.5
    assert loss.token_losses.tolist() == pytest.approx([-means[0], -means[0], 0.0, 0.75, 0.75])
    assert loss.clipped_low.tolist() == [False, False, False, True, True]
    loss.token_losses.sum().backward()
    # Per sequence: the gradient of -n·s·A by each log-probability is -s·A.
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-2.0, -2.0, 0.0, 0.0, 0.0])


extreme = st.one_of(st.floats(-6, 0), st.floats(-45, 0))


@given(rows=st.lists(st.tuples(extreme, extreme), min_size=1, max_size=9), advantage=st.floats(-3, 3))
@settings(max_examples=100, deadline=None)
def test_gmpo_is_the_geometric_mean_of_the_clipped_terms_of_a_row(rows, advantage):
    new, old = columns(rows)
    new.requires_grad_()
    mask, lengths = torch.ones(len(rows), dtype=torch.bool), torch.tensor([len(rows)])
    advantages = torch.full_like(old, advantage)
    loss = policy_loss.gmpo(PolicyTokens(new, old, advantages, mask, lengths), clip_low=0.3, clip_high=0.5)
    objective = reference.gmpo(new.tolist(), old.tolist(), advantage, 0.3, 0.5)
    beyond = abs(objective) > abs(advantage) * math.exp(20)  # the mean log-ratio is clamped at 20
    if beyond or abs(objective) < abs(advantage) * math.exp(-20):
        objective = math.copysign(abs(advantage) * math.exp(20 if beyond else -20), advantage)
    assert loss.token_losses.tolist() == pytest.approx([-objective] * len(rows), rel=1e-6)
    # The gradient of the row's mean by a log-probability: -objective / n where the token's ratio is not clipped.
    loss.token_losses.mean().backward()
    assert new.grad is not None
    for place, (one, other) in enumerate(rows):
        clipped = (one - other > 0.5 and advantage > 0) or (one - other < -0.3 and advantage < 0)
        assert bool(loss.clipped_low[place] | loss.clipped_high[place]) == clipped
        if clipped:
            assert new.grad[place].item() == 0
        elif not beyond and abs(objective) > abs(advantage) * math.exp(-19):
            assert new.grad[place].item() == pytest.approx(-objective / len(rows), rel=1e-6)


def test_gmpo_keeps_rows_apart_and_ignores_masked_tokens():
    new = torch.tensor([1.0, 4.0, 1e9, 0.5, 0.5], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    loss = policy_loss.gmpo(two_rows(new, torch.zeros_like(new), advantages), clip_low=math.log(1.25), clip_high=9.0)
    assert loss.token_losses.tolist() == pytest.approx([-2.0, -2.0, 0.0, 0.8, 0.8])
    assert loss.clipped_low.tolist() == [False, False, False, True, True]


def test_cispo_clips_the_weight_of_the_gradient_and_loses_no_token():
    new = torch.tensor([-1.0, -1.0, -1.0, -2.0, -2.0], requires_grad=True)
    old = new.detach() - torch.tensor([0.1, 3.0, 0.0, -3.0, 0.0])
    loss = policy_loss.cispo(two_rows(new, old, torch.ones(5)), clip_low=0.5, clip_high=0.5)
    weights = [math.exp(0.1), 1.5, 0.0, 0.5, 1.0]
    assert loss.token_losses.tolist() == pytest.approx([w * n for w, n in zip(weights, [1, 1, 1, 2, 2], strict=True)])
    loss.token_losses.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-weight for weight in weights])


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_sapo_has_the_gradient_of_the_unclipped_objective_at_ratio_one_and_fades_away_from_it(advantage):
    def gradient(log_ratio):
        new = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
        one, zero = torch.tensor([True]), torch.zeros(1, dtype=torch.float64)
        tokens = PolicyTokens(new, zero, torch.full((1,), advantage, dtype=torch.float64), one, torch.tensor([1]))
        (result,) = torch.autograd.grad(policy_loss.sapo(tokens, tau_positive=2.0, tau_negative=5.0).token_losses, new)
        return result.item()

    assert gradient(0.0) == pytest.approx(-advantage)
    # σ'(x) = σ(x)·(1 - σ(x)), with x = τ·(r - 1) and r = 2.
    tau = 2.0 if advantage > 0 else 5.0
    gate = 1 / (1 + math.exp(-tau))
    assert gradient(math.log(2)) == pytest.approx(-advantage * 4 * gate * (1 - gate) * 2)


def test_reinforce_has_the_gradient_of_the_log_likelihood():
    new = torch.tensor([-1.0, -2.0, -3.0, -0.5, -0.1], requires_grad=True)
    advantages = torch.tensor([0.5, -1.0, 9.0, 2.0, 0.0])
    loss = policy_loss.reinforce(two_rows(new, torch.full((5,), -7.0), advantages))
    loss.token_losses.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-0.5, 1.0, 0.0, -2.0, 0.0]


@pytest.mark.parametrize("loss", [policy_loss.dppo_tv, policy_loss.dppo_kl])
@given(tokens=tokens)
@settings(max_examples=60, deadline=None)
def test_dppo_masks_tokens_that_left_the_trust_region_in_the_direction_of_the_advantage(loss, tokens):
    new, old, advantages = columns(tokens)
    new.requires_grad_()
    mask, lengths = torch.ones(len(tokens), dtype=torch.bool), torch.tensor([len(tokens)])
    result = loss(PolicyTokens(new, old, advantages, mask, lengths), clip_low=0.1, clip_high=0.2, max_ratio=3.0)
    result.token_losses.sum().backward()
    assert new.grad is not None
    for place, (own, other, advantage) in enumerate(tokens):
        p, q = math.exp(own), math.exp(other)
        moved = abs(p - q)
        if loss is policy_loss.dppo_kl:
            rest = [1 - q + 1e-8, 1 - p + 1e-8]
            moved = q * math.log(q / p) + (1 - q) * math.log(rest[0] / rest[1])
        outside = (advantage > 0 and p > q and moved > 0.2) or (advantage <= 0 and p < q and moved > 0.1)
        expected = 0.0 if outside else -min(p / q, 3.0) * advantage
        assert new.grad[place].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert bool(result.clipped_low[place] | result.clipped_high[place]) == outside


@pytest.mark.parametrize("arguments", [{"clip_low": 1.5}, {"clip_high": -0.1}, {"max_ratio": 0.0}])
def test_dppo_refuses_bounds_that_make_no_region(arguments):
    zeros = torch.zeros(5)
    with pytest.raises(AlgorithmError, match=next(iter(arguments))):
        policy_loss.dppo_tv(two_rows(zeros, zeros, zeros), **arguments)

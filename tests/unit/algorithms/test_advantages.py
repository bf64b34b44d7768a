import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.algorithms.advantages import group_relative, opo, reinforce_pp, remax, zero_group_fraction
from rlpack.algorithms.errors import AlgorithmError
from tests.unit.algorithms import reference

rows = st.lists(st.tuples(st.floats(-5, 5, width=16), st.integers(-2, 3)), min_size=1, max_size=24)
# Rewards are multiples of 1/4, so that means of groups are exact and equal values are equal.
scored_rows = st.lists(
    st.tuples(st.integers(-8, 8).map(lambda n: n / 4), st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=16
)
choices = [(baseline, scale) for baseline in ("mean", "leave_one_out") for scale in ("std", "none")]


@pytest.mark.parametrize(("baseline", "scale"), choices)
@given(rows=rows)
@settings(max_examples=60, deadline=None)
def test_advantages_equal_a_loop_over_rows(rows, baseline, scale):
    rewards, groups = map(list, zip(*rows, strict=True))
    result = group_relative(torch.tensor(rewards), torch.tensor(groups), baseline=baseline, scale=scale, epsilon=1e-3)
    expected = reference.advantages(rewards, groups, baseline, scale, 1e-3)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_two_samples_of_opposite_reward_are_half_a_root_of_two_apart():
    # mean 0.5, unbiased deviation √0.5: ±0.5 / √0.5 = ±√0.5
    result = group_relative(torch.tensor([1.0, 0.0]), torch.tensor([4, 4]), epsilon=0.0)
    torch.testing.assert_close(result, torch.tensor([0.5**0.5, -(0.5**0.5)]))


@pytest.mark.parametrize(("baseline", "scale"), choices)
def test_a_group_of_one_and_a_group_of_equal_rewards_are_exactly_zero(baseline, scale):
    # Three times 0.1 has a mean that is not 0.1 in binary.
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 5.0]), torch.tensor([1, 1, 1, 2])
    result = group_relative(rewards, groups, baseline=baseline, scale=scale, epsilon=0.0)
    assert result.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("baseline", "scale"), choices)
def test_rows_that_are_not_valid_are_zero_and_change_nothing_for_the_others(baseline, scale):
    groups, valid = torch.tensor([1, 1, 1, 2, 2]), torch.tensor([True, True, False, True, False])
    rewards = torch.tensor([1.0, 3.0, float("nan"), 2.0, float("inf")])
    result = group_relative(rewards, groups, baseline=baseline, scale=scale, valid=valid)
    alone = group_relative(rewards[:2], groups[:2], baseline=baseline, scale=scale)
    assert result[:2].tolist() == alone.tolist()
    assert result[2:].tolist() == [0, 0, 0]


@given(rows=rows, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_order_of_rows_does_not_matter(rows, seed):
    rewards, groups = (torch.tensor(column) for column in zip(*rows, strict=True))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    expected = group_relative(rewards, groups)[order]
    torch.testing.assert_close(group_relative(rewards[order], groups[order]), expected)


def test_no_rows_give_no_advantages():
    result = group_relative(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert result.shape == (0,)
    assert zero_group_fraction(result, torch.zeros(0, dtype=torch.int64)) == 0


def test_all_rows_invalid_give_zeros():
    nan = torch.full((2,), float("nan"))
    assert group_relative(nan, torch.tensor([1, 1]), valid=torch.tensor([False, False])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("rewards", "groups", "options", "text"),
    [
        ([1.0, float("nan")], [1, 1], {}, "row 1 is nan"),
        ([float("inf"), 1.0], [1, 1], {}, "row 0 is inf"),
        ([1.0, 2.0], [1], {}, "one entry per row"),
        ([1.0], [1], {"baseline": "median"}, "algorithm.baseline"),
        ([1.0], [1], {"scale": "range"}, "algorithm.scale"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(rewards, groups, options, text):
    with pytest.raises(AlgorithmError, match=text):
        group_relative(torch.tensor(rewards), torch.tensor(groups), **options)


@given(rows=scored_rows)
@settings(max_examples=60, deadline=None)
def test_opo_equals_a_loop_over_the_tokens_of_each_group(rows):
    rewards, groups, lengths = map(list, zip(*rows, strict=True))
    result = opo(torch.tensor(rewards), torch.tensor(groups), torch.tensor(lengths))
    torch.testing.assert_close(result, torch.tensor(reference.opo(rewards, groups, lengths)))


@given(rows=scored_rows, center_groups=st.booleans())
@settings(max_examples=80, deadline=None)
def test_reinforce_pp_equals_a_loop_over_all_tokens(rows, center_groups):
    rewards, groups, lengths = map(list, zip(*rows, strict=True))
    result = reinforce_pp(
        torch.tensor(rewards),
        torch.tensor(groups),
        torch.tensor(lengths),
        center_groups=center_groups,
        epsilon=1e-2,
    )
    expected = reference.reinforce_pp(rewards, groups, lengths, center_groups, 1e-2)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_remax_compares_each_response_with_its_prompt_s_greedy_one():
    rewards, greedy = torch.tensor([1.0, 0.25, float("nan")]), torch.tensor([0.5, 1.0, 0.0])
    assert remax(rewards, greedy, valid=torch.tensor([True, True, False])).tolist() == [0.5, -0.75, 0.0]
    with pytest.raises(AlgorithmError, match="row 2 is nan"):
        remax(rewards, greedy)


def test_rows_that_are_not_valid_change_nothing_in_estimators_by_length():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, float("nan")]), torch.tensor([1, 1, 1, 1])
    lengths, valid = torch.tensor([4, 2, 6, 90]), torch.tensor([True, True, True, False])
    for estimator in (opo, reinforce_pp):
        result = estimator(rewards, groups, lengths, valid=valid)
        assert result.tolist() == [*estimator(rewards[:3], groups[:3], lengths[:3]).tolist(), 0.0]


def test_a_group_counts_as_zero_only_if_all_of_its_rows_are():
    advantages = torch.tensor([0.0, -1.0, 0.0, 0.0, 0.0])
    assert zero_group_fraction(advantages, torch.tensor([1, 1, 2, 2, 3])) == pytest.approx(2 / 3)

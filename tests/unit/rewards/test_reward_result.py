import math

import numpy as np
import pytest
import torch

from rlpack.rewards.reward_result import parse_reward, parse_rewards


@pytest.mark.parametrize("reward", [0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5)])
def test_numbers_of_any_kind_are_rewards(reward):
    assert parse_reward(reward).value == 0.5


@pytest.mark.parametrize("reward", [True, np.True_, 1, np.int64(1)])
def test_a_comparison_is_a_reward_of_one_or_zero(reward):
    assert parse_reward(reward).value == 1.0


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (None, "none"),
        (math.nan, "nan"),
        (np.float32("nan"), "nan"),
        (math.inf, "infinite"),
        (-math.inf, "infinite"),
        (1e308, "infinite"),
        (10**400, "infinite"),
    ],
)
def test_values_that_are_not_finite_have_their_own_problems(reward, problem):
    assert (parse_reward(reward).problem, parse_reward(reward).failed) == (problem, False)


@pytest.mark.parametrize("reward", ["1", [1.0], {"score": 1.0}, 1j, torch.tensor(1.0), np.ones(1), object()])
def test_a_value_that_is_not_a_number_is_a_failure(reward):
    assert (parse_reward(reward).problem, parse_reward(reward).failed) == ("invalid", True)
    assert type(reward).__name__ in parse_reward(reward).detail


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        (None, "returned a NoneType"),
        ("11", "returned a str"),
        ({0: 1.0, 1: 1.0}, "returned a dict"),
        (torch.ones(2), "returned a Tensor"),
        (1.0, "returned a float"),
        ([1.0], "returned 1 rewards for 2 rows"),
        ([1.0] * 3, "returned 3 rewards for 2 rows"),
    ],
)
def test_a_result_without_one_reward_per_row_fails_on_every_row(rewards, text):
    found = parse_rewards(rewards, 2)
    assert [result.problem for result in found] == ["invalid"] * 2
    assert text in found[0].detail


@pytest.mark.parametrize("rewards", [[1.0, "1"], (1.0, [1.0]), [1.0, 1j]])
def test_one_bad_entry_fails_on_its_own_row_alone(rewards):
    assert [result.problem for result in parse_rewards(rewards, 2)] == [None, "invalid"]


def test_an_array_is_a_list():
    assert [result.value for result in parse_rewards(np.array([1.0, 2.0]), 2)] == [1.0, 2.0]
    assert [result.problem for result in parse_rewards(np.ones((2, 2)), 2)] == ["invalid"] * 2
    assert parse_rewards([], 0) == []

"""Advantages against the recursion written out row by row, in Python numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.gae import compute_gae, token_rewards
from rlpack.batch.ragged import Ragged


def by_recursion(
    values: list[float], rewards: list[float], mask: list[bool], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Return advantages and returns of one row, from its end to its beginning."""
    advantages, returns = [0.0] * len(values), [0.0] * len(values)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(values))):
        if not mask[t]:
            continue  # both are carried through
        delta = rewards[t] + gamma * next_value - values[t]
        advantages[t] = delta + gamma * gae_lambda * next_advantage
        returns[t] = advantages[t] + values[t]
        next_value, next_advantage = values[t], advantages[t]
    return advantages, returns


@given(
    masks=st.lists(st.lists(st.booleans(), max_size=40), min_size=1, max_size=6),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=150, deadline=None)
def test_estimates_are_those_of_the_recursion_and_skip_masked_tokens(
    masks: list[list[bool]], gamma: float, gae_lambda: float, seed: int
) -> None:
    mask = Ragged.from_rows(masks, torch.bool)
    random = np.random.default_rng(seed)
    values, rewards = (torch.from_numpy(random.normal(size=mask.values.numel())).float() for _ in range(2))
    # Values outside the mask must not matter, not even NaN.
    values[~mask.values], rewards[~mask.values] = float("nan"), float("inf")
    result = compute_gae(values, rewards, mask, gamma=gamma, gae_lambda=gae_lambda)
    start = 0
    for row in masks:
        here = slice(start, start + len(row))
        truth = by_recursion(values[here].tolist(), rewards[here].tolist(), row, gamma, gae_lambda)
        assert result.advantages[here].tolist() == pytest.approx(truth[0], rel=1e-5, abs=1e-5)
        assert result.returns[here].tolist() == pytest.approx(truth[1], rel=1e-5, abs=1e-5)
        start += len(row)


def test_with_all_traces_and_no_values_advantages_are_the_rewards_to_come() -> None:
    mask = Ragged.from_rows([[False, True, True, False, True]], torch.bool)
    paid = token_rewards(torch.tensor([5.0]), mask, penalties=torch.tensor([9.0, 1.0, 2.0, 9.0, 0.5]))
    assert paid.tolist() == [0.0, -1.0, -2.0, 0.0, 4.5]
    result = compute_gae(torch.zeros(5), paid, mask, gamma=1.0, gae_lambda=1.0)
    assert result.advantages.tolist() == [0.0, 1.5, 2.5, 0.0, 4.5]


def test_a_row_without_a_token_that_counts_gets_no_reward_of_another() -> None:
    mask = Ragged.from_rows([[True], [False, False], [], [True, True]], torch.bool)
    assert token_rewards(torch.tensor([1.0, 100.0, 100.0, 3.0]), mask).tolist() == [1.0, 0.0, 0.0, 0.0, 3.0]


def test_a_long_row_is_solved_to_the_last_digit() -> None:
    mask = Ragged.from_rows([[True] * 5000], torch.bool)
    result = compute_gae(torch.zeros(5000), token_rewards(torch.tensor([1.0]), mask), mask, gamma=0.999, gae_lambda=1.0)
    assert result.advantages.tolist() == pytest.approx([0.999 ** (4999 - t) for t in range(5000)], rel=1e-6)


def test_what_is_no_number_or_no_factor_is_refused() -> None:
    mask = Ragged.from_rows([[True], [False, True]], torch.bool)
    with pytest.raises(AlgorithmError, match="values of row 1 contain nan"):
        compute_gae(torch.tensor([0.0, 0.0, torch.nan]), torch.zeros(3), mask, gamma=1.0, gae_lambda=1.0)
    with pytest.raises(AlgorithmError, match=r"gamma is 1.5; it must be from 0 to 1"):
        compute_gae(torch.zeros(3), torch.zeros(3), mask, gamma=1.5, gae_lambda=1.0)
    with pytest.raises(AlgorithmError, match=r"rewards are \[2\] for 3 tokens"):
        compute_gae(torch.zeros(3), torch.zeros(2), mask, gamma=1.0, gae_lambda=1.0)

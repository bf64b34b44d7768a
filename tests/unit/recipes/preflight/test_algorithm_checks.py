"""Losses and advantage functions that fail before any process starts."""

import re
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.policy_loss import PolicyLoss, PolicyTokens
from rlpack.algorithms.registry import LOSSES
from rlpack.algorithms.statistics import needs_statistics
from rlpack.config.roles import builtin_roles
from rlpack.config.schema import Algorithm, Reward, RewardFunction, Role, Trainer
from rlpack.recipes.preflight.algorithm_checks import check_algorithm
from tests.builders import tiny_config

TRAINER = Trainer(prompts_per_step=3, group_size=4)


def check(function: str, recipe: str = "grpo", **sections: Any) -> None:
    algorithm = Algorithm(advantage=f"{__name__}:{function}", kl_coef=0.1)
    check_algorithm(tiny_config(recipe, **({"trainer": TRAINER, "algorithm": algorithm} | sections)))


def loss_of_shape(tokens: PolicyTokens, *, shape: str) -> PolicyLoss:
    none, losses = torch.zeros_like(tokens.mask), -tokens.ratio * tokens.advantages
    of_shape = {
        "[]": losses.mean(),
        "[T, 1]": losses[:, None],
        "[masked]": losses[tokens.mask],
        "[B]": losses[: tokens.lengths.shape[0]],
    }
    return PolicyLoss.of(tokens, of_shape[shape], tokens.ratio, none, none)


@pytest.mark.parametrize("shape", ["[]", "[T, 1]", "[masked]", "[B]"])
def test_a_loss_of_another_shape_than_its_tokens_is_refused(shape: str) -> None:
    loss = Algorithm(loss=f"{__name__}:loss_of_shape", loss_arguments={"shape": shape})
    with pytest.raises(AlgorithmError, match=r"algorithm.loss gave a tensor of shape .* for 5 tokens"):
        check_algorithm(tiny_config(algorithm=loss))


def loss_without_gradient(tokens: PolicyTokens) -> PolicyLoss:
    none = torch.zeros_like(tokens.mask)
    return PolicyLoss.of(tokens, (-tokens.ratio * tokens.advantages).detach(), tokens.ratio, none, none)


def test_a_loss_without_a_gradient_is_refused_even_next_to_a_kl_term() -> None:
    loss = Algorithm(loss=f"{__name__}:loss_without_gradient", kl_coef=0.1)
    with pytest.raises(AlgorithmError, match=r"loss_without_gradient', whose token_losses have no gradient; compute"):
        check_algorithm(tiny_config(algorithm=loss))


def loss_of_centered_advantages(tokens: PolicyTokens) -> PolicyLoss:
    none, centered = torch.zeros_like(tokens.mask), tokens.advantages - tokens.advantages.mean()
    return PolicyLoss.of(tokens, -tokens.ratio * centered, tokens.ratio, none, none)


@needs_statistics(lambda tokens: {"mean": tokens.advantages.mean().item()})
def loss_of_advantages_centered_by_the_step(tokens: PolicyTokens, *, statistics: dict[str, float]) -> PolicyLoss:
    none, centered = torch.zeros_like(tokens.mask), tokens.advantages - statistics["mean"]
    return PolicyLoss.of(tokens, -tokens.ratio * centered, tokens.ratio, none, none)


def random_loss(tokens: PolicyTokens) -> PolicyLoss:
    none, losses = torch.zeros_like(tokens.mask), -tokens.ratio * tokens.advantages
    return PolicyLoss.of(tokens, losses * torch.rand_like(losses), tokens.ratio, none, none)


def loss_that_is_nan_for_rows_of_one_token(tokens: PolicyTokens) -> PolicyLoss:
    none, losses = torch.zeros_like(tokens.mask), -tokens.ratio * tokens.advantages
    stds = torch.stack([losses[(tokens.rows == row) & tokens.mask].std() for row in range(len(tokens.lengths))])
    return PolicyLoss.of(tokens, losses / stds[tokens.rows], tokens.ratio, none, none)


def loss_without_a_gradient_for_no_advantages(tokens: PolicyTokens) -> PolicyLoss:
    none, losses = torch.zeros_like(tokens.mask), -tokens.ratio * tokens.advantages
    is_needed = bool((tokens.advantages[tokens.mask] != 0).any())
    return PolicyLoss.of(tokens, losses if is_needed else torch.zeros_like(losses), tokens.ratio, none, none)


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(
    ("loss", "mixes"),
    [
        (f"{__name__}:random_loss", False),
        (f"{__name__}:loss_that_is_nan_for_rows_of_one_token", False),
        (f"{__name__}:loss_without_a_gradient_for_no_advantages", False),
        (f"{__name__}:loss_of_centered_advantages", True),
        (f"{__name__}:loss_of_advantages_centered_by_the_step", False),
        *((name, False) for name in LOSSES),
    ],
)
def test_a_loss_that_depends_on_other_rows_of_its_microbatch_is_a_warning(
    loss: str, mixes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_algorithm(tiny_config(algorithm=Algorithm(loss=loss)))
    assert ("the loss of a row changes with the other rows in its microbatch" in caplog.text) == mixes


def of_group(rewards: Tensor, group_ids: Tensor) -> Tensor:
    return torch.stack([rewards[group_ids == group].mean() for group in group_ids.unique()])


def as_list(rewards: Tensor) -> list[float]:
    return rewards.tolist()


def misspelt(rewards: Tensor) -> Tensor:
    return rewards.centred()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("of_group", r"of_group' returned a tensor \[3\]; return a tensor \[12\]"),
        ("as_list", r"as_list' returned a list; return a tensor \[12\]"),
        (
            "misspelt",
            r"misspelt', whose call with 12 example rows, .* failed: .*centred.* \(.*_checks\.py, line \d+\)",
        ),
    ],
)
def test_what_an_advantage_function_returns_wrongly_is_named_before_the_start(function: str, text: str) -> None:
    with pytest.raises(AlgorithmError, match=text):
        check(function)
    check(function, "sft")  # doesn't call it
    check(function, "ppo")


def of_all(
    rewards: Tensor,
    valid: Tensor,
    group_ids: Tensor,
    response_tokens: Tensor,
    response_lengths: Tensor,
    prompt_lengths: Tensor,
    kl_sum: Tensor,
    reward_correct: Tensor,
    kl_coef: float,
) -> Tensor:
    """Return advantages, and check the columns' types, and that the rewards of each group of four differ."""
    integers = (group_ids, response_tokens, response_lengths, prompt_lengths)
    assert all(column.dtype == torch.int64 for column in integers)
    assert (rewards.dtype, reward_correct.dtype, kl_sum.dtype) == (torch.float32, torch.float32, torch.float64)
    assert valid.all()
    assert group_ids.unique(return_counts=True)[1].tolist() == [4, 4, 4]
    assert (rewards.view(-1, 4).std(1) > 0).all()
    return rewards - kl_coef * kl_sum


def test_an_advantage_function_gets_columns_as_in_a_step(caplog: pytest.LogCaptureFixture) -> None:
    check("of_all", reward=Reward(functions={"correct": RewardFunction(function="tests.unit.rewards:correct")}))
    assert not caplog.records


def without_length(rewards: Tensor, response_lengths: Tensor) -> Tensor:
    """Return what a regression on the length doesn't explain."""
    terms = torch.stack([torch.ones_like(rewards), response_lengths.float()], 1)
    return rewards - terms @ torch.linalg.solve(terms.T @ terms, terms.T @ rewards)


def with_a_library(rewards: Tensor) -> Tensor:
    return rewards - statistics.mean([])


def of_long_responses(rewards: Tensor, response_lengths: Tensor) -> Tensor:
    if not (response_lengths > 10**6).any():
        raise ValueError("no response is long")
    return rewards


def test_an_error_that_the_example_values_may_cause_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check("without_length")
    assert not caplog.records
    check("with_a_library")
    assert f"({__file__}, line " in caplog.text
    caplog.clear()
    check("of_long_responses")
    (record,) = caplog.records
    assert re.search(
        r"no response is long \(.*py, line \d+\). If the rows of a step can't cause it", record.getMessage()
    )


@pytest.mark.parametrize("name", ["group_relative", "opo", "remax", "reinforce_pp"])
def test_the_built_in_functions_pass(name: str) -> None:
    check_algorithm(tiny_config("remax" if name == "remax" else "grpo", algorithm=Algorithm(advantage=name)))


def of_positive_rewards(rewards: Tensor) -> Tensor:
    return rewards.log()


def test_numbers_that_depend_on_the_rewards_are_not_checked() -> None:
    check("of_positive_rewards")


def by_level(rewards: Tensor, level: Tensor) -> Tensor:
    return rewards - level.mean(1)


def test_a_function_that_needs_columns_of_a_users_role_is_not_called() -> None:
    """Their shapes and types aren't known."""
    judge = {**builtin_roles(), "judge": Role(target=f"{__name__}:Judge")}
    check("by_level", roles=judge)
    with pytest.raises(AlgorithmError, match="of_group' returned a tensor"):
        check("of_group", roles=judge)

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.policy_loss import PolicyLoss, PolicyTokens
from rlpack.algorithms.registry import ADVANTAGES, LOSSES, advantage_parameters, find_loss, row_advantages
from rlpack.config import function_names

SETTINGS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, "baseline": "mean", "scale": "none"}
COLUMNS = {
    "rewards": torch.tensor([1.0, 0.0, float("nan")]),
    "group_ids": torch.tensor([0, 0, 0]),
    "valid": torch.tensor([True, True, False]),
    "reward_style": torch.tensor([[0.5, 0.0], [0.25, 1.0], [0.0, 0.0]]),
}


def styled(rewards: Tensor, reward_style: Tensor, *, weight: float, scale: str) -> Tensor:
    """Return an advantage from a role's column, an argument and a setting."""
    assert scale == "none"
    return rewards + weight * reward_style.sum(1)


def two_dimensional(rewards: Tensor) -> Tensor:
    return rewards[:, None]


def infinite(rewards: Tensor) -> Tensor:
    return torch.full_like(rewards, torch.inf)


def misspelt(rewards: Tensor, group_id: Tensor) -> Tensor:
    return rewards - group_id


def by_level(level: Tensor) -> Tensor:
    return level


def with_gradient(rewards: Tensor) -> Tensor:
    return (rewards - 1).requires_grad_()


scaled = functools.partial(styled, weight=2.0, scale="none")


def tapered(tokens: PolicyTokens, *, clip_low: float, power: float = 1.0) -> PolicyLoss:
    return LOSSES["ppo_clip"](tokens, clip_low=clip_low)


def advantages(name: str, **arguments: float) -> list[float]:
    return row_advantages(name, arguments, SETTINGS, COLUMNS).tolist()


def test_an_advantage_function_gets_the_columns_settings_and_arguments_that_it_names():
    assert advantages("group_relative") == [0.5, -0.5, 0.0]
    assert advantages(f"{__name__}:styled", weight=2.0) == [2.0, 2.5, 0.0]
    assert advantage_parameters(f"{__name__}:styled") == {"rewards", "reward_style", "weight", "scale"}


def test_a_partial_keeps_the_values_that_it_sets():
    """A field of `algorithm` with the name of a keyword would replace its value silently."""
    settings = SETTINGS | {"scale": "std"}
    name = f"{__name__}:scaled"
    assert row_advantages(name, {}, settings, COLUMNS).tolist() == [2.0, 2.5, 0.0]
    assert row_advantages(name, {"weight": 0.0}, settings, COLUMNS).tolist() == [1.0, 0.0, 0.0]


def test_advantages_carry_no_gradient():
    assert not row_advantages(f"{__name__}:with_gradient", {}, SETTINGS, COLUMNS).requires_grad


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        (
            "styled",
            {},
            r"styled requires 'weight'; a batch has rewards, group_ids, valid.*; set others in algorithm.advantage_arg",
        ),
        (
            "misspelt",
            {},
            r"misspelt requires 'group_id' \(did you mean 'group_ids'\?\); a batch has .*; keys of algorithm",
        ),
        ("by_level", {}, r"requires 'level'; .*_arguments, or return them from a scoring role, .* other names\)"),
        ("two_dimensional", {}, r"two_dimensional' returned a tensor \[3, 1\]; return a tensor \[3\]"),
        ("infinite", {}, "infinite' returned inf for row 0; it must be finite"),
        (
            "infinite",
            {"power": 2.0},
            r"algorithm.advantage_arguments.power is not a parameter .* those are rewards",
        ),
        ("missing", {}, "has no function missing; its functions are: .*styled"),
    ],
)
def test_what_an_advantage_function_lacks_or_returns_wrongly_is_named(name, arguments, text):
    with pytest.raises(AlgorithmError, match=text):
        advantages(f"{__name__}:{name}", **arguments)


def test_a_loss_is_found_with_arguments_that_it_takes():
    assert find_loss("gspo", {}, SETTINGS) is LOSSES["gspo"]
    assert find_loss(f"{__name__}:tapered", {"power": 2.0}, SETTINGS).__name__ == "tapered"
    with pytest.raises(AlgorithmError, match=r"algorithm.loss_arguments.taper is not a parameter of the function"):
        find_loss(f"{__name__}:tapered", {"taper": 2.0}, SETTINGS)
    with pytest.raises(AlgorithmError, match=r"loss_arguments.tokens is not a .* set; those are clip_high, clip_low"):
        find_loss("ppo_clip", {"tokens": 2.0}, SETTINGS)  # passed by position
    with pytest.raises(AlgorithmError, match=r"algorithm.loss=.*:tapered requires 'clip_low'"):
        find_loss(f"{__name__}:tapered", {}, {})


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("ppo", "algorithm.loss is 'ppo'; set it to one of ppo_clip, gspo, .*, or to package.module:function"),
        ("no_such_package:loss", "no_such_package can't be imported: ModuleNotFoundError"),
    ],
)
def test_names_that_are_no_loss_are_refused(target: str, text: str):
    with pytest.raises(AlgorithmError, match=text):
        find_loss(target, {}, SETTINGS)


def test_a_module_that_exits_on_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "leaving_loss.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AlgorithmError, match="leaving_loss can't be imported: SystemExit: 0"):
        find_loss("leaving_loss:loss", {}, SETTINGS)


def test_the_rules_know_the_names_of_losses_and_advantages():
    assert (tuple(LOSSES), tuple(ADVANTAGES)) == (function_names.LOSSES, function_names.ADVANTAGES)

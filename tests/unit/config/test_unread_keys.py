"""Warnings about keys that other keys, or the recipe, leave without effect."""

from collections.abc import Collection
from inspect import signature
from typing import Any

import pytest

from rlpack.algorithms.registry import LOSSES
from rlpack.config.compose import compose
from rlpack.config.schema import Config
from rlpack.config.validate import validate
from rlpack.config.warnings import config_warnings

VALID = {"model": {"config": {"model_type": "qwen2"}}}
SFT = {"recipe": {"target": "rlpack.recipes.sft"}, "data": {"completion_column": "solution"}}
BOUNDS = {"dual_clip": 3.0, "clip_low": 0.1, "clip_high": 0.3}


def unused(config: Config, given: Collection[str] | None = None) -> list[str]:
    """Return the warnings about keys that nothing reads."""
    return [text for text in config_warnings(config, given) if "unused" in text]


@pytest.mark.parametrize(
    ("algorithm", "recipe", "text"),
    [
        (
            {"scale": "none"},
            "ppo",
            "algorithm.scale is none but unused: with recipe=ppo advantages come from the critic",
        ),
        (
            {"advantage": "opo", "baseline": "leave_one_out"},
            "grpo",
            "baseline is leave_one_out but unused",
        ),
        ({"kl_coef": 0.1, "kl_horizon": 5.0}, "grpo", "unused: it needs algorithm.kl_target"),
        (
            {"kl_coef": 0.1, "kl_straight_through": True, "kl_placement": "reward"},
            "grpo",
            "algorithm.kl_straight_through is True but unused: algorithm.kl_placement is reward",
        ),
    ],
)
def test_a_key_that_nothing_reads_is_odd(algorithm: dict[str, Any], recipe: str, text: str):
    (found,) = unused(validate(VALID | {"recipe": {"target": f"rlpack.recipes.{recipe}"}, "algorithm": algorithm}))
    assert text in found


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["algorithm.kl_coef=0", "reference.logprob_chunk=64"],
            "reference.* is set but unused without a KL term (algorithm.kl_coef above 0)",
        ),
        (
            ["recipe=dapo", "dapo.overlong_buffer=0", "dapo.overlong_penalty=0.5"],
            "dapo.overlong_penalty is 0.5 but unused: dapo.overlong_buffer is 0",
        ),
    ],
)
def test_a_section_without_its_role_or_its_length_is_odd(overrides: list[str], text: str):
    assert text in unused(compose(["experiment=smoke", *overrides]))


@pytest.mark.parametrize(
    ("advantage", "size", "is_odd"),
    [("group_relative", 2, True), ("group_relative", 3, False), ("opo", 2, False), ("reinforce_pp", 2, False)],
)
def test_groups_of_two_are_odd_where_the_deviation_scales_advantages(advantage: str, size: int, is_odd: bool):
    config = validate(VALID | {"algorithm": {"advantage": advantage}, "trainer": {"group_size": size}})
    assert any("all have the same size" in text for text in config_warnings(config)) == is_odd


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_that_the_loss_does_not_take_is_odd(loss: str, name: str):
    found = unused(validate(VALID | {"algorithm": {"loss": loss, name: BOUNDS[name]}}))
    text = f"algorithm.{name} is {BOUNDS[name]:g} but unused: algorithm.loss={loss} doesn't use it"
    assert found == [text] * (name not in signature(LOSSES[loss]).parameters)


@pytest.mark.parametrize(("name", "value"), [("kl_estimator", "k1"), ("kl_straight_through", True), ("k3_bound", 5.0)])
def test_keys_of_a_kl_term_are_odd_without_one(name: str, value: Any):
    (found,) = unused(validate(VALID | {"algorithm": {name: value}}))
    assert found.startswith(f"algorithm.{name} is ")
    assert found.endswith("but unused: algorithm.kl_coef is 0, so there is no KL term")
    assert unused(validate(VALID | {"algorithm": {name: value, "kl_coef": 0.1}})) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kl_coef", 0.1),
        ("entropy_coef", 0.01),
        ("clip_low", 0.1),
        ("clip_high", 0.3),
        ("dual_clip", 3.5),
        ("advantage_arguments", {"x": 1}),
    ],
)
def test_supervised_steps_read_no_key_of_a_policy_loss(name: str, value: Any):
    (found,) = unused(validate(VALID | SFT | {"algorithm": {name: value}}))
    assert found.startswith(f"algorithm.{name} is {value} but unused: with recipe=sft the")


def test_groups_are_odd_in_supervised_steps_if_the_command_asks_for_them():
    config = validate(VALID | SFT | {"trainer": {"group_size": 4}})
    (found,) = unused(config, {"trainer.group_size"})
    assert found == "trainer.group_size is 4 but unused: with recipe=sft each demonstration is one sequence"
    assert unused(config, {"trainer.steps"}) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["recipe=gspo", "algorithm.loss=reinforce"], []),
        (["recipe=reinforce_plus_plus", "algorithm.kl_coef=0", "algorithm.kl_placement=loss"], []),
        (["algorithm.loss=reinforce", "algorithm.clip_high=0.3"], ["algorithm.clip_high"]),
        (["recipe=sft", "experiment=smoke", "sft_warmup.steps=0"], []),
    ],
)
def test_a_value_of_a_preset_is_not_spoken_of(overrides: list[str], said: list[str]):
    given = {override.partition("=")[0] for override in overrides}
    assert [text.partition(" is ")[0] for text in unused(compose(overrides), given)] == said


@pytest.mark.parametrize("loss", ["gspo", "gmpo", "cispo", "dppo_kl"])
def test_a_loss_with_the_bounds_of_another_one_is_odd(loss: str):
    defaults = signature(LOSSES[loss]).parameters
    low, high = defaults["clip_low"].default, defaults["clip_high"].default
    (found,) = config_warnings(compose([f"algorithm.loss={loss}"]), {"algorithm.loss"})
    assert found.startswith(
        f"algorithm.loss is {loss}, but algorithm.clip_low and algorithm.clip_high are 0.2 and 0.28"
    )
    assert f"set those of the paper (algorithm.clip_low={low:g} algorithm.clip_high={high:g})" in found
    assert (f"use recipe={loss}" in found) == (loss != "dppo_kl")


@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe=gspo"],
        ["recipe=gmpo"],
        ["recipe=cispo"],
        ["algorithm.loss=gspo", "algorithm.clip_low=0.2"],
        ["algorithm.loss=cispo", "algorithm.clip_high=0.28"],
        ["algorithm.loss=dppo_tv"],
        ["algorithm.loss=ppo_clip"],
    ],
)
def test_bounds_of_a_preset_or_of_the_command_are_not_odd(overrides: list[str]):
    assert config_warnings(compose(overrides), {override.partition("=")[0] for override in overrides}) == []

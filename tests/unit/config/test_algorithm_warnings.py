"""Warnings about losses and KL terms that do nothing, or another thing than one expects; and rules of their keys."""

import pytest

from rlpack.config.compose import compose
from rlpack.config.errors import ConfigError
from rlpack.config.warnings import config_warnings

ONE_STEP = ("trainer.mini_batch_size=null",)
K1 = "algorithm.kl_estimator is k1 and algorithm.kl_placement is loss: "
SCALED = "algorithm.kl_placement is reward and algorithm.scale is std: "
STALE = "algorithm.loss is reinforce, which has no ratio, but a batch is several optimizer steps "
NO_RATIO = "algorithm.correction.bypass is true but unused: algorithm.loss=reinforce has no ratio"
NO_PENALTY = "algorithm.loss is kl_cov, but a batch is one optimizer step: "
TO_REWARD = ("algorithm.kl_coef=0.1", "algorithm.kl_placement=reward")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"), K1),
        (("recipe=reinforce_plus_plus", "algorithm.kl_placement=loss"), K1),
        (TO_REWARD, SCALED),
        (("recipe=dapo", *TO_REWARD), SCALED),
        (("algorithm.loss=reinforce",), f"{STALE}(trainer.mini_batch_size=64, trainer.updates_per_batch=1)"),
        (("algorithm.loss=reinforce", *ONE_STEP, "trainer.updates_per_batch=3"), STALE),
        (("algorithm.loss=reinforce", *ONE_STEP, "algorithm.correction.bypass=true"), NO_RATIO),
        (("algorithm.loss=kl_cov", *ONE_STEP), NO_PENALTY),
    ],
)
def test_a_choice_without_its_effect_is_a_warning(overrides: tuple[str, ...], text: str):
    config = compose(overrides)
    assert [found for found in config_warnings(config) if found.startswith(text)]


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1", "algorithm.kl_straight_through=true"),
        ("algorithm.kl_coef=0.1", "algorithm.kl_estimator=k2"),
        ("algorithm.kl_coef=0", "algorithm.kl_estimator=k1"),
        ("recipe=reinforce_plus_plus",),
        ("recipe=ppo", *TO_REWARD),  # advantages come from the critic
        (*TO_REWARD, "algorithm.scale=none"),
        ("algorithm.loss=reinforce", *ONE_STEP),
        ("algorithm.loss=kl_cov",),
        ("algorithm.loss=kl_cov", *ONE_STEP, "trainer.updates_per_batch=2"),
        ("recipe=sft", "algorithm.loss=reinforce", "data.completion_column=answer"),
    ],
)
def test_a_choice_with_its_effect_is_none(overrides: tuple[str, ...]):
    texts = (K1, SCALED, STALE, NO_RATIO, NO_PENALTY)
    assert not [found for found in config_warnings(compose(overrides)) if found.startswith(texts)]


@pytest.mark.parametrize(
    "overrides",
    [
        ("recipe=sapo", "algorithm.clip_high=0.1"),
        ("algorithm.loss=reinforce", "algorithm.clip_high=0.1"),
        ("recipe=gmpo", "algorithm.clip_low=0.5"),
        ("algorithm.loss=dppo_tv", "algorithm.clip_low=0.3", "algorithm.clip_high=0.2"),
        ("recipe=sft", "algorithm.clip_high=0.1", "data.completion_column=answer"),
        ("recipe=sft", "algorithm.kl_placement=reward", "data.completion_column=answer"),
        ("recipe=sft", "algorithm.kl_target=3", "data.completion_column=answer"),
    ],
)
def test_bounds_that_no_loss_combines_and_keys_that_no_recipe_reads_break_no_rule(overrides: tuple[str, ...]):
    compose(overrides)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_a_lower_bound_beyond_the_upper_one_is_refused_where_ratios_are_clipped(loss: str):
    with pytest.raises(ConfigError, match=r"algorithm\.clip_low \(0\.3\) exceeds algorithm\.clip_high \(0\.2\)"):
        compose([f"algorithm.loss={loss}", "algorithm.clip_low=0.3", "algorithm.clip_high=0.2"])

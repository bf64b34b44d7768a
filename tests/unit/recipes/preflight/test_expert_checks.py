"""Options of experts are refused where the policy has no routers that they could work with."""

import pytest
from transformers import PreTrainedModel

from benchmarks.family_configs import tiny_config as family_config
from rlpack.config.schema import Actor, Config, Model
from rlpack.config.sections.optimization import Experts
from rlpack.models.errors import ModelError
from rlpack.models.loading import build_meta_model
from rlpack.recipes.preflight.architecture_checks import check_experts
from tests.builders import tiny_config

FAMILIES = ("qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3", "glm4_moe", "olmoe", "minimax_m2")


def model_of(family: str) -> PreTrainedModel:
    model = Model(config=family_config(family).to_dict() | {"model_type": family})
    return build_meta_model(model, vocab_size=40, pad_token_id=0)


def config_of(**options: float) -> Config:
    return tiny_config(actor=Actor(moe=Experts(**options)))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_routers_are_accepted(family: str):
    check_experts(config_of(balance_coefficient=0.01), model_of(family))


def test_a_model_without_experts_is_refused_with_the_key():
    with pytest.raises(ModelError, match=r"actor.moe.balance_coefficient needs .* no experts .*; set .*=0"):
        check_experts(config_of(balance_coefficient=0.01), model_of("llama"))
    check_experts(config_of(), model_of("llama"))


def test_routers_that_score_only_the_chosen_experts_are_refused():
    with pytest.raises(ModelError, match=r"GraniteMoeTopKRouter\) doesn't choose and score experts in a known way"):
        check_experts(config_of(balance_coefficient=0.01), model_of("granitemoe"))

"""Options of experts are refused where the policy has no routers that they could work with."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.family_configs import tiny_config as family_config
from rlpack.config.schema import Actor, Algorithm, Config, Critic, Model, Reference
from rlpack.config.sections.optimization import Experts
from rlpack.models.errors import ModelError
from rlpack.models.loading import build_meta_model
from rlpack.recipes.preflight.architecture_checks import check_experts
from tests.builders import tiny_config

FAMILIES = ("qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3", "glm4_moe", "olmoe", "minimax_m2")


def model_of(family: str) -> PreTrainedModel:
    model = Model(config=family_config(family).to_dict() | {"model_type": family})
    return build_meta_model(model, vocab_size=40, pad_token_id=0)


def config_of(**options: Any) -> Config:
    return tiny_config(actor=Actor(moe=Experts(**options)))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_routers_are_accepted(family: str):
    check_experts(config_of(balance_coefficient=0.01), model_of(family))


def test_a_model_without_experts_is_refused_with_the_key():
    with pytest.raises(ModelError, match=r"actor.moe.balance_coefficient needs .* no experts .*; set .*=0"):
        check_experts(config_of(balance_coefficient=0.01), model_of("llama"))
    with pytest.raises(ModelError, match=r"actor.moe.replay_routing needs .*; set actor.moe.replay_routing=false"):
        check_experts(config_of(replay_routing=True), model_of("llama"))
    check_experts(config_of(), model_of("llama"))


def test_routers_that_score_only_the_chosen_experts_can_be_replayed_but_not_balanced():
    check_experts(config_of(replay_routing=True), model_of("granitemoe"))
    with pytest.raises(ModelError, match=r"GraniteMoeTopKRouter\) scores only the chosen experts"):
        check_experts(config_of(balance_coefficient=0.01), model_of("granitemoe"))


@pytest.mark.parametrize(
    ("sizes", "precision", "problem"),
    [
        ({"moe_intermediate_size": 63}, "fp32", r"moe_intermediate_size=63, .* in fp32 .* of 4 .*; set .*_size=64"),
        ({"moe_intermediate_size": 60}, "bf16", r"moe_intermediate_size=60, .* in bf16 .* of 8 .*; set .*_size=64"),
        (
            {"hidden_size": 36, "num_attention_heads": 2, "num_key_value_heads": 2},
            "bf16",
            r"hidden_size=36, .* of 8 .*; set model.config.hidden_size=40",
        ),
        ({"moe_intermediate_size": 60}, "fp32", None),
        ({"moe_intermediate_size": 64}, "bf16", None),
    ],
)
def test_experts_of_a_size_that_grouped_products_refuse_are_named_with_the_next_size_that_works(
    sizes: dict[str, int], precision: Any, problem: str | None
):
    model = build_meta_model(Model(config=moe_config(**sizes)), vocab_size=40, pad_token_id=0)
    config = tiny_config(actor=Actor(precision=precision))
    if problem is None:
        check_experts(config, model)
        return
    with pytest.raises(ModelError, match=problem):
        check_experts(config, model)


def moe_config(**sizes: int) -> dict[str, Any]:
    return family_config("qwen3_moe").to_dict() | {"model_type": "qwen3_moe"} | sizes


@pytest.mark.parametrize(
    ("size", "roles", "ways"),
    [
        (60, {"reference": Reference(precision="bf16")}, "set model.config.moe_intermediate_size=64, or set reference"),
        (60, {"critic": Critic(precision="bf16")}, "set model.config.moe_intermediate_size=64, or set critic"),
        (
            60,
            {"actor": Actor(precision="bf16"), "critic": Critic(precision="fp32")},
            "=64, or set actor.precision=fp32 ",
        ),
        (62, {"critic": Critic(precision="bf16")}, "set model.config.moe_intermediate_size=64$"),
    ],
)
def test_every_role_of_the_policys_architecture_has_its_own_precision(size: int, roles: dict[str, Any], ways: str):
    model = build_meta_model(Model(config=moe_config(moe_intermediate_size=size)), vocab_size=40, pad_token_id=0)
    sections = {"recipe": "ppo", "algorithm": Algorithm(kl_coef=0.1, aggregation="token_mean")} | roles
    with pytest.raises(ModelError, match=rf"experts in bf16 only if .* 8 \(16 bytes\); .*{ways}"):
        check_experts(tiny_config(**sections), model)


@pytest.mark.parametrize(
    ("size", "dtype", "works"),
    [
        *[(63, "float32", False), (62, "float32", False), (60, "float32", True)],
        *[(60, "bfloat16", False), (64, "bfloat16", True)],
    ],
)
def test_grouped_products_of_torch_have_the_limit_that_is_checked(size: int, dtype: str, works: bool):
    kind = getattr(torch, dtype)
    rows, weights = torch.ones(6, size, dtype=kind), torch.ones(2, 8, size, dtype=kind)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    if works:
        assert torch.nn.functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends).unique().tolist() == [size]
    else:
        with pytest.raises(RuntimeError, match="16 bytes"):
            torch.nn.functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


class FreeRouter(torch.nn.Module):
    """A router that chooses by sorting."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.num_experts = 2, 4
        self.weight = torch.nn.Parameter(torch.zeros(4, 32))

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = (states @ self.weight.T).softmax(-1)
        chosen = logits.argsort(-1)[:, -2:]
        return logits, logits.gather(1, chosen), chosen


def test_routers_that_choose_in_another_way_are_refused():
    model: Any = model_of("mixtral")
    router = model.model.layers[0].mlp.gate
    free = FreeRouter().to("meta")
    free.num_experts, free.top_k = router.num_experts, router.top_k
    free.weight = torch.nn.Parameter(torch.empty_like(router.weight))
    model.model.layers[0].mlp.gate = free
    with pytest.raises(ModelError, match=r"FreeRouter\) doesn't choose experts in a known way"):
        check_experts(config_of(replay_routing=True), model)

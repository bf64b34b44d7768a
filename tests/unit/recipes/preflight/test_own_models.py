"""Critics and reward models with separate paths get the checks of the policy's model; errors name their keys."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlpack.config.schema import Actor, Algorithm, Critic, Data, Model, Rollout
from rlpack.config.sections.value_models import RewardModel
from rlpack.models.errors import ModelError
from rlpack.recipes.driver.splits import load_splits
from rlpack.recipes.preflight.config_checks import check_before_evaluation, check_before_start
from tests.builders import tiny_config

VOCABULARY = 64
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MOE = {"model_type": "qwen3_moe", **SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
LLAMA = {"model_type": "llama", **SIZES, "intermediate_size": 48}
# Verified neither packed nor padded: its own output layer has a transform, which is no part of a scalar head.
BERT = {"model_type": "bert", "is_decoder": True, **SIZES, "intermediate_size": 48, "max_position_embeddings": 1024}
DATA = {"generator": {"train_size": 32, "validation_size": 4}, "completion_column": "demonstration"}
LENGTHS = {"data": Data(**DATA, max_prompt_tokens=40), "rollout": Rollout(max_new_tokens=24)}
ROLES = ("critic", "reward_model")


def saved(folder: Path, role: str, settings: dict[str, Any]) -> str:
    """Write a model of a role's kind, and return its folder."""
    kind = AutoModelForSequenceClassification if role == "reward_model" else AutoModelForCausalLM
    config = AutoConfig.for_model(**{"vocab_size": VOCABULARY, "num_labels": 1, "pad_token_id": 0} | settings)
    kind.from_config(config).save_pretrained(folder)
    return str(folder)


def check(role: str, path: str, **sections: Any) -> None:
    """Check a run with a separate critic or reward model."""
    own: dict[str, Any] = {"reward_model": RewardModel(path=path)}
    if role == "critic":
        own = {"recipe": "ppo", "algorithm": Algorithm(aggregation="token_mean"), "critic": Critic(path=path)}
    own |= {name: value.model_copy(update={"path": path}) for name, value in sections.items() if name in ROLES}
    config = tiny_config(**(LENGTHS | sections | own))
    check_before_start(config, *load_splits(config))


@pytest.mark.parametrize("role", ROLES)
def test_rows_longer_than_the_positions_of_a_model_are_refused_with_its_key(tmp_path: Path, role: str):
    path = saved(tmp_path, role, GPT2)
    check(role, path)
    words = (
        rf"{role}\.path \('{path}'\): GPT2.* has 64 learned positions \(.*wpe\), but rows have up to 65 tokens "
        r"\(data\.max_prompt_tokens 40 \+ rollout\.max_new_tokens 25\): lower their sum to 64, or use another model"
    )
    with pytest.raises(ModelError, match=words):
        check(role, path, rollout=Rollout(max_new_tokens=25))


@pytest.mark.parametrize("role", ROLES)
def test_a_rotary_limit_is_named_with_the_key(tmp_path: Path, role: str):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    path = saved(tmp_path, role, LLAMA | {"max_position_embeddings": 64, "rope_parameters": rope})
    check(role, path)
    with pytest.raises(ModelError, match=rf"{role}\.path \('{path}'\): the model \(llama\) has rope_type=dynamic"):
        check(role, path, rollout=Rollout(max_new_tokens=25))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("size", "precision", "problem"),
    [
        (
            6,
            None,
            r"moe_intermediate_size=6, .* in fp32 only if it is a multiple of 4 \(16 bytes\); use another model$",
        ),
        (12, "bf16", r"moe_intermediate_size=12, .* in bf16 .* of 8 .*; use another model, or set {}\.precision=fp32$"),
        (12, None, None),
        (16, "bf16", None),
    ],
)
def test_experts_of_a_size_that_grouped_products_refuse_are_named_with_the_key(
    tmp_path: Path, role: str, size: int, precision: Any, problem: str | None
):
    path = saved(tmp_path, role, MOE | {"moe_intermediate_size": size})
    own = {role: (Critic if role == "critic" else RewardModel)(precision=precision)}
    if problem is None:
        check(role, path, **own)
        return
    with pytest.raises(ModelError, match=rf"{role}\.path \('{path}'\): Qwen3Moe.* " + problem.format(role)):
        check(role, path, **own)


@pytest.mark.parametrize("role", ROLES)
def test_experts_are_computed_in_the_precision_that_a_role_inherits(tmp_path: Path, role: str):
    path = saved(tmp_path, role, MOE | {"moe_intermediate_size": 12})
    with pytest.raises(ModelError, match=rf"in bf16 .* set {role}\.precision=fp32"):
        check(role, path, actor=Actor(precision="bf16", isolation_check=False))


@pytest.mark.parametrize("role", ROLES)
def test_a_model_of_fewer_tokens_than_the_policys_is_refused_with_the_key(tmp_path: Path, role: str):
    path = saved(tmp_path, role, LLAMA | {"vocab_size": 8})
    with pytest.raises(ModelError, match=rf"{role}\.path \('{path}'\): the tokenizer has \d+ tokens and the model 8"):
        check(role, path)


@pytest.mark.parametrize("role", ROLES)
def test_a_small_model_of_an_unverified_architecture_is_compared_before_any_process_starts(tmp_path: Path, role: str):
    checked = {role: (Critic if role == "critic" else RewardModel)(isolation_check=True)}
    check(role, saved(tmp_path / "decoder", role, BERT), **checked)
    encoder = saved(tmp_path / "encoder", role, BERT | {"is_decoder": False})
    with pytest.raises(
        ModelError, match=rf"BertModel can't be run packed as the {role}: BertSelfAttention is not causal"
    ):
        check(role, encoder, **checked)
    check(role, encoder)


def test_an_evaluation_computes_the_experts_of_its_model_in_fp32_by_hf_only(tmp_path: Path):
    tokenizer, _, held_out = load_splits(tiny_config(**LENGTHS))
    for size in (6, 12):
        path = saved(tmp_path / str(size), "actor", MOE | {"moe_intermediate_size": size})
        config = tiny_config(**LENGTHS, model=Model(path=path), actor=Actor(precision="bf16"))
        if size == 12:
            check_before_evaluation(config, tokenizer, held_out)
            continue
        with pytest.raises(ModelError, match=rf"model\.path \('{path}'\): Qwen3Moe.* in fp32 only if"):
            check_before_evaluation(config, tokenizer, held_out)

"""The memory of a pipeline whose stages differ, next to the sizes of their layers."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlpack.config.schema import Actor, Model, Placement, Pool
from rlpack.config.sections.parallelism import Parallel
from rlpack.models.memory_simulation import SimulatedMicrobatch
from rlpack.recipes.dry_run.role_memory import role_memory
from tests.builders import tiny_config, tiny_tokenizer

SHAPE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 2,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.mark.parametrize("num_dense", [2, 0])
def test_the_stage_that_needs_most_may_be_between_the_first_and_the_last(num_dense: int) -> None:
    shape = SHAPE | {"first_k_dense_replace": num_dense}
    config = tiny_config(
        "sft",
        model=Model(config=shape),
        actor=Actor(isolation_check=False, parallel=Parallel(pp=3)),
        placement=Placement(pools={"main": Pool(ranks=3)}),
    )
    tokenizer = tiny_tokenizer()
    memory = role_memory(config, "actor", tokenizer, SimulatedMicrobatch(512, 256), several=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**shape, vocab_size=len(tokenizer)), dtype=torch.float32
        )
    layers, embedding = model.get_submodule("model.layers"), model.get_input_embeddings()
    assert isinstance(layers, torch.nn.ModuleList)
    # With layers of equal size, the first stage keeps most activations.
    held = [*layers[2:4]] if num_dense else [embedding, *layers[:2]]
    weights = 4 * sum(weight.numel() for module in held for weight in module.parameters())
    assert weights <= memory.weights <= weights + 4096  # and buffers

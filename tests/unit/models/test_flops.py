"""The cost model against torch's own count of floating-point operations."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlpack.models.flops import model_flops, sequence_cost
from tests.distributed.layouts.cases import FAMILIES
from tests.unit.models.tiny import tiny_model
from tests.unit.models.torch_flops import flops_of_causal_model, total_flops


def counted(model: torch.nn.Module, tokens: int) -> int:
    ids = torch.arange(tokens)[None] % 50
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return total_flops(counter)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tokens", [8, 32])
def test_the_cost_of_a_dense_model_is_what_torch_counts(kind: str, tokens: int) -> None:
    model = tiny_model(kind, implementation="eager")
    cost = sequence_cost(model)
    # torch counts all pairs of tokens, of which causal attention needs half.
    assert counted(model, tokens) == cost.linear * tokens + 2 * cost.quadratic * tokens**2


@pytest.mark.parametrize("frozen", ["", "mlp", "self_attn.q_proj"])
def test_the_flops_of_an_update_are_what_torch_counts_forward_and_backward(frozen: str) -> None:
    model = tiny_model("qwen2", implementation="eager")
    for name, weight in model.named_parameters():
        weight.requires_grad_(not frozen or frozen not in name)
    flops = model_flops(model)
    ids = torch.arange(16)[None] % 50
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    pairs = 3 * flops.body.quadratic * 16**2
    assert total_flops(counter) == pytest.approx(flops.update(np.array([16]), 16) + pairs)


def test_only_scored_tokens_run_through_the_output_layer() -> None:
    model = tiny_model("llama")
    flops, cost, head = model_flops(model), sequence_cost(model), model.get_output_embeddings().weight
    lengths = np.array([3, 7])
    assert flops.forward(lengths, 10) == pytest.approx(cost.of(lengths).sum())
    assert flops.forward(lengths, 4) == pytest.approx(cost.of(lengths).sum() - 6 * 2 * head.numel())


def test_a_mixture_of_experts_costs_its_routed_share() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 48}
    settings = shape | experts | {"vocab_size": 53, "head_dim": 8, "mlp_only_layers": []}
    config = AutoConfig.for_model("qwen3_moe", **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with torch.device("meta"):
        cost = sequence_cost(AutoModelForCausalLM.from_config(config))
    assert counted(model, 16) == cost.linear * 16 + 2 * cost.quadratic * 16**2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cost_of_every_family_with_layouts_is_what_torch_counts(family: str) -> None:
    """At the width of a window; the products of attention, which torch counts for all pairs, by half."""
    shape = {"vocab_size": 53, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = shape | {"num_key_value_heads": 2, "intermediate_size": 48} | FAMILIES[family]
    tokens = settings.get("sliding_window", 16)
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    ids = torch.arange(tokens)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    assert flops_of_causal_model(counter) == sequence_cost(model).of(np.array([tokens]))[0]


def test_windowed_layers_are_linear_in_length() -> None:
    windowed, full = sequence_cost(tiny_model("gemma3")), sequence_cost(tiny_model("qwen3"))
    assert windowed.quadratic < full.quadratic
    assert sequence_cost(tiny_model("mistral")).quadratic == 0


def test_a_config_with_aliases_is_understood() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=53)
    with torch.device("meta"):
        cost = sequence_cost(AutoModelForCausalLM.from_config(config))
    assert cost.quadratic == 2 * 2 * 32

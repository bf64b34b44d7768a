"""The cost model against torch's own count of floating-point operations."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.family_configs import tiny_config
from rlpack.models.flops import model_flops, sequence_cost
from rlpack.models.packed import language_model
from tests.distributed.layouts.cases import FAMILIES
from tests.unit.models.tiny import tiny_model
from tests.unit.models.torch_flops import flops_by_operation, flops_of_causal_model, total_flops


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


OTHER_NAMES: dict[str, dict[str, Any]] = {
    "aria_text": {},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
    "granitemoe": {},
    "hrm_text": {},
    "hunyuan_v1_moe": {"moe_topk": [1, 3]},
    "jetmoe": {},
}


@pytest.mark.parametrize("model_type", OTHER_NAMES)
def test_experts_and_layers_under_other_names_cost_what_torch_counts(model_type: str) -> None:
    """At the width of a window; Gemma 4's heads differ between layers, and HRM's layers run several times."""
    config = tiny_config(model_type)
    for name, value in OTHER_NAMES[model_type].items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(3, 15)[None], use_cache=False)
    assert sequence_cost(model).of(np.array([12]))[0] == flops_of_causal_model(counter)


def test_experts_of_dbrx_are_counted_by_a_section_of_its_config() -> None:
    few, all_four = tiny_config("dbrx"), tiny_config("dbrx")
    all_four.ffn_config.moe_top_k = 4
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(config) for config in (few, all_four)]
    experts = sum(weight.numel() for name, weight in models[0].named_parameters() if ".experts." in name)
    assert sequence_cost(models[1]).linear - sequence_cost(models[0]).linear == 2 * experts / 2


def test_windowed_layers_are_linear_in_length() -> None:
    windowed, full = sequence_cost(tiny_model("gemma3")), sequence_cost(tiny_model("qwen3"))
    assert windowed.quadratic < full.quadratic
    assert sequence_cost(tiny_model("mistral")).quadratic == 0


@pytest.mark.parametrize("window", [3, 16, 17, 200])
def test_a_token_in_a_window_attends_to_as_many_keys_as_there_are(window: int) -> None:
    shape = {"vocab_size": 53, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    lengths = np.array([16, 5])
    with torch.device("meta"):
        windowed, full = (
            model_flops(AutoModelForCausalLM.from_config(AutoConfig.for_model("mistral", **shape, sliding_window=size)))
            for size in (window, None)
        )
    pairs = [sum(min(token + 0.5, size) for length in lengths for token in range(length)) for size in (window, 1e9)]
    less = 2 * 4 * 32 * (pairs[1] - pairs[0])  # layers · FLOPs of a pair · heads · size
    assert full.forward(lengths, 21) - windowed.forward(lengths, 21) == pytest.approx(less)
    assert full.update(lengths, 21) - windowed.update(lengths, 21) == pytest.approx(3 * less)


def test_a_window_that_no_row_exceeds_costs_as_much_as_full_attention() -> None:
    models = tiny_model("mistral"), tiny_model("mistral", sliding_window=None)
    window = models[0].config.sliding_window
    assert sequence_cost(models[0], window) == sequence_cost(models[1])
    assert sequence_cost(models[0], window + 1) == sequence_cost(models[0]) != sequence_cost(models[1])


def test_a_config_with_aliases_is_understood() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=53)
    with torch.device("meta"):
        cost = sequence_cost(AutoModelForCausalLM.from_config(config))
    assert cost.quadratic == 2 * 2 * 32


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "got_ocr2", "fuyu", "phi4_multimodal", "gemma4_text"])
def test_weights_that_multiply_no_token_cost_nothing(model_type: str) -> None:
    """Encoders of images and sounds, and lookups of positions and of layers, next to torch's count of a text."""
    tokens = 8
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation="eager").eval()
    ids = torch.arange(3, 3 + tokens)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    counts = flops_by_operation(counter)
    weights = sum(counts.values()) - counts[torch.ops.aten.bmm]
    if model_type == "gemma4_text":
        model.config.sliding_window = 0  # the products of windowed attention are linear, too
    assert sequence_cost(model).linear * tokens == pytest.approx(weights, rel=1e-3)


def test_layers_are_counted_where_a_config_derives_their_number() -> None:
    """In Nemotron-H only layers of attention have a quadratic part; LongCat has two attentions in a layer."""
    hybrid = tiny_config("nemotron_h")
    hybrid.layers_block_type = ["linear_attention", "full_attention", "mlp", "full_attention", "linear_attention"]
    double = tiny_config("longcat_flash")
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(config) for config in (hybrid, double)]
    width = hybrid.num_attention_heads * hybrid.head_dim
    assert sequence_cost(models[0]).quadratic == 2 * 2 * width
    size = (double.qk_nope_head_dim + double.qk_rope_head_dim + double.v_head_dim) / 2
    assert sequence_cost(models[1]).quadratic == 2 * double.num_layers * 2 * double.num_attention_heads * size


def test_layers_count_with_their_own_head_size() -> None:
    """Gemma 4's config pads the numbers of layers with zeros if there are more than ten."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    sizes = {"num_hidden_layers": 12, "head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 0}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **shape, **sizes))
    assert sequence_cost(model).quadratic == 2 * 2 * 4 * 64  # layers 5 and 11 have full attention


def test_a_decoder_without_an_embedding_that_transformers_finds_has_the_flops_of_its_model() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("bart"))
    assert model_flops(language_model(model)).body == model_flops(model).body

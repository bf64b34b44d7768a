"""The direct decoder against transformers' forward pass of whole rows without a cache."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlpack.batch.ragged import Ragged
from rlpack.models.cpu_products import use_faster_products
from rlpack.rollout import decoding, direct_decoder
from rlpack.rollout.direct_decoder import DirectDecoder
from rlpack.rollout.errors import EngineError
from rlpack.rollout.fused_linear import FusedLinear, padded_rows
from rlpack.rollout.hf import HFEngine
from rlpack.rollout.known_layers import unknown_part
from tests.unit.rollout.builders import SIZES, VOCABULARY

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": lambda **tied: LlamaForCausalLM(LlamaConfig(**SIZES, **tied, attention_bias=True, mlp_bias=True)),
    "llama3": lambda **tied: LlamaForCausalLM(LlamaConfig(**SIZES, **tied, rope_parameters=LLAMA3_ROPE)),
    "mistral": lambda **tied: MistralForCausalLM(MistralConfig(**SIZES, **tied, sliding_window=16)),
    "mistral_whole": lambda **tied: MistralForCausalLM(MistralConfig(**SIZES, **tied, sliding_window=None)),
    "qwen2": lambda **tied: Qwen2ForCausalLM(Qwen2Config(**SIZES, **tied)),
    "qwen2_sliding": lambda **tied: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, **tied, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    ),
    "qwen3": lambda **tied: Qwen3ForCausalLM(Qwen3Config(**SIZES, **tied, head_dim=16)),
    "gemma3": lambda **tied: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES, **tied, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
        )
    ),
}
KINDS = [(kind, tied) for kind in FAMILIES for tied in (False, True)]


def build(kind, tied=False, seed=0):
    """A model whose every parameter differs from what initialization gives it, norms and biases included."""
    torch.manual_seed(seed)
    model = FAMILIES[kind](tie_word_embeddings=tied).eval()
    perturb(model, seed + 1)
    return use_faster_products(model)


@torch.no_grad()
def perturb(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def rows_of(lengths, extra, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length + extra,), generator=generator) for length in lengths]


@torch.inference_mode()
def assert_equals_whole_rows(model, lengths, steps, dropped=()):
    """Compare the logits of each step; `dropped` has (step, rows to keep)."""
    rows = rows_of(lengths, steps)
    whole = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    prompts = Ragged.from_rows([row[:-steps] for row in rows], torch.int64)
    decoder = DirectDecoder(model, prompts, steps, 0)
    alive, drops = list(range(len(rows))), dict(dropped)
    for step in range(steps + 1):
        tokens = [rows[index][lengths[index] + step - 1] for index in alive]
        logits = decoder.prefill() if step == 0 else decoder.step(torch.stack(tokens))
        expected = torch.stack([whole[index][lengths[index] + step - 1] for index in alive])
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
        if step in drops:
            decoder.keep(torch.tensor(drops[step]))
            alive = [alive[index] for index in drops[step]]


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_logits_equal_whole_rows_with_padding_and_dropped_rows(kind, tied):
    lengths = [1, 9, 9, 21, 30, 5, 13]
    dropped = [(1, [6, 1, 2, 3, 4, 5]), (4, [0, 5, 2]), (9, [2])]
    assert_equals_whole_rows(build(kind, tied), lengths, 14, dropped)


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_equal_whole_rows_beyond_windows_and_the_first_buffers(kind):
    assert_equals_whole_rows(build(kind), [3, 40], 80)


def test_models_with_eager_attention_are_run_too():
    model = build("llama")
    model.set_attn_implementation("eager")
    assert_equals_whole_rows(model, [4, 11, 30], 6, [(2, [0, 2])])


@pytest.mark.parametrize("rows", [1, 3, 5, 13, 40, 63, 64, 65, 130])
@pytest.mark.parametrize("work", [1, 2**30])
def test_logits_do_not_depend_on_the_kernel_of_products(rows, work, monkeypatch):
    monkeypatch.setattr("rlpack.rollout.fused_linear._LEAST_WORK", work)
    assert_equals_whole_rows(build("qwen3"), [1 + row % 7 for row in range(rows)], 3, [(1, list(range(rows // 2 + 1)))])


@pytest.mark.parametrize("kind", FAMILIES)
def test_large_models_use_their_own_weights(kind, monkeypatch):
    monkeypatch.setattr(direct_decoder, "_MAX_COPY_BYTES", 0)
    assert_equals_whole_rows(build(kind), [4, 11, 40], 6, [(2, [0, 2])])
    assert_equals_whole_rows(build(kind), [1 + row % 7 for row in range(70)], 3)


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_each_weight_counts_after_an_update(kind, tied):
    """Prepared weights are copies; one that outlived an update would give the old model's logits."""
    engine = HFEngine(build(kind, tied))
    assert engine.decoder_name == "DirectDecoder"
    prompts = Ragged.from_rows([[3, 4, 5], [7]], torch.int64)
    steps = torch.tensor([[8, 9], [2, 3]])

    @torch.inference_mode()
    def logits(model, decoder):
        running = decoder(model, prompts, 2, 0)
        return torch.stack([running.prefill(), *(running.step(tokens) for tokens in steps.t())])

    source, generator = copy.deepcopy(engine._model), torch.Generator().manual_seed(5)
    for name, parameter in source.named_parameters():
        before = logits(source, DirectDecoder)
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        engine.load_bucket({name: parameter})
        # The change is visible, and is what transformers computes.
        expected = logits(source, decoding.PreparedMaskDecoder)
        assert (expected - before).abs().max() > 1e-3, name
        own = logits(engine._model, engine._decoder)
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item(), msg=name)


def with_hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, arguments, output: output)
    return model


def with_replaced_forward(model):
    attention = model.model.layers[0].self_attn
    attention.forward = attention.forward
    return model


def with_subclass(model):
    class Adapted(nn.Linear):
        """A linear layer with anything in it."""

    model.model.layers[0].mlp.up_proj.__class__ = Adapted
    return model


def with_extra_module(model):
    model.model.layers[0].mlp.gate = nn.Sigmoid()
    return model


def with_parametrization(model):
    parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)
    return model


def with_rope(**parameters):
    sizes = {**SIZES, "rope_parameters": {"rope_theta": 10000.0, **parameters}}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


UNKNOWN = {
    "hook": lambda: with_hook(build("qwen2")),
    "replaced forward": lambda: with_replaced_forward(build("llama")),
    "subclass": lambda: with_subclass(build("llama")),
    "extra module": lambda: with_extra_module(build("qwen3")),
    "parametrization": lambda: with_parametrization(build("llama")),
    "another activation": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="relu")).eval(),
    "soft cap of logits": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, final_logit_softcapping=30.0)
    ).eval(),
    "another family": lambda: Gemma2ForCausalLM(
        Gemma2Config(**{**SIZES, "attn_implementation": "eager"}, head_dim=8)
    ).eval(),
    "rope by length": lambda: with_rope(rope_type="dynamic", factor=2.0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_models_are_not_recognized(name):
    model = UNKNOWN[name]()
    assert unknown_part(model)
    with pytest.raises(EngineError):
        DirectDecoder(model, Ragged.from_rows([[1]], torch.int64), 1, 0)


@pytest.mark.parametrize("name", ["hook", "subclass", "another activation"])
def test_other_models_generate_by_their_own_modules(name):
    assert HFEngine(UNKNOWN[name]()).decoder_name == "PreparedMaskDecoder"


def test_models_of_another_type_are_not_recognized():
    assert "bfloat16" in (unknown_part(build("qwen2").to(torch.bfloat16)) or "")


@pytest.mark.parametrize("work", [1, 2**30])
@pytest.mark.parametrize("is_copied", [True, False])
@pytest.mark.parametrize("biases", [(False,), (True,), (True, False, True)])
def test_fused_layers_equal_each_layer_in_double_precision(work, is_copied, biases, monkeypatch):
    monkeypatch.setattr("rlpack.rollout.fused_linear._LEAST_WORK", work)
    torch.manual_seed(0)
    layers = [nn.Linear(48, 32 + 16 * index, bias=bias) for index, bias in enumerate(biases)]
    with torch.inference_mode():
        fused = FusedLinear(layers, copy=is_copied)
        for rows in (1, 2, 7, 33, 64, 100):
            padded = torch.randn(padded_rows(rows, fused.least_rows), 48)
            expected = torch.cat([copy.deepcopy(layer).double()(padded.double()) for layer in layers], -1)
            torch.testing.assert_close(fused(padded).double(), expected, rtol=1e-5, atol=1e-5)


def test_few_numbers_of_rows_are_computed():
    sizes = [padded_rows(count, 6) for count in range(1, 600)]
    assert all(size >= count for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert [padded_rows(count, None) for count in (1, 5, 77)] == [1, 5, 77]

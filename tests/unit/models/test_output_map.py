"""What a model does around its output layer, against its own forward pass: scores and all gradients."""

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from rlpack.models.checks import check_model
from rlpack.models.errors import ModelError
from rlpack.models.inputs import pack_rows
from rlpack.models.output_map import OutputMap, measure_output_map, run_measured_tokens
from rlpack.models.policy import Policy, output_head
from tests.unit.models.tiny import VOCABULARY, offload_embedding, reference_scores, tiny_model, tiny_rows

# By kind of model: changes to its config, and the map that its modeling file has.
MAPS = {
    "qwen2": ({}, OutputMap()),
    "gemma2": ({}, OutputMap(softcap=3.0)),
    "cohere": ({"logit_scale": 0.0625}, OutputMap(scale=0.0625)),
    "cohere2": ({"logit_scale": 0.3}, OutputMap(scale=0.3)),
    "granite": ({"logits_scaling": 8.0}, OutputMap(scale=1 / 8)),
    "hyperclovax": ({"logits_scaling": 4.0}, OutputMap(scale=4.0)),
}


class _Own(Qwen2ForCausalLM):
    """A user's class, which scales hidden states, then logits, caps them, and drops the last three."""

    def forward(self, input_ids: Tensor, use_cache: bool = False, **options: object) -> CausalLMOutputWithPast:
        hidden = self.model(input_ids=input_ids, use_cache=use_cache, **options).last_hidden_state
        return CausalLMOutputWithPast(logits=self.map(self.lm_head(hidden / 3.0))[..., :-3])

    @staticmethod
    def map(logits: Tensor) -> Tensor:
        return 2.5 * torch.tanh(logits * 1.7 / 2.5)


class _Shifted(_Own):
    """A user's class with a map that can't be split into a scale and a cap."""

    @staticmethod
    def map(logits: Tensor) -> Tensor:
        return logits + 0.1 * logits.abs()


def own_model(kind: type[_Own], dtype: torch.dtype) -> _Own:
    config = Qwen2Config(
        vocab_size=VOCABULARY + 3,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        initializer_range=0.25,
        attn_implementation="rlpack",
    )
    tiny_model()  # registers the attention
    torch.manual_seed(0)
    return kind(config).to(dtype)


@pytest.mark.parametrize("kind", MAPS)
def test_the_map_is_the_one_of_the_modeling_file(kind: str):
    changes, expected = MAPS[kind]
    model = tiny_model(kind, dtype=torch.float32, **changes)
    found = measure_output_map(model, output_head(model))
    assert (found.softcap, found.num_logits) == (expected.softcap, expected.num_logits)
    assert (found.hidden_scale, found.scale) == pytest.approx((expected.hidden_scale, expected.scale), rel=1e-6)


@pytest.mark.parametrize("kind", [*MAPS, "own class"])
def test_scores_and_gradients_are_those_of_the_models_own_forward_pass(kind: str):
    model = own_model(_Own, torch.float64) if kind == "own class" else tiny_model(kind, **MAPS[kind][0])
    rows = tiny_rows([9, 4, 14])
    weights = torch.randn(2, 27, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = [torch.cat(parts) for parts in zip(*(reference_scores(model, row, 0.7) for row in rows), strict=True)]
    (torch.stack(expected) * weights).sum().backward()
    truth = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    scores = Policy(model)(pack_rows(rows), temperature=0.7)
    (torch.stack(scores) * weights).sum().backward()
    # The measured numbers have been rounded to fp32.
    assert torch.allclose(scores.logprobs, expected[0], rtol=1e-6, atol=1e-6)
    assert torch.allclose(scores.entropy, expected[1], rtol=1e-6, atol=1e-6)
    for name, weight in model.named_parameters():
        assert torch.allclose(weight.grad, truth[name], rtol=1e-5, atol=1e-6), name


def test_a_class_with_its_own_scale_and_cap_passes_the_model_check():
    check_model(Policy(own_model(_Own, torch.float32)), "cpu", VOCABULARY)


def test_a_map_that_cannot_be_applied_is_refused_by_name():
    with pytest.raises(ModelError, match="_Shifted: the model's own output layer has further operations"):
        Policy(own_model(_Shifted, torch.float32))


def test_a_bias_that_is_added_outside_the_layer_is_refused():
    model = own_model(_Own, torch.float32)
    bias = nn.Parameter(torch.ones(VOCABULARY + 3))
    model.map = lambda logits: logits + bias
    with pytest.raises(ModelError, match="further operations"):
        Policy(model)


@torch.no_grad()
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_taken_for_another_map(value: float):
    model = tiny_model(dtype=torch.float32)
    model.model.norm.weight[3] = value
    with pytest.raises(ModelError, match="Qwen2ForCausalLM: the first 4 tokens have hidden states that are NaN or inf"):
        Policy(model)


def test_a_scale_that_cannot_be_measured_is_refused_by_its_key():
    class Bypassing(_Own):
        def forward(self, input_ids: Tensor, use_cache: bool = False, **options: object) -> CausalLMOutputWithPast:
            hidden = self.model(input_ids=input_ids, use_cache=use_cache, **options).last_hidden_state
            return CausalLMOutputWithPast(logits=hidden @ self.lm_head.weight.t() * self.config.logit_scale)

    model = own_model(Bypassing, torch.float32)
    model.config.logit_scale = 0.25
    with pytest.raises(ModelError, match=r"Bypassing has logit_scale=0\.25"):
        Policy(model)


def test_measuring_changes_neither_mode_nor_random_state():
    model = tiny_model("gpt2", dtype=torch.float32, n_embd=32, n_layer=2, n_head=4).train()
    state = torch.get_rng_state()
    Policy(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_the_tokens_are_on_the_device_of_offloaded_weights_mesh():
    model = tiny_model(dtype=torch.float32)
    devices = offload_embedding(model, "meta")
    assert measure_output_map(model, output_head(model)) == OutputMap()
    with pytest.raises(LookupError):
        run_measured_tokens(model)
    assert devices == ["meta", "meta"]

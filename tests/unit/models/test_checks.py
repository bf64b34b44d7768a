import pytest
import torch
from transformers import AttentionInterface

from rlpack.models import attention as attention_module
from rlpack.models.checks import check_isolation
from rlpack.models.errors import IsolationError
from rlpack.models.policy import Policy
from tests.unit.models.tiny import KINDS, VOCABULARY, tiny_model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supported_models_pass(kind: str, dtype: torch.dtype):
    # bfloat16's tolerance is for a model at a usual initialization.
    policy = Policy(tiny_model(kind, dtype=dtype, initializer_range=0.02))
    policy.train()
    check_isolation(policy, "cpu", VOCABULARY)
    assert policy.training


@pytest.mark.parametrize("initializer_range", [0.02, 0.25])
def test_a_model_whose_attention_ignores_segments_is_refused(initializer_range: float):
    def borderless(*states: object, **options: object) -> object:
        options.pop("packed", None)
        return attention_module.attention(*states, **options)

    AttentionInterface.register("borderless", borderless)
    model = tiny_model(implementation="borderless", dtype=torch.float32, initializer_range=initializer_range)
    with pytest.raises(IsolationError, match=r"Qwen2ForCausalLM: .*batching\.mode=dynamic"):
        check_isolation(Policy(model), "cpu", VOCABULARY)


def test_a_leak_into_another_sequence_is_detected_at_any_size(monkeypatch):
    whole = attention_module._attend

    def leaking(query, key, value, rules):
        return whole(query, key, value, rules) + leak[0]

    leak = [torch.tensor(0.0)]
    original = torch.Tensor.split

    def split(self, sizes, dim=0):
        if self.dim() == 4:
            leak[0] = 1e-4 * self.mean()
        return original(self, sizes, dim)

    monkeypatch.setattr(attention_module, "_attend", leaking)
    monkeypatch.setattr(torch.Tensor, "split", split)
    with pytest.raises(IsolationError, match="packed sequence 0 changed by"):
        check_isolation(Policy(tiny_model(dtype=torch.float32)), "cpu", VOCABULARY)


def test_positions_that_do_not_restart_are_detected(monkeypatch):
    policy = Policy(tiny_model(dtype=torch.float32))
    base = policy.model.base_model
    # Rotary attention is relative, so a shift of all positions changes nothing: stretch them with the slot instead.
    base.register_forward_pre_hook(
        lambda module, args, kwargs: (
            args,
            kwargs | {"position_ids": torch.arange(kwargs["input_ids"].shape[1])[None] ** 2 // 16},
        ),
        with_kwargs=True,
    )
    with pytest.raises(IsolationError, match="between packed and alone"):
        check_isolation(policy, "cpu", VOCABULARY)


def test_a_head_with_further_operations_is_detected():
    policy = Policy(tiny_model("gemma2", dtype=torch.float32))
    policy._softcap = None
    with pytest.raises(IsolationError, match="through the model's own head"):
        check_isolation(policy, "cpu", VOCABULARY)


def test_a_model_with_unsupported_attention_is_refused_with_the_reason():
    policy = Policy(tiny_model(dtype=torch.float32))
    policy.model.get_submodule("model.layers.0.self_attn").is_causal = False
    with pytest.raises(IsolationError, match="Qwen2Attention is not causal"):
        check_isolation(policy, "cpu", VOCABULARY)

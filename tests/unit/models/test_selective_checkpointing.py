"""Selective activation checkpointing keeps the outputs of costly operations, and changes no gradient."""

from collections import Counter
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from rlpack.config.schema import Actor, Config
from rlpack.config.sections.value_models import Critic
from rlpack.models import cpu_products
from rlpack.models import selective_checkpointing as module
from rlpack.models.check_gradients import check_gradients
from rlpack.models.cpu_products import use_faster_products
from rlpack.models.errors import ModelError
from rlpack.models.inputs import pack_rows
from rlpack.models.policy import Policy
from rlpack.models.selective_checkpointing import _KeptOutputs
from tests.unit.models.tiny import KINDS, pad_rows, tiny_model, tiny_rows

# More than 64 slots, from which linear layers use oneDNN where it is faster.
ROWS = tiny_rows([30, 1, 47, 22])
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
Kind = Literal["none", "full", "selective"]


class Operations(TorchDispatchMode):
    """Counts the operators that run, by name without overload."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def trained(kind: str, checkpointing: Kind, *, packed: bool = True, fast: bool = False) -> Policy:
    """Return a policy in fp32 with the gradients of a microbatch."""
    name = "rlpack" if packed else "eager" if kind == "gemma2" else "sdpa"
    changes = MOE if "moe" in kind else {}
    policy = Policy(tiny_model(kind, implementation=name, dtype=torch.float32, **changes))
    if fast:
        use_faster_products(policy.model)
    policy.checkpoint_activations(checkpointing)
    policy.train()
    scores = policy(pack_rows(ROWS) if packed else pad_rows(ROWS, width=48), temperature=0.7)
    (scores.logprobs.square().sum() + scores.entropy.sum()).backward()
    return policy


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("packed", [True, False])
def test_gradients_are_those_without_checkpointing_bit_for_bit(kind: str, packed: bool):
    expected = gradients(trained(kind, "none", packed=packed))
    found = gradients(trained(kind, "selective", packed=packed))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.skipif(not cpu_products.is_faster(), reason="needs a CPU where oneDNN is faster than MKL")
def test_gradients_stay_the_same_with_products_by_onednn():
    expected, found = (gradients(trained("qwen2", kind, fast=True)) for kind in ("none", "selective"))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    with Operations() as operations:
        trained("qwen2", "none", fast=True)
    with Operations() as again:
        trained("qwen2", "selective", fast=True)
    assert operations.counts["mkldnn::_linear_pointwise"] == again.counts["mkldnn::_linear_pointwise"] > 0


def test_products_and_attention_run_once_and_the_rest_again():
    counts: dict[str, Counter[str]] = {}
    kinds: tuple[Kind, ...] = ("none", "full", "selective")
    for kind in kinds:
        with Operations() as operations:
            trained("qwen2", kind)
        counts[kind] = operations.counts
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for name in ("aten::mm", "aten::addmm", attention):
        assert counts["selective"][name] == counts["none"][name] < counts["full"][name], name
    assert counts["selective"]["aten::silu"] == counts["full"]["aten::silu"] == counts["none"]["aten::silu"] + 2


class InPlace(nn.Module):
    """Doubles the output of a linear layer in place, as a model's code may."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, states: Tensor) -> Tensor:
        return self.linear(states).mul_(2)


@pytest.mark.parametrize("fast", [False, True])
def test_a_layer_that_changes_a_product_in_place_is_refused_instead_of_trained_wrong(fast: bool):
    policy = Policy(tiny_model("llama", dtype=torch.float32))
    mlp = policy.model.model.layers[1].mlp
    mlp.up_proj = InPlace(mlp.up_proj)
    if fast:
        use_faster_products(policy.model)
    policy.checkpoint_activations("full", "critic")
    check_gradients(policy, ROWS, "cpu", packed=True, role="critic")
    policy.checkpoint_activations("selective", "critic")
    with pytest.raises(ModelError, match=r"in place \(aten::mul_.*set critic\.gradient_checkpointing to full or none"):
        check_gradients(policy, ROWS, "cpu", packed=True, role="critic")


@pytest.mark.skipif(
    not hasattr(SelectiveCheckpointContext(is_recompute=False), "op_output"), reason="needs PyTorch 2.13"
)
def test_a_recomputation_may_write_to_memory_that_a_kept_output_had():
    # PyTorch before 2.13 asks in the recomputation, too, when kept outputs may be freed.
    policy, output = _KeptOutputs("actor.gradient_checkpointing"), torch.ones(2)
    forward, again = (SelectiveCheckpointContext(is_recompute=False, op_output=output) for _ in range(2))
    again.is_recompute = True
    product, sum_in_place = torch.ops.aten.mm.default, torch.ops.aten.add_.Tensor
    assert policy(forward, product) is policy(again, product) is CheckpointPolicy.MUST_SAVE
    with pytest.raises(ModelError, match="in place"):
        policy(forward, sum_in_place, output, 1.0)
    assert policy(again, sum_in_place, output, 1.0) is CheckpointPolicy.PREFER_RECOMPUTE


def test_a_change_in_place_is_found_where_pytorch_decides_before_an_operator_runs(monkeypatch):
    class Before:  # of PyTorch before 2.13: without the operator's output
        def __init__(self, *, is_recompute: bool) -> None:
            self.is_recompute = is_recompute

    class Entry:
        def __init__(self, val: Tensor) -> None:
            self.val = val

    monkeypatch.setattr(module, "SelectiveCheckpointContext", Before)
    policy, output, other = _KeptOutputs("actor.gradient_checkpointing"), torch.zeros(2, 2), torch.zeros(2, 2)
    context: Any = Before(is_recompute=False)
    product, sum_in_place = torch.ops.aten.mm.default, torch.ops.aten.add_.Tensor
    assert policy(context, product) is CheckpointPolicy.MUST_SAVE
    policy.storage = {product: [Entry(output)]}
    assert policy(context, sum_in_place, other, 1.0) is CheckpointPolicy.PREFER_RECOMPUTE
    with pytest.raises(ModelError, match="in place"):
        policy(context, sum_in_place, output.view(4), 1.0)


def test_true_and_false_are_full_and_none():
    config = Config(actor=Actor.model_validate({"gradient_checkpointing": True}))
    assert config.actor.gradient_checkpointing == "full"
    critic = Critic.model_validate({"gradient_checkpointing": False})
    assert (critic.gradient_checkpointing, Critic().gradient_checkpointing) == ("none", None)
    with pytest.raises(ValueError, match="'none', 'full' or 'selective'"):
        Actor.model_validate({"gradient_checkpointing": 1})

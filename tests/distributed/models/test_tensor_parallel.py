"""Ranks that share the weights of each layer compute what transformers' own forward pass computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks.family_configs import tiny_config as family_config
from rlpack.config.sections.optimization import Lora
from rlpack.models import attention
from rlpack.models.adapters import add_adapters
from rlpack.models.context_parallel import RowSplit
from rlpack.models.inputs import pack_rows
from rlpack.models.logprobs import linear_logprobs
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from rlpack.models.tensor_parallel import FAMILIES, split_weights
from rlpack.models.weight_split import VocabularyPart, WeightSplit
from tests.distributed.processes import on_ranks

ROWS = [torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9, 2]), torch.tensor([6, 5, 3, 5, 8, 9, 7])]


def split_model(model: PackedModel, mesh: DeviceMesh, *, sequence_parallel: bool = True) -> None:
    """Split a model over the mesh's dimension tp, and shard it over the other one."""
    model.weight_split = WeightSplit(mesh["tp"], sequence_parallel=sequence_parallel)
    split_weights(model, model.weight_split)
    model.split = RowSplit.of_group(None, mesh["tp"].size())
    shard_model(model, mesh["dp_shard"], small_bytes=0)


def family_model(family: str, name: str, **settings: Any) -> Any:
    """Return a tiny model of a family in fp64, with weights so large that a slip shows."""
    attention.register()
    config = family_config(family)
    for key, value in ({"initializer_range": 0.3} | settings).items():
        setattr(config, key, value)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name).double()
    model.set_experts_implementation("eager")  # the other ones have no fp64
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def gaps(_: DeviceMesh, rank: int, sequence_parallel: bool) -> dict[str, float]:
    """Return the largest relative gap of each family's log-probs and gradients."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    found = {}
    for family in sorted(FAMILIES):
        policy = Policy(family_model(family, attention.NAME))
        split_model(policy, mesh, sequence_parallel=sequence_parallel)
        found[family] = largest_gap(policy, family_model(family, "eager"))
    return found


def largest_gap(policy: Policy, truth: Any) -> float:
    """Return the largest relative gap of log-probs and gradients from those of each row alone."""
    expected = []
    for row in ROWS:
        scores = truth(row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        expected.append(torch.cat([torch.zeros(1), scores.gather(1, row[1:, None])[:, 0]]))
    weights = torch.linspace(-1, 2, sum(len(row) for row in ROWS), dtype=torch.float64)
    (torch.cat(expected) * weights).sum().backward()
    logprobs = policy(pack_rows(ROWS)).logprobs
    (logprobs * weights).sum().backward()
    own = {name: whole(weight.grad) for name, weight in policy.model.named_parameters() if weight.grad is not None}
    others = {name: weight.grad for name, weight in truth.named_parameters() if weight.grad is not None}
    assert own.keys() == others.keys()
    distances = [((own[name] - other).norm() / other.norm()).item() for name, other in others.items()]
    return max((logprobs - torch.cat(expected)).abs().max().item(), *distances)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_family_has_the_log_probs_and_gradients_of_its_own_forward(tmp_path: Path, sequence_parallel: bool):
    for found in on_ranks(tmp_path, 2, gaps, sequence_parallel):
        # Norms compute in fp32, whatever the weights are.
        assert {family: gap for family, gap in found.items() if not gap < 1e-5} == {}
        assert found.keys() == FAMILIES


def with_adapters(model: Any, target: str) -> Any:
    """Return a model with adapters that change its outputs."""
    add_adapters(model, Lora(rank=3, targets=(target,)), seed=0)
    torch.manual_seed(6)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # zero in a new adapter
                weight.copy_(0.3 * torch.randn_like(weight))
    return model


def special_gaps(_: DeviceMesh, rank: int) -> list[float]:
    """Return the gaps of models with biases everywhere, and of models with adapters on linear layers."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    biased, found = {"attention_bias": True, "mlp_bias": True}, []
    for family in ("llama", "deepseek_v3"):
        policy = Policy(family_model(family, attention.NAME, **biased))
        split_model(policy, mesh)
        found.append(largest_gap(policy, family_model(family, "eager", **biased)))
    for family, targets in {"qwen3": "*", "deepseek_v3": "*self_attn*"}.items():
        model, truth = (with_adapters(family_model(family, name), targets) for name in (attention.NAME, "eager"))
        policy = Policy(model)
        split_model(policy, mesh)
        found.append(largest_gap(policy, truth))
    return found


def test_biases_and_adapters_have_the_gradients_of_a_whole_model(tmp_path: Path):
    for found in on_ranks(tmp_path, 2, special_gaps):
        assert max(found) < 1e-5, found


def unused_experts(_: DeviceMesh, rank: int) -> float:
    """Return the gap of a model that routes all tokens to the experts of one rank."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    models = [family_model("qwen3_moe", name) for name in (attention.NAME, "eager")]
    for model in models:
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(to_first_experts)
    policy = Policy(models[0])
    split_model(policy, mesh)
    return largest_gap(policy, models[1])


def to_first_experts(module: Any, arguments: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> Any:
    logits, weights, index = outputs
    return logits, weights, torch.arange(index.shape[1]).expand_as(index)


def test_a_rank_whose_experts_get_no_token_takes_part_in_the_backward_pass(tmp_path: Path):
    for gap in on_ranks(tmp_path, 2, unused_experts):
        assert gap < 1e-5


def parts_of_memory(_: DeviceMesh, rank: int) -> tuple[int, int]:
    """Return the bytes of a rank's weights, and of the whole model's."""
    policy = Policy(family_model("qwen3", attention.NAME))
    size = sum(weight.nbytes for weight in policy.parameters())
    split_model(policy, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp")))
    local = [weight.to_local() for weight in policy.parameters() if isinstance(weight, DTensor)]
    return sum(part.nbytes for part in local), size


def test_a_rank_holds_a_quarter_of_the_matrices(tmp_path: Path):
    for own, size in on_ranks(tmp_path, 4, parts_of_memory):
        assert 0.25 * size <= own < 0.3 * size  # norms are not split over tp


def head_gaps(mesh: DeviceMesh, rank: int, vocab_size: int, softcap: float | None) -> list[float]:
    """Return how far log-probs, entropies and gradients are from those of a softmax over the whole vocabulary."""
    generator = torch.Generator().manual_seed(vocab_size)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((6, 5), (vocab_size, 5), (vocab_size,))
    )
    labels = torch.randint(vocab_size, (6,), generator=generator)
    by_logprob, by_entropy = torch.randn(2, 6, generator=generator, dtype=torch.float64)

    def loss(logprobs: Tensor, entropies: Tensor) -> Tensor:
        return (by_logprob * logprobs + by_entropy * entropies).sum()

    truth = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = truth[0] @ truth[1].t() + truth[2]
    scores = ((softcap * torch.tanh(logits / softcap) if softcap else logits) / 0.7).log_softmax(-1)
    expected = scores.gather(1, labels[:, None])[:, 0], -(scores.exp() * scores).sum(-1)
    loss(*expected).backward()
    most = -(-vocab_size // mesh.size())
    rows = slice(min(rank * most, vocab_size), min((rank + 1) * most, vocab_size))
    own = [tensor.clone().requires_grad_() for tensor in (hidden, weight[rows], bias[rows])]
    part = VocabularyPart(mesh.get_group(), rows.start, most)
    found = linear_logprobs(own[0], own[1], labels, temperature=0.7, chunk=4, softcap=softcap, bias=own[2], part=part)
    loss(*found).backward()
    grads = [tensor.grad for tensor in own]
    torch.distributed.all_reduce(grads[0])
    others = truth[0].grad, truth[1].grad[rows], truth[2].grad[rows]
    pairs = [*zip(found, expected, strict=True), *zip(grads, others, strict=True)]
    return [(one - other).abs().max().item() if one.numel() else 0.0 for one, other in pairs]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("vocab_size", [12, 10, 4])  # equal parts, a smaller one, an empty one
def test_a_divided_vocabulary_has_the_log_probs_and_gradients_of_a_whole_one(
    tmp_path: Path, vocab_size: int, softcap: float | None
):
    for found in on_ranks(tmp_path, 3, head_gaps, vocab_size, softcap):
        assert max(found) < 1e-12

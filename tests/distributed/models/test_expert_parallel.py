"""Expert parallelism gives the log-probs and gradients of a whole model, whichever ranks the experts are on."""

import functools
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rlpack.config.sections.optimization import Lora
from rlpack.distributed.layout import ParallelLayout
from rlpack.models import attention
from rlpack.models.adapters import add_adapters
from rlpack.models.check_outputs import score_alone, score_together
from rlpack.models.expert_parallel import ExpertSplit, expert_modules, split_experts
from rlpack.models.inputs import pack_rows
from rlpack.models.parallel import shard_model
from rlpack.models.parts import part_offsets
from rlpack.models.policy import Policy
from tests.distributed.models.test_tensor_parallel import family_model, to_first_experts, whole
from tests.distributed.processes import on_ranks

# Of each way to route and to stack experts: with and without shared experts, dense layers and groups of experts.
FAMILIES = ("qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3", "glm4_moe", "granitemoe", "olmoe", "minimax_m2")
# Row i belongs to rank i.
ROWS = [torch.tensor(row) for row in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2])]
SPLIT = ROWS[:2]


def split_model(policy: Policy, layout: ParallelLayout, **options: Any) -> None:
    """Divide a model's experts by a layout without tensor parallelism, and shard it."""
    mesh, expert_mesh = layout.weight_mesh("cpu"), layout.expert_mesh("cpu")
    policy.expert_split = ExpertSplit(expert_mesh)
    split_experts(policy, policy.expert_split)
    names = tuple(name for name in expert_mesh.mesh_dim_names or () if name != "ep")
    shard_model(policy, mesh, expert_mesh=expert_mesh[names], **{"small_bytes": 0, **options})


def layout_of(ranks: int, ep: int) -> ParallelLayout:
    return ParallelLayout(dp_shard=ranks, ep=ep)


@functools.cache
def weights_of(row: int) -> Tensor:
    """Return the weights of a row's log-probs in the loss."""
    return torch.randn(len(ROWS[row]), generator=torch.Generator().manual_seed(row), dtype=torch.float64)


def backward(policy: Policy, rank: int) -> Tensor:
    """Return the log-probs of a rank's row, after the backward pass of its part of the loss."""
    logprobs = policy(pack_rows([ROWS[rank]])).logprobs
    (logprobs * weights_of(rank)).sum().backward()
    return logprobs.detach()


def largest_gap(policy: Policy, truth: Any, rank: int, ranks: int) -> float:
    """Return the largest relative gap of log-probs and gradients from those of a whole model, row by row."""
    expected, total = [], torch.zeros((), dtype=torch.float64)
    for place, row in enumerate(ROWS[:ranks]):
        scores = truth(row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        expected.append(torch.cat([torch.zeros(1), scores.gather(1, row[1:, None])[:, 0]]))
        total = total + (expected[-1] * weights_of(place)).sum()
    total.backward()
    logprobs = backward(policy, rank)
    own = {name: whole(weight.grad) for name, weight in policy.model.named_parameters() if weight.grad is not None}
    others = {name: weight.grad for name, weight in truth.named_parameters() if weight.grad is not None}
    assert own.keys() == others.keys()
    distances = [((own[name] - other).norm() / max(other.norm(), 1e-9)).item() for name, other in others.items()]
    return max((logprobs - expected[rank]).abs().max().item(), *distances)


def gaps(_: Any, rank: int) -> dict[str, float]:
    """Return each family's largest gap on four ranks, two of which have the same experts."""
    found = {}
    for family in FAMILIES:
        policy = Policy(family_model(family, attention.NAME))
        assert list(expert_modules(policy))
        split_model(policy, layout_of(4, ep=2))
        found[family] = largest_gap(policy, family_model(family, "eager"), rank, 4)
    return found


def test_every_family_has_the_log_probs_and_gradients_of_its_own_forward(tmp_path: Path):
    for found in on_ranks(tmp_path, 4, gaps):
        # Norms compute in fp32, whatever the weights are.
        assert {family: gap for family, gap in found.items() if not gap < 1e-5} == {}


def unused_experts(_: Any, rank: int) -> list[float]:
    """Return gaps of a model that routes all tokens to one rank's experts: trained whole, and in parts."""
    found = []
    for frozen, kind in (("", "none"), ("", "full"), ("", "selective"), ("embed_tokens", "none"), ("mlp.", "full")):
        models = [family_model("qwen3_moe", name) for name in (attention.NAME, "eager")]
        for model in models:
            for name, module in model.named_modules():
                if name.endswith("mlp.gate"):
                    module.register_forward_hook(to_first_experts)
            for name, weight in model.named_parameters():
                weight.requires_grad_(not frozen or frozen not in name)
        policy = Policy(models[0])
        policy.checkpoint_activations(kind)  # pyright: ignore[reportArgumentType]
        policy.train()
        split_model(policy, layout_of(2, ep=2))
        found.append(largest_gap(policy, models[1], rank, 2))
    return found


def test_a_rank_whose_experts_get_no_token_takes_part_in_the_backward_pass(tmp_path: Path):
    for found in on_ranks(tmp_path, 2, unused_experts):
        assert max(found) < 1e-5


def only_experts(_: Any, rank: int) -> list[float]:
    """Return gaps of models that train experts alone, or adapters of attention alone."""
    found = []
    models = [family_model("mixtral", name) for name in (attention.NAME, "eager")]
    for model in models:
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(to_first_experts)
        for name, weight in model.named_parameters():
            weight.requires_grad_("layers.0.mlp.experts" in name)
    policy = Policy(models[0])
    split_model(policy, layout_of(2, ep=2))
    found.append(largest_gap(policy, models[1], rank, 2))
    models = [family_model("mixtral", name) for name in (attention.NAME, "eager")]
    for model in models:
        add_adapters(model, Lora(rank=3, targets=("*.[qo]_proj",)), seed=0)
        torch.manual_seed(6)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:  # zero in a new adapter
                    weight.copy_(0.3 * torch.randn_like(weight))
    policy = Policy(models[0])
    split_model(policy, layout_of(2, ep=2))
    return [*found, largest_gap(policy, models[1], rank, 2)]


def test_models_of_which_only_experts_or_only_adapters_are_trained_have_the_same_gradients(tmp_path: Path):
    for found in on_ranks(tmp_path, 2, only_experts):
        assert max(found) < 1e-5


def exchanges(_: Any, rank: int, kind: Literal["none", "full", "selective"]) -> tuple[int, float]:
    """Return the number of exchanges of a forward and a backward pass, and the gap."""
    policy = Policy(family_model("qwen3_moe", attention.NAME))
    policy.checkpoint_activations(kind)
    policy.train()
    split_model(policy, layout_of(2, ep=2))
    exchange, count = dist.all_to_all_single, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return exchange(*arguments, **options)

    with patch.object(dist, "all_to_all_single", counted):
        gap = largest_gap(policy, family_model("qwen3_moe", "eager"), rank, 2)
    return count, gap


# Of two layers; counts, tokens and outputs forward, then the gradients of tokens and outputs.
@pytest.mark.parametrize(("kind", "number"), [("none", 2 * 5), ("full", 2 * 8), ("selective", 2 * 5)])
def test_only_full_checkpointing_exchanges_again(
    tmp_path: Path, kind: Literal["none", "full", "selective"], number: int
):
    for count, gap in on_ranks(tmp_path, 2, exchanges, kind):
        assert count == number
        assert gap < 1e-5


def parts(_: Any, rank: int) -> tuple[list[float], bool]:
    """Return this rank's share of each expert weight, and whether every part is one block with whole experts."""
    policy = Policy(family_model("qwen3_moe", attention.NAME))
    split_model(policy, layout_of(4, ep=2))
    named = [(name, weight) for name, weight in policy.named_parameters() if ".experts." in name]
    blocks = all(
        isinstance(weight, DTensor) and weight.placements == (Shard(1), Shard(0)) and part_offsets(weight) is not None
        for _, weight in named
    )
    return [whole.to_local().numel() / whole.numel() for _, whole in named if isinstance(whole, DTensor)], blocks


def test_a_rank_holds_a_block_of_a_quarter_of_the_experts(tmp_path: Path):
    for shares, blocks in on_ranks(tmp_path, 4, parts):
        assert set(shares) == {0.25}
        assert blocks


def routing_dtypes(_: Any, rank: int) -> tuple[set[torch.dtype], float]:
    """Return the dtypes of the router's weights in bf16, and the gap of the log-probs to a model without `ep`."""
    found: list[torch.dtype] = []
    models = [Policy(family_model("mixtral", attention.NAME).float()) for _ in range(2)]
    layout = layout_of(2, ep=2)
    split_model(models[0], layout, precision="bf16")
    shard_model(models[1], layout.weight_mesh("cpu"), precision="bf16", small_bytes=0)
    for _, module in expert_modules(models[0]):
        module.register_forward_pre_hook(lambda module, arguments: found.append(arguments[2].dtype))
    with torch.no_grad():
        one, other = (model(pack_rows([ROWS[rank]])).logprobs for model in models)
    return set(found), (one - other).abs().max().item()


def test_the_weights_of_a_router_in_fp32_are_not_rounded_to_bf16(tmp_path: Path):
    for dtypes, gap in on_ranks(tmp_path, 2, routing_dtypes):
        assert dtypes == {torch.float32}
        assert gap < 0.15


def unlike_outputs(_: Any, rank: int) -> list[list[float]]:
    """Return what checks compare, of a model whose outputs differ between ranks."""
    policy = Policy(family_model("qwen3_moe", attention.NAME))
    policy.model.model.norm.register_forward_hook(lambda module, arguments, states: states * (1 + 1e-3 * rank))
    split_model(policy, layout_of(2, ep=2))
    with torch.no_grad():
        scores = score_together(policy, SPLIT, "cpu", packed=True) + score_alone(policy, SPLIT, "cpu")
    return [score.tolist() for score in scores]


def test_ranks_whose_outputs_round_differently_compare_the_same_ones(tmp_path: Path):
    first, second = on_ranks(tmp_path, 2, unlike_outputs)
    assert first == second

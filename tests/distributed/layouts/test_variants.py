"""Adapters, and sizes that ranks don't divide evenly, against transformers' own forward pass of each row in float64.

Engines get weights into which adapters are merged, whatever the layout.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlpack.config.schema import Actor
from rlpack.config.sections.optimization import Lora
from rlpack.config.sections.parallelism import Parallel
from rlpack.distributed.layout import ParallelLayout
from rlpack.models.adapters import add_adapters
from rlpack.models.inputs import pack_rows
from rlpack.models.parallel import set_gradient_sync, shard_model
from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream
from rlpack.worker import RankContext
from rlpack.workers import build
from tests.builders import tiny_config
from tests.distributed.layouts.cases import RUNS_ALL
from tests.distributed.processes import on_ranks
from tests.unit.models.tiny import VOCABULARY, reference_scores, tiny_model, tiny_rows

ROWS = tiny_rows([9, 3, 13, 6, 2, 5])
ADAPTERS = Lora(rank=3, alpha=6.0)
SCALE = ADAPTERS.alpha / ADAPTERS.rank
# Of 53 tokens and 45 channels, two ranks of tp get 27 and 26, and 23 and 22.
KIND = "qwen3"
SHAPE: dict[str, Any] = {"intermediate_size": 45}
# Ranks, and the keys of `actor.parallel`.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2sp": (2, {"tp": 2}),
}
if RUNS_ALL:
    LAYOUTS |= {"tp2": (2, {"tp": 2, "sp": False}), "cp2": (2, {"cp": 2}), "dp2tp2": (4, {"tp": 2})}
# For engines that get weights with merged adapters: ranks, keys of `actor.parallel`, and the model.
STREAMED: dict[str, tuple[int, dict[str, Any], str]] = {
    "tp2": (2, {"tp": 2}, "qwen3"),
    "ep2": (2, {"ep": 2}, "qwen3_moe"),
}
if RUNS_ALL:
    STREAMED |= {
        "dp2tp2": (4, {"tp": 2}, "llama"),
        "cp2ep2": (2, {"cp": 2, "ep": 2}, "mixtral"),
        "ep2tp2": (4, {"tp": 2, "ep": 2}, "qwen3_moe"),
    }
# Log-probs of rows, and gradients of weights.
Found = tuple[dict[int, np.ndarray], dict[str, np.ndarray]]


def model_of(kind: str, implementation: str = "rlpack", *, adapters: bool) -> PreTrainedModel:
    """Return the model; adapters get values of B other than zeros, without which A would have no gradient."""
    model = tiny_model(kind, implementation=implementation, **SHAPE)
    if adapters:
        add_adapters(model, ADAPTERS, seed=3)
        generator = torch.Generator().manual_seed(5)
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.data.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return model


def weights_of(row: int) -> Tensor:
    """Return the weight of each token's log-prob in the loss."""
    return torch.randn(ROWS[row].shape, generator=torch.Generator().manual_seed(row), dtype=torch.float64)


def divided(
    rank: int, num_ranks: int, sizes: dict[str, Any], kind: str, *, adapters: bool
) -> tuple[Policy, RankContext]:
    """Return the model, divided among the ranks."""
    whole = {"dp_shard": num_ranks // (sizes.get("tp", 1) * sizes.get("cp", 1))}
    ranks = ParallelLayout(**whole, **{name: size for name, size in sizes.items() if name != "sp"})
    config, context = tiny_config(actor=Actor(parallel=Parallel(**sizes))), RankContext("main", rank, ranks)
    policy = Policy(model_of(kind, adapters=adapters), chunk=7)
    build.shard_model = partial(shard_model, small_bytes=0)
    build.divide_weights(policy, config, "actor", context, "fp32")
    build.share_rows(policy, config, "actor", context)
    return policy, context


def on_layout(mesh: DeviceMesh, rank: int, layout: str, kind: str, adapters: bool) -> Found:
    """Return the log-probs of this rank's rows and the gradients of all."""
    policy, context = divided(rank, *LAYOUTS[layout], kind, adapters=adapters)
    policy.train()
    set_gradient_sync(policy, last=True)
    own = list(range(len(ROWS)))[context.dp_rank :: context.layout.dp_size]
    logprobs = policy(pack_rows([ROWS[row] for row in own])).logprobs
    (logprobs * torch.cat([weights_of(row) for row in own])).sum().backward()
    parts = logprobs.detach().split([len(ROWS[row]) for row in own])
    gradients = {
        name: (weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad).numpy().copy()
        for name, weight in policy.model.named_parameters()
        if weight.grad is not None
    }
    return {row: part.numpy().copy() for row, part in zip(own, parts, strict=True)}, gradients


def merged(kind: str, adapters: bool) -> tuple[PreTrainedModel, dict[str, Tensor], dict[str, Tensor]]:
    """Return a model without adapters, whose weights are W + s·B·A, and A and B by the names of their layers."""
    trained = dict(model_of(kind, adapters=adapters).named_parameters())
    model = tiny_model(kind, implementation="eager", **SHAPE)
    layers = [name.removesuffix(".base_layer.weight") for name in trained if name.endswith(".base_layer.weight")]
    down, up = ({name: trained[f"{name}.lora_{part}.default.weight"].data for name in layers} for part in "AB")
    for name in layers:
        model.get_parameter(f"{name}.weight").data += SCALE * up[name] @ down[name]
    return model, down, up


def by_transformers(kind: str, adapters: bool) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Return log-probs and gradients of `merged`; those of adapters follow from those of W."""
    model, down, up = merged(kind, adapters)
    scores = {row: reference_scores(model, tokens)[0] for row, tokens in enumerate(ROWS)}
    torch.stack([(scores[row] * weights_of(row)).sum() for row in scores]).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    if adapters:
        whole = {name: gradients[f"{name}.weight"] for name in down}
        gradients = {f"{name}.lora_A.default.weight": SCALE * up[name].T @ whole[name] for name in down}
        gradients |= {f"{name}.lora_B.default.weight": SCALE * whole[name] @ down[name].T for name in down}
    return {row: score.detach() for row, score in scores.items()}, gradients


def with_and_without_adapters(mesh: DeviceMesh, rank: int, layout: str, kind: str) -> list[Found]:
    return [on_layout(mesh, rank, layout, kind, adapters) for adapters in (False, True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_and_gradients_are_those_of_transformers(layout: str, tmp_path: Path):
    assert VOCABULARY % 2 == SHAPE["intermediate_size"] % 2 == 1
    found = on_ranks(tmp_path, LAYOUTS[layout][0], with_and_without_adapters, layout, KIND)
    for adapters, of_ranks in enumerate(zip(*found, strict=True)):
        scores, expected = by_transformers(KIND, bool(adapters))
        assert {row for logprobs, _ in of_ranks for row in logprobs} == set(scores)
        for logprobs, gradients in of_ranks:
            assert all(np.abs(part - scores[row].numpy()).max() < 1e-6 for row, part in logprobs.items())
            assert gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                assert np.linalg.norm(gradients[name] - gradient.numpy()) <= 1e-6 * gradient.norm().item(), name


def streamed(mesh: DeviceMesh, rank: int, num_ranks: int, sizes: dict[str, Any], kind: str) -> dict[str, np.ndarray]:
    """Return the weights that engines get, which this rank gathers with the others."""
    policy, _ = divided(rank, num_ranks, sizes, kind, adapters=True)
    return {name: weight.numpy().copy() for bucket in WeightStream(policy) for name, weight in bucket.items()}


@pytest.mark.parametrize("layout", STREAMED)
def test_engines_get_weights_with_merged_adapters(layout: str, tmp_path: Path):
    num_ranks, sizes, kind = STREAMED[layout]
    model, down, _ = merged(kind, adapters=True)
    expected, plain = model.state_dict(), tiny_model(kind, implementation="eager", **SHAPE).state_dict()
    for found in on_ranks(tmp_path, num_ranks, streamed, num_ranks, sizes, kind):
        assert found.keys() >= dict(model.named_parameters()).keys()
        for name, weight in found.items():
            truth = expected[name].numpy()
            assert np.abs(weight - truth).max() <= 1e-6 * np.abs(truth).max(), name
        for name in down:  # negative control: the adapters matter
            assert np.abs(found[f"{name}.weight"] - plain[f"{name}.weight"].numpy()).max() > 1e-2, name

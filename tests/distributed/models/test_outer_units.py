"""Embedding and output layer are units of their own, where no other module has their weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from rlpack.config.sections.optimization import Optimizer
from rlpack.models import attention
from rlpack.models.fake_ranks import call_on_fake_rank
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.memory_simulation import ModelMemory, SimulatedMicrobatch, simulate_update
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from tests.distributed.models.ranks import MICROBATCHES, Step, optimizer_step
from tests.distributed.processes import on_ranks
from tests.unit.models.tiny import tiny_model

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
VOCABULARY = 20_000
FROZEN = ("", f"{EMBEDDING}.weight", f"{HEAD}.weight")


def untied_policy(frozen: str) -> Policy:
    policy = Policy(tiny_model("qwen3", tie_word_embeddings=False), chunk=7)
    for name, weight in policy.model.named_parameters():
        weight.requires_grad_(name != frozen)
    policy.train()
    return policy


def step(mesh: DeviceMesh, rank: int, frozen: str, reshard: bool) -> tuple[list[str], Step]:
    """Return the names of the units, and a step with several microbatches, one of them a dummy."""
    policy = untied_policy(frozen)
    shard_model(policy, mesh, reshard_after_forward=reshard, small_bytes=0)
    return units(policy), optimizer_step(policy, MICROBATCHES[rank])


def units(policy: PackedModel) -> list[str]:
    return [name for name, module in policy.model.named_modules() if isinstance(module, FSDPModule)]


@pytest.mark.parametrize(("frozen", "reshard"), [*((name, True) for name in FROZEN), ("", False)])
def test_units_of_their_own_take_the_step_of_one_process(tmp_path: Path, frozen: str, reshard: bool):
    expected = optimizer_step(untied_policy(frozen), [rows for rank in MICROBATCHES for rows in rank])
    for names, found in on_ranks(tmp_path, 2, step, frozen, reshard):
        assert {EMBEDDING, HEAD} <= set(names)
        assert found.gradients.keys() == expected.gradients.keys()
        assert frozen not in found.gradients
        for name, gradient in expected.gradients.items():
            assert (found.gradients[name] - gradient).norm() <= 1e-10 * gradient.norm(), name
        # The weights that the optimizer changed are those that the next forward uses.
        assert torch.allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-10)


def simulated(kind: type[PackedModel], tied: bool) -> tuple[list[str], ModelMemory]:
    """Return the units of a model with a large vocabulary on the first of four ranks, and the memory of a step."""

    def run() -> tuple[list[str], ModelMemory]:
        attention.register()
        with torch.device("meta"):
            lm = tiny_model("qwen3", dtype=torch.float32, vocab_size=VOCABULARY, tie_word_embeddings=tied)
        model: Any = kind(lm if kind is Policy else language_model(lm))
        shard_model(model, init_device_mesh("cpu", (4,)), small_bytes=0)
        names = units(model)
        row, settings = SimulatedMicrobatch(slots=16, longest=16), Optimizer()
        update = simulate_update(model, row, settings, several=False, entropy=False, device="cpu")
        return names, update.memory(settings, "none")

    return call_on_fake_rank(0, 4, run)


def test_embedding_and_output_layer_are_not_gathered_at_one_time():
    names, memory = simulated(Policy, tied=False)
    weight = 4 * VOCABULARY * 32
    assert {EMBEDDING, HEAD} <= set(names)
    # A gathered weight is copied once; in the root's unit both would be gathered and copied, 4 weights.
    assert memory.most["gathered"] < 2.2 * weight
    # This rank's quarters of both weights; gradients: a quarter of one, and the other whole in two copies. Logits are
    # those of 16 tokens.
    assert memory.peak - memory.optimizer < (2 / 4 + 1 / 4 + 2) * weight + 2 * 16 * 4 * VOCABULARY


def test_a_tied_weight_stays_in_the_unit_of_the_root():
    names, _ = simulated(Policy, tied=True)
    assert not {EMBEDDING, HEAD} & set(names)
    assert any("layers.0" in name for name in names)


def test_a_critic_has_a_unit_for_its_embedding_alone():
    names, _ = simulated(ScalarHeadModel, tied=True)
    assert "embed_tokens" in names
    assert not any("head" in name for name in names)

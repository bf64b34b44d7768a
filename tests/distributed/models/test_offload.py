"""Optimizer state and parameters in host memory, through every path that reads or writes them.

On CPUs both are in host memory anyway; the code that runs is that of GPUs.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.sections.compute import Offload
from rlpack.distributed.context import RankContext
from rlpack.models.offloaded_adamw import OffloadedAdamW
from rlpack.models.parallel import shard_model
from rlpack.workers import build
from rlpack.workers.actor import ActorWorker
from tests.builders import exported_weights, tiny_tokenizer
from tests.distributed.actors import policy_loss
from tests.distributed.layouts.cases import LAYOUTS, config_of, in_mode, layout_of
from tests.distributed.layouts.ranks import _state, _step
from tests.distributed.layouts.truth import batch_with_values
from tests.distributed.processes import on_ranks

State = dict[str, np.ndarray]
# Layouts, and the family of the model of each.
FAMILIES = {"dp2": "llama", "hsdp2x2": "llama", "ep2": "qwen3_moe"}


def actor_of(rank: int, layout: str, offload: Offload, *, seed: int = 0) -> tuple[ActorWorker, Any, RankContext]:
    """Return an actor, sharded layer by layer, whose gradients are clipped."""
    build.shard_model = partial(shard_model, small_bytes=0)
    config = in_mode(config_of(FAMILIES[layout], layout=layout), "packed")
    optimizer = config.actor.optimizer.model_copy(update={"max_grad_norm": 0.01})
    actor = config.actor.model_copy(update={"offload": offload, "optimizer": optimizer})
    config = config.model_copy(update={"actor": actor, "seed": config.seed + seed})
    context = RankContext("main", rank, layout_of(layout))
    return ActorWorker.from_settings(context, config, tiny_tokenizer()), config, context


def trained(mesh: Any, rank: int, layout: str, offload: Offload, batch: BatchedDataDict, folder: Path) -> list[State]:
    """Take two steps, save both at once and in the background, export; return state and streamed weights."""
    actor, config, context = actor_of(rank, layout, offload)
    assert isinstance(actor._stepper._optimizer, OffloadedAdamW) == (offload == "optimizer")
    for _ in range(2):
        _step(actor.train_step, context, config, batch, policy_loss(config))
    actor.save(str(folder / f"{offload}-now"))
    actor.start_save(str(folder / f"{offload}-later"), 30)
    actor._stepper.saver.wait(30)
    actor.export_model(str(folder / f"{offload}-model"))
    return [_state(actor), {name: weight.numpy().copy() for name, weight in exported_weights(actor).items()}]


def loaded(mesh: Any, rank: int, layout: str, offload: Offload, folder: Path) -> State:
    """Return the state of another actor after loading."""
    actor, _, _ = actor_of(rank, layout, offload, seed=1)
    actor.load(str(folder))
    return _state(actor)


@pytest.mark.parametrize("layout", ["dp2", "ep2", pytest.param("hsdp2x2", marks=pytest.mark.long)])
def test_training_saving_and_exporting_are_the_same_with_every_offload(layout: str, tmp_path: Path):
    batch, size = batch_with_values(FAMILIES[layout]), LAYOUTS[layout][0]
    states: dict[Offload, State] = {}
    kinds: tuple[Offload, ...] = ("none", "optimizer", "parameters")
    for kind in kinds:
        found = on_ranks(tmp_path, size, trained, layout, kind, batch, tmp_path)
        states[kind] = found[0][0]
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"{kind}-model", dtype=torch.float32)
        stream = {name: value for _, part in found for name, value in part.items()}
        for name, weight in exported.named_parameters():
            assert np.array_equal(weight.detach().numpy(), states[kind][f"model.{name}"]), (kind, name)
            assert np.array_equal(weight.detach().numpy(), stream[name]), (kind, name)
    for name, value in states["none"].items():
        assert np.array_equal(states["optimizer"][name], value), name
        # The fused kernel of the CPU rounds in another way.
        assert np.allclose(states["parameters"][name], value, rtol=1e-4, atol=1e-7), name
    pairs: tuple[tuple[Offload, Offload, str], ...] = (
        ("none", "optimizer", "now"),
        ("optimizer", "parameters", "later"),
        ("parameters", "optimizer", "now"),
        ("optimizer", "none", "later"),
    )
    for before, after, when in pairs:
        state = on_ranks(tmp_path, size, loaded, layout, after, tmp_path / f"{before}-{when}")[0]
        assert state.keys() == states[before].keys()
        for name, value in states[before].items():
            assert np.array_equal(state[name], value), (before, after, name)

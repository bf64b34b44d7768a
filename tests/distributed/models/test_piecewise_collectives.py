"""Weights gathered and gradients summed in pieces are the same, and gloo copies no more than a piece."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from rlpack.models.context_parallel import RowSplit
from rlpack.models.parallel import shard_model
from rlpack.models.piecewise_collectives import _PIECE_BYTES, _AllGather, _ReduceScatter, use_pieces
from rlpack.models.policy import Policy
from rlpack.models.tensor_parallel import split_weights
from rlpack.models.weight_split import WeightSplit
from tests.distributed.models.ranks import MICROBATCHES, Step, optimizer_step
from tests.distributed.processes import on_ranks
from tests.memory_rise import MIB, MemoryRise
from tests.unit.models.tiny import tiny_model

# Ranks, shape of the mesh and options of `shard_model`.
WAYS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "plain": (2, {"dp_shard": 2}, {}),
    "kept": (2, {"dp_shard": 2}, {"reshard_after_forward": False}),
    "bf16": (2, {"dp_shard": 2}, {"precision": "bf16"}),
    "offload": (2, {"dp_shard": 2}, {"offload": "parameters"}),
    "three parts": (3, {"dp_shard": 3}, {}),
    "replicas": (4, {"dp_replicate": 2, "dp_shard": 2}, {}),
    "tensor parallel": (4, {"dp_shard": 2, "tp": 2}, {}),
}


def steps(_: DeviceMesh, rank: int, way: str) -> list[Step]:
    """Return a step with the stock collectives, and one in pieces."""
    size, shape, options = WAYS[way]
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    results = []
    for in_pieces in (False, True):
        policy = Policy(tiny_model("qwen3", dtype=torch.float32), chunk=7)
        if "tp" in shape:
            policy.weight_split = WeightSplit(mesh["tp"])
            split_weights(policy, policy.weight_split)
            policy.split = RowSplit.of_group(None, mesh["tp"].size())
        with mock.patch("rlpack.models.parallel.use_pieces"):
            shard_model(policy, mesh["dp_shard"] if "tp" in shape else mesh, small_bytes=0, **options)
        for module in policy.modules():
            if in_pieces and isinstance(module, FSDPModule):
                use_pieces(module, piece_bytes=2008)  # 502 numbers of all ranks, which divide no weight
        policy.train()
        results.append(optimizer_step(policy, MICROBATCHES[rank * 2 // size]))
    return results


@pytest.mark.parametrize("way", WAYS)
def test_a_step_in_pieces_has_the_result_of_the_stock_collectives(way: str, tmp_path: Path):
    # The order in which gloo adds three numbers depends on their place in a message.
    tolerances = {"rtol": 1e-5, "atol": 1e-7} if way == "three parts" else {"rtol": 0, "atol": 0}
    for stock, pieces in on_ranks(tmp_path, WAYS[way][0], steps, way):
        assert stock.gradients.keys() == pieces.gradients.keys()
        for name, gradient in stock.gradients.items():
            assert gradient.abs().max() > 0 or name.endswith("k_proj.bias"), name
            torch.testing.assert_close(pieces.gradients[name], gradient, **tolerances, msg=name)
        torch.testing.assert_close(pieces.logprobs, stock.logprobs, **tolerances)


def peaks(mesh: DeviceMesh, rank: int) -> list[float]:
    """Return how many MiB the process grows while it gathers 96 MiB, while it sums as much, and in all."""
    memory = MemoryRise()
    before = memory.current_bytes()
    whole, part = torch.ones(24 * MIB), torch.ones(12 * MIB)
    memory.start()
    _AllGather(_PIECE_BYTES)(whole, part, mesh.get_group())
    gathering = memory.num_bytes
    memory.start()
    _ReduceScatter(_PIECE_BYTES)(part, whole, mesh.get_group(), dist.ReduceOp.SUM)
    return [num_bytes / MIB for num_bytes in (gathering, memory.num_bytes, memory.current_bytes() - before)]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of a process on Linux")
def test_gloo_copies_no_more_than_pieces(tmp_path: Path):
    for gathering, summing, left in on_ranks(tmp_path, 2, peaks):
        assert gathering < 16  # in one piece, 97
        assert summing < 24  # in one piece, 98
        assert left < 80  # the sum itself takes 48; with its input, which FSDP2 would keep, 148

"""Gathered weights are whole, in one collective or in pieces, and large ones take no further copies."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from rlpack.models import gather_weights as gathering
from rlpack.models.gather_weights import gather_weights
from tests.distributed.processes import on_ranks
from tests.memory_rise import MIB, MemoryRise

# As by FSDP, with replicas, over tensor parallelism of rows and columns, of experts, and whole ones.
PLACEMENTS: list[tuple[Placement, Placement]] = [
    (Replicate(), Shard(0)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
]
SHAPES = [(8, 12), (7, 5), (1, 6), (5, 4, 6), (13,), (2, 3)]


def gathered(mesh: DeviceMesh, rank: int) -> list[str]:
    """Return the weights that differ from what was sharded, for pieces of several sizes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    wrong = []
    for most in (4, 64, 1024):
        weights: list[Tensor] = []
        truths: list[Tensor] = []
        for shape in SHAPES:
            for placements in PLACEMENTS:
                if any(isinstance(each, Shard) and each.dim >= len(shape) for each in placements):
                    continue
                truths.append(torch.randn(shape, generator=torch.Generator().manual_seed(len(truths))))
                weights.append(distribute_tensor(truths[-1], mesh, placements, src_data_rank=None))
        with patch.object(gathering, "_PIECE_BYTES", most):
            for weight, whole, truth in zip(weights, gather_weights(weights), truths, strict=True):
                if not torch.equal(whole, truth):
                    wrong.append(f"{weight} {most}")
    return wrong


def test_weights_cut_along_any_axes_are_whole_for_pieces_of_any_size(tmp_path: Path):
    assert on_ranks(tmp_path, 4, gathered) == [[]] * 4


def summands(mesh: DeviceMesh, rank: int) -> bool:
    """Return whether a weight whose ranks hold summands is their sum, though it is no block of the whole."""
    part = torch.full((4, 4), float(rank + 1))
    weight = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    with patch.object(gathering, "_PIECE_BYTES", 4):
        (whole,) = gather_weights([weight])
    return torch.equal(whole, torch.full((4, 4), 3.0))


def test_summands_of_a_large_weight_are_added(tmp_path: Path):
    assert on_ranks(tmp_path, 2, summands) == [True, True]


def gathering_memory(mesh: DeviceMesh, rank: int, placements: tuple[Placement, Placement]) -> float:
    """Return how far memory rises while a weight of 256 MiB is gathered, in MiB."""
    memory = MemoryRise()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    weight, small = (
        distribute_tensor(torch.ones(32_768 // scale, 2048), mesh, placements, src_data_rank=None) for scale in (1, 64)
    )
    list(gather_weights([small]))
    memory.start()
    (whole,) = gather_weights([weight])
    assert whole.nbytes == 256 * MIB
    return memory.num_bytes / MIB


@pytest.mark.parametrize("placements", [PLACEMENTS[1], (Shard(0), Replicate())])
def test_a_large_weight_takes_its_own_memory_and_a_few_pieces(tmp_path: Path, placements: tuple[Placement, Placement]):
    for rise in on_ranks(tmp_path, 4, gathering_memory, placements):
        assert rise < 256 + 32  # with torch's own gathers it is 640

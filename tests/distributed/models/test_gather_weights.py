from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rlpack.models import gather_weights as module
from rlpack.models.gather_weights import gather_weights
from tests.distributed.processes import on_ranks

# Rows that divide by the ranks, that don't, fewer than ranks, none; a large weight; another dtype.
SHAPES = [(8, 3), (7, 2), (1, 5), (0, 4), (5,), (640, 128), (6, 2, 2)]


def originals() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [*weights, weights[0].double()]


def gather(mesh: Any, rank: int, replicas: int, axis: int, max_bytes: int) -> list[Tensor]:
    """Cut weights along an axis over the ranks of a replica, gather them, and mix in some that are whole."""
    module._MAX_BYTES = max_bytes
    cut = init_device_mesh("cpu", (replicas, mesh.size() // replicas))
    sharded = [
        distribute_tensor(weight, cut, [Replicate(), Shard(min(axis, weight.ndim - 1))]) for weight in originals()
    ]
    whole = [distribute_tensor(originals()[0], cut, [Replicate(), Replicate()]), originals()[1]]
    return list(gather_weights([*sharded, *whole]))


@pytest.mark.parametrize(
    ("ranks", "replicas", "axis", "max_bytes"), [(3, 1, 0, 2**22), (3, 1, 0, 64), (4, 2, 0, 2**22), (2, 1, 1, 2**22)]
)
def test_every_rank_gets_whole_weights(tmp_path: Path, ranks: int, replicas: int, axis: int, max_bytes: int):
    expected = [*originals(), originals()[0], originals()[1]]
    for found in on_ranks(tmp_path, ranks, gather, replicas, axis, max_bytes):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

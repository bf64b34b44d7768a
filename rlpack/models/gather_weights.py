"""Gather many sharded weights in one collective, so that ranks wait for each other once, not for each weight."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlpack.models.parts import local_part, whole_tensor

# Maximum size of the weights of one collective; a rank briefly holds two copies of them.
_MAX_BYTES = 2**22
# How weights are sharded: the mesh, its dimension, and the dtype. Weights with the same key share a collective.
_Cut = tuple[DeviceMesh, int, torch.dtype]


def gather_weights(weights: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield whole weights, a collective if any is sharded.

    They are on their device, or on that of their mesh if several ranks have parts of them in host memory.

    Args:
        weights: in the same order on all ranks. Those that are not sharded are yielded as they are, detached.
    """
    for cut, run in _runs(weights):
        if cut is None:
            yield from map(whole_tensor, run)
        else:
            yield from _gather(run, cut[0], cut[1])


def _runs(weights: Sequence[Tensor]) -> Iterator[tuple[_Cut | None, list[Tensor]]]:
    """Yield runs of weights that share a collective, with their key; None for weights that are gathered one by one."""
    last: _Cut | None = None
    run: list[Tensor] = []
    for weight in weights:
        dim = _only_cut(weight) if isinstance(weight, DTensor) else None
        cut = (weight.device_mesh, dim, weight.dtype) if isinstance(weight, DTensor) and dim is not None else None
        if run and (cut != last or sum(each.nbytes for each in run) + weight.nbytes > _MAX_BYTES):
            yield last, run
            run = []
        last = cut
        run.append(weight.detach())
    if run:
        yield last, run


def _only_cut(weight: DTensor) -> int | None:
    """Return the mesh dimension that shards the weight along its first axis; None for any other placement."""
    cuts = [(dim, placement) for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(cuts) == 1 and type(cuts[0][1]) is Shard and cuts[0][1].dim == 0:
        return cuts[0][0]
    return None


@torch.no_grad()
def _gather(weights: list[Tensor], mesh: DeviceMesh, dim: int) -> list[Tensor]:
    """Gather weights that are sharded over one mesh dimension along their first axis, as by `torch.chunk`."""
    ranks, parts = mesh.size(dim), []
    for weight in weights:
        part = local_part(weight)
        # The last ranks may have fewer rows than the first, or none.
        missing = -(-weight.shape[0] // ranks) * weight.shape[1:].numel() - part.numel()
        parts.append(F.pad(part.flatten(), (0, missing)) if missing else part.flatten())
    own = torch.cat(parts)
    if ranks > 1:
        own = own.to(mesh.device_type)
    gathered = own.new_empty(ranks, own.numel())
    dist.all_gather(list(gathered), own, group=mesh.get_group(dim))
    pieces = gathered.split([part.numel() for part in parts], 1)
    return [
        piece.reshape(-1)[: weight.numel()].reshape(weight.shape) for piece, weight in zip(pieces, weights, strict=True)
    ]

"""Gather sharded weights: many small ones in one collective, and a large one in several.

So ranks wait for each other once, not for each small weight, and a rank holds a large weight without the copies that a
collective makes of what it sends and receives.

Invariants: tests/distributed/models/test_gather_weights.py and test_gather_large_weights.py.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from operator import mul

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlpack.models.parts import local_part, whole_tensor

try:
    from torch.distributed import all_gather_single
except ImportError:  # PyTorch before 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single

# Maximum size of the weights of one collective; a rank briefly holds two copies of them.
_MAX_BYTES = 2**22
# Size of the pieces in which a larger weight is gathered, all ranks' together.
_PIECE_BYTES = 2**24
# How weights are sharded: the mesh, its dimension, and the dtype. Weights with the same key share a collective.
_Cut = tuple[DeviceMesh, int, torch.dtype]


def gather_weights(weights: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield whole weights, a collective if any is sharded.

    They are on their device, or on that of their mesh if several ranks have parts of them in host memory.

    Args:
        weights: in the same order on all ranks. Those that are not sharded are yielded as they are, detached.
    """
    for cut, run in _runs(weights):
        if cut is None or run[0].nbytes > _PIECE_BYTES:
            yield from map(_gather_one, run)
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


def _gather_one(weight: Tensor) -> Tensor:
    """Return a weight whole; a large one in pieces, if each rank's part is one block of it."""
    if not isinstance(weight, DTensor) or weight.nbytes <= _PIECE_BYTES:
        return whole_tensor(weight)
    if not all(type(placement) in {Shard, Replicate} for placement in weight.placements):
        return whole_tensor(weight)
    return _gather_in_pieces(weight)


@torch.no_grad()
def _gather_in_pieces(weight: DTensor) -> Tensor:
    """Gather a weight that is cut along any axes; the same piece of every rank's block at a time."""
    mesh, part = weight.device_mesh, local_part(weight)
    device = part.device if part.device.type == mesh.device_type else torch.device(mesh.device_type)
    cuts = [(dim, placement.dim) for dim, placement in enumerate(weight.placements) if isinstance(placement, Shard)]
    blocks = [[slice(0, size) for size in weight.shape]]
    for dim, axis in cuts:  # in the order in which the results of the gathers are nested, the last dimension outside
        ranks = mesh.size(dim)
        blocks = [_chunk(block, axis, ranks, rank) for rank in range(ranks) for block in blocks]
    whole = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    # The first block is the largest one along every axis.
    largest = whole[tuple(blocks[0])]
    pieces = list(_pieces(largest.shape, _PIECE_BYTES // (len(blocks) * weight.itemsize)))
    # Allocated once: collectives of new tensors would leave as much memory again to the allocator.
    most = max(largest[piece].numel() for piece in pieces) if pieces else 0
    sizes = accumulate((mesh.size(dim) for dim, _ in cuts), mul, initial=1)
    buffers = [torch.empty(most * size, dtype=weight.dtype, device=device) for size in sizes]
    for piece in pieces:
        shape = largest[piece].shape
        own = buffers[0][: shape.numel()]
        own.view(shape)[tuple(slice(0, size) for size in part[piece].shape)] = part[piece]
        for (dim, _), buffer in zip(cuts, buffers[1:], strict=True):
            gathered = buffer[: own.numel() * mesh.size(dim)]
            all_gather_single(gathered, own, group=mesh.get_group(dim))
            own = gathered
        for block, values in zip(blocks, own.view(len(blocks), *shape), strict=True):
            place = whole[tuple(block)][piece]
            place.copy_(values[tuple(slice(0, size) for size in place.shape)])
    return whole


def _chunk(block: list[slice], axis: int, ranks: int, rank: int) -> list[slice]:
    """Return a rank's part of a block along one axis, as `torch.chunk` cuts it."""
    start, stop = block[axis].start, block[axis].stop
    size = -(-(stop - start) // ranks)
    own = slice(min(start + rank * size, stop), min(start + (rank + 1) * size, stop))
    return [*block[:axis], own, *block[axis + 1 :]]


def _pieces(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices of the first axes of a tensor, of at most `most` elements each if a row of the last axis is.

    >>> list(_pieces((3, 2), 4))
    [(slice(0, 2, None),), (slice(2, 3, None),)]
    """
    row = prod(shape[1:])
    if row > most and len(shape) > 1:
        for start in range(shape[0]):
            yield from ((slice(start, start + 1), *others) for others in _pieces(shape[1:], most))
        return
    rows = max(1, most // max(1, row))
    yield from ((slice(start, min(start + rows, shape[0])),) for start in range(0, shape[0], rows))

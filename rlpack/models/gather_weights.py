"""Gather sharded weights: many small ones in one collective, and a large one in pieces.

Ranks then wait for each other once, not for each small weight, and a rank that doesn't need a large weight, or needs it
in a file or another dtype, never holds it whole.

Invariants: tests/distributed/models/test_gather_weights.py and test_gather_large_weights.py.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlpack.models.parts import local_part, whole_tensor
from rlpack.models.weight_pieces import Cuts, PiecePlan, Place, part_of, place_shape, sizes

try:
    from torch.distributed import all_gather_single
except ImportError:  # PyTorch before 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single

# Maximum size of the weights of one collective; a rank briefly holds two copies of them.
_MAX_BYTES = 2**22
# Size of the pieces in which a larger weight is gathered, all ranks' together. A rank briefly holds several copies.
_PIECE_BYTES = 2**22
# How weights are sharded: the mesh, its dimension, and the dtype. Weights with the same key share a collective.
_Cut = tuple[DeviceMesh, int, torch.dtype]


def gather_weights(weights: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield whole weights, a collective if any is sharded.

    They are on their device, or on that of their mesh if several ranks have parts of them in host memory.

    Args:
        weights: in the same order on all ranks. Those that are not sharded are yielded as they are, detached.
    """
    for cut, run in _runs(weights):
        if cut is None or is_large(run[0]):
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
    own = torch.cat(parts).to(mesh.device_type)  # also on a single rank: large weights are gathered there, too
    gathered = own.new_empty(ranks, own.numel())
    dist.all_gather(list(gathered), own, group=mesh.get_group(dim))
    pieces = gathered.split([part.numel() for part in parts], 1)
    return [
        piece.reshape(-1)[: weight.numel()].reshape(weight.shape) for piece, weight in zip(pieces, weights, strict=True)
    ]


def _gather_one(weight: Tensor) -> Tensor:
    """Return a weight whole; a large one from its pieces, if each rank's part is one block of it."""
    if not isinstance(weight, DTensor) or not is_large(weight) or not _in_blocks(weight):
        return whole_tensor(weight)
    whole = torch.empty(weight.shape, dtype=weight.dtype, device=_device(weight))
    for place, values in gather_pieces(weight):
        whole[place].copy_(values)
    return whole


def is_large(weight: Tensor) -> bool:
    """Return whether a weight is gathered in pieces; only its whole size matters, so all ranks agree."""
    return weight.nbytes > _PIECE_BYTES


def weight_cuts(weight: Tensor) -> Cuts:
    """Return how a weight is cut; () if it isn't, or if its parts aren't blocks, such as summands."""
    if not isinstance(weight, DTensor) or not _in_blocks(weight):
        return ()
    placements = enumerate(weight.placements)
    return tuple((each.dim, weight.device_mesh.size(dim)) for dim, each in placements if isinstance(each, Shard))


def places_of(shape: Sequence[int], itemsize: int, cuts: Cuts) -> Iterator[Place]:
    """Yield the places in which `gather_pieces` yields a weight, for a rank that has none of it."""
    return PiecePlan.of(shape, itemsize, cuts, _PIECE_BYTES).places


@torch.no_grad()
def gather_pieces(weight: Tensor) -> Iterator[tuple[Place, Tensor]]:
    """Yield the pieces of a weight and their places; a collective at each step if it is sharded.

    All ranks have to take all pieces. Copy each before the next, which may overwrite it. A weight whose parts aren't
    blocks is gathered whole first.
    """
    weight = weight.detach() if _in_blocks(weight) else whole_tensor(weight)
    cuts, part, device = weight_cuts(weight), local_part(weight), _device(weight)
    plan = PiecePlan.of(weight.shape, weight.itemsize, cuts, _PIECE_BYTES)
    if not cuts:
        yield from ((place, part[place].to(device)) for place in plan.places)
        return
    assert isinstance(weight, DTensor)
    shapes = [place_shape(plan.block_shape, step.piece) for step in plan.steps]
    most = max((torch.Size(shape).numel() for shape in shapes), default=0)
    groups = [weight.device_mesh.get_group(dim) for dim, each in enumerate(weight.placements) if each.is_shard()]
    # Allocated once: collectives of new tensors would leave as much memory again to the allocator.
    factors = accumulate((ranks for _, ranks in cuts), mul, initial=1)
    buffers = [torch.empty(most * factor, dtype=weight.dtype, device=device) for factor in factors]
    joined = torch.empty_like(buffers[-1])
    for step, shape in zip(plan.steps, shapes, strict=True):
        gathered = buffers[0][: torch.Size(shape).numel()]
        own = part[step.piece]
        gathered.view(shape)[tuple(slice(0, size) for size in own.shape)] = own
        for group, buffer, (_, ranks) in zip(groups, buffers[1:], cuts, strict=True):
            received = buffer[: gathered.numel() * ranks]
            all_gather_single(received, gathered, group=group)
            gathered = received
        received = gathered.view(len(plan.blocks), *shape)
        for place, members in step.places:
            yield place, _join(received, plan, step.piece, place, members, joined)


def _join(received: Tensor, plan: PiecePlan, piece: Place, place: Place, members: list[int], buffer: Tensor) -> Tensor:
    """Return what is in a place: one block's piece, or whole rows from the pieces of several."""
    cuts = [part_of(plan.blocks[number], piece) + plan.blocks[number][len(piece) :] for number in members]
    values = []
    for number, cut in zip(members, cuts, strict=True):
        values.append(received[number][tuple(slice(0, size) for size in sizes(cut))])
    if len(members) == 1:
        return values[0]
    shape = (*sizes(place), *(max(cut[axis].stop for cut in cuts) for axis in range(1, len(cuts[0]))))
    whole = buffer[: torch.Size(shape).numel()].view(shape)
    for cut, block in zip(cuts, values, strict=True):
        whole[(slice(None), *cut[1:])] = block
    return whole


def _in_blocks(weight: Tensor) -> bool:
    """Return whether each rank's part is one block of the weight."""
    return not isinstance(weight, DTensor) or all(type(each) in {Shard, Replicate} for each in weight.placements)


def _device(weight: Tensor) -> torch.device:
    """Return where a weight is gathered: on the device of its mesh, if its parts are in host memory."""
    if isinstance(weight, DTensor) and weight.device.type != weight.device_mesh.device_type:
        return torch.device(weight.device_mesh.device_type)
    return local_part(weight).device

"""The part of a sharded weight that a rank holds: its place in the whole weight, and how to allocate and fill it.

Placements may be of any mesh. Where a rank's part isn't one block of the whole weight, as with FSDP over tensor
parallelism, `part_offsets` returns None, and only `copy_part` can fill it.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def part_offsets(weight: Tensor) -> tuple[int, ...] | None:
    """Return where this rank's part of a weight begins, by axis; None if it isn't one block."""
    if not isinstance(weight, DTensor):
        return (0,) * weight.ndim
    if not all(type(placement) in {Shard, Replicate} for placement in weight.placements):
        return None
    _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return tuple(offsets)


def local_part(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight, which shares its memory."""
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight


@torch.no_grad()
def copy_part(weight: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole tensor, the same on every rank, into a weight; no rank communicates."""
    if isinstance(weight, DTensor):
        whole = whole.to(weight.device, weight.dtype)
        whole = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.copy_(whole)


def allocate(root: nn.Module, device: torch.device | str, weights_device: torch.device | str | None = None) -> None:
    """Replace tensors on the meta device by uninitialized ones; a weight that modules share stays shared.

    `nn.Module.to_empty` would untie weights, and clear buffers that have values.

    Args:
        root: sharded or not.
        device: device of the new tensors.
        weights_device: device of the new weights, if it isn't that of the buffers.
    """
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if weight.is_meta:
                if id(weight) not in made:
                    empty = _empty_like(weight, weights_device or device)
                    made[id(weight)] = nn.Parameter(empty, requires_grad=weight.requires_grad)
                module.register_parameter(name, made[id(weight)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                persistent = name not in module._non_persistent_buffers_set
                module.register_buffer(name, torch.empty_like(buffer, device=device), persistent=persistent)


def share_weights(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the weights and buffers of `source`, a module of the same structure, sharded in the same way."""
    for giver, taker in zip(source.modules(), target.modules(), strict=True):
        for name, weight in list(giver.named_parameters(recurse=False, remove_duplicate=False)):
            taker.register_parameter(name, weight)
        for name, buffer in list(giver.named_buffers(recurse=False)):
            taker.register_buffer(name, buffer, persistent=name not in giver._non_persistent_buffers_set)


def forward_device(model: nn.Module) -> torch.device:
    """Return the device of a model's forward pass: that of its weights, or of their mesh if FSDP keeps them on the CPU.

    Args:
        model: with weights; sharded or not.
    """
    weight = next(model.parameters())
    if isinstance(weight, DTensor) and not weight.is_meta:
        return torch.device(weight.device_mesh.device_type)
    return weight.device


def whole_tensor(weight: Tensor) -> Tensor:
    """Return a weight whole, on the device of its mesh; a collective if it is sharded."""
    weight = weight.detach()
    if not isinstance(weight, DTensor):
        return weight
    if weight.device.type != weight.device_mesh.device_type:  # its parts are in host memory
        weight = cast(DTensor, weight.to(weight.device_mesh.device_type))
    return weight.full_tensor()


def _empty_like(weight: Tensor, device: torch.device | str) -> Tensor:
    """Return an uninitialized tensor with the shape and placements of a weight on the meta device.

    The device needn't be that of the weight's mesh.
    """
    return torch.empty_like(weight.detach(), device=device)

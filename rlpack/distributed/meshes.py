"""Device meshes whose process groups have the timeout of the default group.

`torch.distributed.device_mesh.init_device_mesh` leaves new groups the default of their backend (30 minutes for gloo, 10
for NCCL), whatever the default group has.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def new_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return a mesh over all ranks of the default process group, in their order; a collective.

    Args:
        device_type: `cpu` or `cuda`.
        sizes: size of each dimension by name, outermost first; their product is the number of ranks.
    """
    mesh = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = [new_groups(mesh, dim, device_type) for dim in range(mesh.ndim)]
    names = tuple(sizes)
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type, mesh, mesh_dim_names=names)


def new_groups(mesh: Tensor, dim: int, device_type: str, *, shared: bool = True) -> ProcessGroup:
    """Make a process group for each row of ranks along a dimension; return this rank's. A collective.

    Args:
        mesh: ranks, of any shape.
        dim: dimension along which ranks share a group.
        device_type: `cpu` or `cuda`.
        shared: whether a group of all ranks may be the default group, which saves connections.
    """
    timeout, own = default_timeout(device_type), None
    for ranks in mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist():
        if shared and len(ranks) == dist.get_world_size():
            return _default_group()
        group = dist.new_group(ranks, timeout=timeout, group_desc=f"mesh_{dim}")
        own = group if dist.get_rank() in ranks else own
    assert isinstance(own, ProcessGroup), "each rank is in one group of each dimension"
    return own


def default_timeout(device_type: str) -> timedelta | None:
    """Return the timeout that the default group was made with; None for a backend without one."""
    backend = cast(Any, _default_group())._get_backend(torch.device(device_type))
    try:
        options = backend.options
    except RuntimeError:  # a backend without options
        return None
    return None if options is None else options._timeout


def _default_group() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "there is no process group"
    return group

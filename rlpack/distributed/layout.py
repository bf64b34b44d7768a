"""`ParallelLayout`: how a role's ranks divide rows and the model among them.

Ranks are numbered with pipeline stages outermost and tensor parallelism innermost, the order of torch's device meshes:

    rank = (((i_pp · dp_replicate + i_dp_replicate) · dp_shard + i_dp_shard) · cp + i_cp) · tp + i_tp

Here i_x is the rank's coordinate in dimension x. A data rank is a data-parallel rank: all ranks with the same data rank
(its cp · tp · pp replicas) hold the same rows, and one of them, the output rank, returns their results. Plans know data
ranks only.

Expert parallelism adds no dimension: ep consecutive ones of a replica's dp_shard · cp ranks, all with the same i_tp,
divide the experts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rlpack.distributed.errors import PlacementError
from rlpack.distributed.meshes import new_groups, new_mesh
from rlpack.packing import Batching

# Mesh dimensions, outermost first.
_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of a role's parallel dimensions.

    >>> layout = ParallelLayout(dp_shard=2, tp=2)
    >>> [layout.dp_rank_of(rank) for rank in range(layout.world_size)], layout.output_ranks
    ([0, 0, 1, 1], (0, 2))

    Attributes:
        dp_replicate: replicas of the sharded model, with different rows.
        dp_shard: data ranks of a replica, over whose ranks (dp_shard · cp) its weights are sharded (FSDP).
        cp: ranks that share the tokens of a row (context parallelism).
        tp: ranks that share the weights of a layer (tensor parallelism).
        pp: pipeline stages.
        ep: how many of the dp_shard · cp ranks divide the experts of a layer (expert parallelism).

    Raises:
        PlacementError: a size is not a whole number of at least 1, or ep doesn't divide dp_shard · cp.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise PlacementError(f"{field.name} is {size!r}; it has to be a whole number of at least 1")
        if self.dp_shard * self.cp % self.ep:
            raise PlacementError(f"ep is {self.ep}; it has to divide dp_shard · cp, which is {self.dp_shard * self.cp}")

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self._sizes)

    @property
    def dp_size(self) -> int:
        """Return the number of data ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def divisible_by(self) -> int:
        """Return the number that microbatch counts must be divisible by: the number of pipeline stages."""
        return self.pp

    @cached_property
    def output_ranks(self) -> tuple[int, ...]:
        """Return the output rank of each data rank."""
        return tuple(rank for rank in range(self.world_size) if self.is_output_rank(rank))

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return a rank's place in each dimension.

        Raises:
            ValueError: there is no such rank.
        """
        places = np.unravel_index(rank, self._sizes)
        return {name: int(place) for name, place in zip(_DIMENSIONS, places, strict=True)}

    def dp_rank_of(self, rank: int) -> int:
        """Return the data rank of a rank."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def is_output_rank(self, rank: int) -> bool:
        """Whether results are collected from a rank: cp = tp = 0, last stage."""
        place = self.coordinates(rank)
        return place["cp"] == place["tp"] == 0 and place["pp"] == self.pp - 1

    def align(self, batching: Batching) -> Batching:
        """Return the batching with the divisor raised to what this layout needs.

        >>> ParallelLayout(tp=4, pp=3).align(Batching(divisible_by=2)).divisible_by
        6
        """
        return replace(batching, divisible_by=math.lcm(batching.divisible_by, self.divisible_by))

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh over the process group's ranks: `dp_shard`, and each other dimension larger than 1.

        A collective.

        Args:
            device_type: `cpu` or `cuda`.
        """
        dimensions = zip(_DIMENSIONS, self._sizes, strict=True)
        sizes = {name: size for name, size in dimensions if size > 1 or name == "dp_shard"}
        return new_mesh(device_type, sizes)

    def weight_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of a stage's weights: `dp_replicate`, `dp_shard` and `tp`; only `dp_shard` if of size 1.

        Ranks that share the tokens of a row also hold different shards, so the dimension `dp_shard` has dp_shard · cp
        ranks. FSDP uses all dimensions but `tp`. A collective.

        Args:
            device_type: `cpu` or `cuda`.
        """
        return self._mesh(device_type, {"dp_shard": self.dp_shard * self.cp})

    def expert_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of the experts' weights: `dp_replicate`, `dp_shard`, `ep` and `tp`, as `weight_mesh`.

        The dimension `ep` has the ranks that divide the experts, even if there is only one; `dp_shard` has those with
        the same experts, dp_shard · cp / ep in number. A collective.

        Args:
            device_type: `cpu` or `cuda`.
        """
        return self._mesh(device_type, {"dp_shard": self.dp_shard * self.cp // self.ep, "ep": self.ep})

    def pipeline_group(self, device_type: str) -> ProcessGroup:
        """Return a new process group of the ranks with this rank's place in all stages, in order; a collective.

        Args:
            device_type: `cpu` or `cuda`.
        """
        return new_groups(torch.arange(self.world_size).view(self.pp, -1), 0, device_type, shared=False)

    def _mesh(self, device_type: str, shards: dict[str, int]) -> DeviceMesh:
        """Return the mesh of this rank's stage with these dimensions in place of `dp_shard` and `cp`."""
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, **shards, "tp": self.tp}
        sizes = {name: size for name, size in sizes.items() if size > 1 or name in shards}
        mesh = new_mesh(device_type, sizes)
        return mesh[tuple(name for name in sizes if name != "pp")] if self.pp > 1 else mesh

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in _DIMENSIONS)

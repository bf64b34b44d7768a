"""`RankContext`: a rank's place in its pool, and its device."""

from dataclasses import dataclass, field

import torch

from rlpack.distributed.layout import ParallelLayout


@dataclass(frozen=True)
class RankContext:
    """The place of one rank among the ranks of its role; their process group spans the pool.

    Attributes:
        pool: name of the pool.
        rank: this rank, from 0.
        layout: how the ranks divide rows and the model.
        device: `cpu` or `cuda`; a rank sees only its own GPUs, of which `cuda` is the first.
    """

    pool: str = "main"
    rank: int = 0
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    device: str = "cpu"

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    @property
    def dp_rank(self) -> int:
        """Return this rank's data rank."""
        return self.layout.dp_rank_of(self.rank)

    @property
    def is_reporting_rank(self) -> bool:
        """Whether this rank reports metrics that all ranks know: the first output rank does."""
        return self.rank == self.layout.output_ranks[0]

    @property
    def torch_device(self) -> torch.device:
        """Return the device that tensors of this rank live on."""
        return torch.device(self.device)

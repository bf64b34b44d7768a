"""What a rank knows of its place."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RankContext:
    """The place of one rank in its pool; the process group spans the pool.

    Attributes:
        pool: name of the pool.
        rank: this rank, from 0.
        num_ranks: ranks of the pool, all data-parallel.
        device: `cpu` or `cuda`; a rank sees its own GPU alone.
    """

    pool: str = "main"
    rank: int = 0
    num_ranks: int = 1
    device: str = "cpu"

    @property
    def torch_device(self) -> torch.device:
        """Return the device that tensors of this rank live on."""
        return torch.device(self.device)

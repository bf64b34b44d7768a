"""FSDP2's collectives over gloo, in pieces: gloo copies what it gathers or sums, whole, in buffers of its own.

A gathered layer or embedding then takes a third copy, and a gradient too. In pieces the copy is small.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

try:
    from torch.distributed import reduce_scatter_single
except ImportError:  # PyTorch before 2.13
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

# Maximum size of a piece, all ranks' together.
_PIECE_BYTES = 2**24


def use_pieces(module: FSDPModule, piece_bytes: int = _PIECE_BYTES) -> None:
    """Have an FSDP unit on CPUs gather its weights and sum its gradients in pieces."""
    module.set_custom_all_gather(_AllGather(piece_bytes))  # pyright: ignore[reportArgumentType]
    module.set_custom_reduce_scatter(_ReduceScatter(piece_bytes))  # pyright: ignore[reportArgumentType]


class _Pieces:
    """What FSDP2 asks of a collective; the base classes are private."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _of(self, part: Tensor, group: dist.ProcessGroup) -> Iterator[slice]:
        """Yield the places of pieces of a rank's part, the same on every rank."""
        most = max(1, self._piece_bytes // (group.size() * part.itemsize))
        yield from (slice(start, start + most) for start in range(0, part.numel(), most))


class _AllGather(_Pieces):
    """Gathers the parts [n] of all ranks into [ranks · n]."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather; never in the background.

        Returns:
            The last piece's work, which is done. FSDP2 then takes the collective for one in the background and frees
            its output once it is copied. Otherwise it would keep that of the output layer from the forward pass to the
            end of the backward pass.
        """
        parts, work = output_tensor.view(group.size(), -1), None
        for piece in self._of(input_tensor, group):
            work = dist.all_gather(list(parts[:, piece]), input_tensor[piece], group=group, async_op=True)
            assert work is not None, "this process is not in the group"
            work.wait()
        return work


class _ReduceScatter(_Pieces):
    """Sums [ranks · n] over ranks, of which each gets its part [n]."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum; never in the background."""
        parts = input_tensor.view(group.size(), -1)
        for piece in self._of(output_tensor, group):
            reduce_scatter_single(output_tensor[piece], parts[:, piece].flatten(), op=op, group=group)

"""All-gathers and reduce-scatters of FSDP2 over gloo, in pieces.

gloo copies each message internally. If a layer is gathered in one call, three copies of it exist at the same time: the
output, gloo's copy, and the parameters that FSDP2 unpacks. Small pieces keep gloo's copy small.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rlpack.models.kernel_device import is_simulated

try:
    from torch.distributed import reduce_scatter_single
except ImportError:  # PyTorch before 2.13
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

# Maximum size of a piece, summed over the ranks.
_PIECE_BYTES = 2**22


def use_pieces(module: FSDPModule, piece_bytes: int = _PIECE_BYTES) -> None:
    """Have an FSDP unit on CPUs gather its weights and sum its gradients in pieces.

    Simulated collectives copy nothing, so they run in one piece, which takes less time.
    """
    if is_simulated():
        piece_bytes = sys.maxsize
    module.set_custom_all_gather(_AllGather(piece_bytes))  # pyright: ignore[reportArgumentType]
    module.set_custom_reduce_scatter(_ReduceScatter(piece_bytes))  # pyright: ignore[reportArgumentType]


class _Pieces:
    """The part of FSDP2's interface that both collectives share; FSDP2's own base classes are private."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _of(self, part: Tensor, group: dist.ProcessGroup) -> Iterator[slice]:
        """Yield the slice of each piece of a rank's part; they are the same on every rank."""
        most = max(1, self._piece_bytes // (group.size() * part.itemsize))
        yield from (slice(start, start + most) for start in range(0, part.numel(), most))


class _AllGather(_Pieces):
    """All-gather: the parts [n] of all ranks to [ranks · n]."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather all pieces before returning, even if `async_op` is set.

        Returns:
            The completed work of the last piece. FSDP2 then treats the gather as asynchronous, and frees its output
            after unpacking it. Otherwise it would keep the output layer's until the end of the backward pass.
        """
        parts, work = output_tensor.view(group.size(), -1), None
        for piece in self._of(input_tensor, group):
            work = dist.all_gather(list(parts[:, piece]), input_tensor[piece], group=group, async_op=True)
            assert work is not None, "this process is not in the group"
            work.wait()
        return work


class _ReduceScatter(_Pieces):
    """Reduce-scatter: [ranks · n] of each rank to this rank's sums [n]."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum all pieces before returning, even if `async_op` is set, and free the input.

        With more than two ranks, the order in which gloo adds depends on the pieces, so the last bits may differ from
        those of a sum in one piece. FSDP2 no longer reads the input, but would keep it until the next unit has its
        gradients.
        """
        parts = input_tensor.view(group.size(), -1)
        for piece in self._of(output_tensor, group):
            reduce_scatter_single(output_tensor[piece], parts[:, piece].flatten(), op=op, group=group)
        input_tensor.untyped_storage().resize_(0)

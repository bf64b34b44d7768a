"""What the stages of a pipeline exchange (`rlpack.models.pipeline_parallel`), differentiable.

Hidden states go to the next stage in the forward pass, and their gradients come back in the backward pass. Every stage
has all rows, so it knows the shape of what it receives; microbatches may therefore have any widths. Sends don't wait
for the receiver, and the two directions have separate process groups: on GPUs, the messages of one group run in order,
and a pair of stages that both send first would wait for each other.

Letters: R rows, L slots of a row, d hidden size, T tokens.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class StageLink:
    """This rank's place in the pipeline of its replica's stages.

    Attributes:
        rank: this stage, from 0.
        num_stages: number of stages.
        dtype: of the hidden states that stages exchange; set once the model's compute dtype is known.
    """

    def __init__(self, forward: dist.ProcessGroup, backward: dist.ProcessGroup, device: torch.device | str) -> None:
        """Take a place.

        Args:
            forward: the ranks of all stages in order, for hidden states.
            backward: another group of the same ranks, for gradients.
            device: of the hidden states.
        """
        self.rank, self.num_stages = dist.get_rank(forward), dist.get_world_size(forward)
        self.dtype = torch.float32
        self._device = torch.device(device)
        self._forward, self._backward = forward, backward
        self._sent: dict[dist.ProcessGroup, deque[tuple[Any, Tensor]]] = {forward: deque(), backward: deque()}
        # Inputs and outputs of the model's part have a gradient even if none of its weights do.
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last norm and the head."""
        return self.rank == self.num_stages - 1

    def receive(self, *shape: int) -> Tensor:
        """Return the hidden states that the previous stage sends, [R, L, d]; their gradient is sent back."""
        return _Receive.apply(self._anchor, self, shape)  # pyright: ignore[reportReturnType]

    def send(self, states: Tensor) -> Tensor:
        """Send hidden states to the next stage, [R, L, d].

        Returns:
            Zeros of the same shape. Their gradient is ignored: that of the states comes from the next stage.
        """
        return _Send.apply(states.to(self.dtype), self._anchor, self)  # pyright: ignore[reportReturnType]

    def share(self, outputs: Tensor) -> Tensor:
        """Return the last stage's outputs on every stage; a collective.

        All stages continue with the same values and the same loss, so the backward pass needs no communication.
        """
        return _Share.apply(outputs, self)  # pyright: ignore[reportReturnType]

    def broadcast(self, tensor: Tensor, stage: int) -> Tensor:
        """Return a stage's tensor on every stage; a collective. The others pass a tensor of its shape and dtype."""
        tensor = tensor.detach().to(self._device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(tensor, group=self._forward, group_src=stage)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the objects of all stages in order; a collective."""
        values: list[Any] = [None] * self.num_stages
        dist.all_gather_object(values, value, group=self._forward)
        return values

    def total(self, number: Tensor) -> Tensor:
        """Return the sum of the stages' numbers; a collective."""
        number = number.detach().to(self._device, copy=True)
        dist.all_reduce(number, group=self._forward)
        return number

    def add_other_end(self, gradient: Tensor) -> None:
        """Add the other end's gradient, in place; the first and the last stage call this, and get equal sums."""
        other = 0 if self.is_last else self.num_stages - 1
        own, received = gradient.detach().to(self._device, copy=True), torch.empty_like(gradient, device=self._device)
        group = self._forward if self.is_first else self._backward
        self._post(own, other, group)
        self._fetch(received, other, self._backward if self.is_first else self._forward)
        gradient.copy_(own + received)

    def _post(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        """Send a tensor without waiting for its receiver, unless one tensor per stage is on its way already."""
        self._sent[group].append((dist.isend(tensor, group=group, group_dst=stage), tensor))
        self._settle(group, len(self._sent[group]) - self.num_stages)

    def _settle(self, group: dist.ProcessGroup, count: int) -> None:
        """Wait until the first tensors have been received, up to the deadline of the process group."""
        for _ in range(count):
            work, _ = self._sent[group].popleft()
            work.wait()

    def _fetch(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> Tensor:
        """Fill a tensor with what a stage sends."""
        dist.recv(tensor, group=group, group_src=stage)
        return tensor


class _Receive(torch.autograd.Function):
    """Receives hidden states; sends their gradient back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, link: StageLink, shape: tuple[int, ...]) -> Tensor:
        ctx.link = link
        states = torch.empty(shape, dtype=link.dtype, device=link._device)
        return link._fetch(states, link.rank - 1, link._forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        link: StageLink = ctx.link
        link._post(gradients[0].contiguous(), link.rank - 1, link._backward)
        return None, None, None


class _Send(torch.autograd.Function):
    """Sends hidden states; receives their gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, anchor: Tensor, link: StageLink) -> Tensor:
        ctx.link, ctx.shape = link, states.shape
        link._post(states.detach().contiguous(), link.rank + 1, link._forward)
        return states.new_zeros(()).expand(states.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        link: StageLink = ctx.link
        gradient = torch.empty(ctx.shape, dtype=link.dtype, device=link._device)
        return link._fetch(gradient, link.rank + 1, link._backward), None, None


class _Share(torch.autograd.Function):
    """Broadcast from the last stage in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, link: StageLink) -> Tensor:
        return link.broadcast(outputs, link.num_stages - 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0], None

"""Differentiable exchanges between the stages of a pipeline (`rlpack.models.pipeline_parallel`).

Hidden states go to the next stage in the forward pass, and their gradients come back in the backward pass. Every stage
has all rows, so it knows the shape of what it receives; microbatches may therefore have any widths. Sends don't wait
for the receiver, and the two directions have separate process groups: on GPUs, the messages of one group run in order,
and a pair of stages that both send first would wait for each other. With virtual stages, the last rank also sends
hidden states to the first one, so the ranks form a ring, and a rank sends and receives in separate groups, too.
`rlpack.models.pipeline_schedule` says why no rank waits forever.

Letters: R rows, L slots of a row, d hidden size, T tokens.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def groups_of_links(num_stages: int, num_virtual: int) -> list[int]:
    """Return the group of each rank's link to the next one, from 0; with virtual stages also of the last to the first.

    Links that meet at a rank then have separate groups. Without virtual stages one group is enough, because the last
    rank, which sends to no other, never waits for a receiver.

    >>> groups_of_links(4, 2), groups_of_links(3, 2), groups_of_links(4, 1)
    ([0, 1, 0, 1], [0, 1, 2], [0, 0, 0])
    """
    if num_virtual == 1:
        return [0] * (num_stages - 1)
    return [rank % 2 for rank in range(num_stages - 1)] + [1 + num_stages % 2]


class StageLink:
    """This rank's place in the pipeline of its replica's stages.

    Attributes:
        rank: this stage, from 0.
        num_stages: number of stages.
        num_virtual: virtual stages of each rank.
        dtype: dtype of the hidden states that stages exchange; set once the model's compute dtype is known.
    """

    def __init__(
        self,
        forward: Sequence[dist.ProcessGroup],
        backward: Sequence[dist.ProcessGroup],
        device: torch.device | str,
        num_virtual: int = 1,
    ) -> None:
        """Set up this rank's links.

        Args:
            forward: groups of the ranks of all stages in order, for hidden states: those of `groups_of_links`.
            backward: as many other groups of the same ranks, for gradients.
            device: device of the hidden states.
            num_virtual: virtual stages of each rank.
        """
        self.rank, self.num_stages = dist.get_rank(forward[0]), dist.get_world_size(forward[0])
        self.num_virtual = num_virtual
        self.dtype = torch.float32
        self._device = torch.device(device)
        self._forward, self._backward = forward[0], backward[0]
        links = groups_of_links(self.num_stages, num_virtual)
        self._links = [(forward[number], backward[number]) for number in links]
        self._sent: dict[dist.ProcessGroup, deque[tuple[Any, Tensor]]] = {
            group: deque() for group in (*forward, *backward)
        }
        # Inputs and outputs of the model's part have a gradient even if none of its weights do.
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def previous(self) -> tuple[int, dist.ProcessGroup, dist.ProcessGroup]:
        """Return the previous rank, and the groups of hidden states and gradients between the two."""
        return (self.rank - 1) % self.num_stages, *self._links[self.rank - 1]

    @property
    def next(self) -> tuple[int, dist.ProcessGroup, dist.ProcessGroup]:
        """Return the next rank, and the groups of hidden states and gradients between the two."""
        return (self.rank + 1) % self.num_stages, *self._links[self.rank]

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last norm and the head."""
        return self.rank == self.num_stages - 1

    def receive(self, *shape: int, after: Tensor | None = None) -> Tensor:
        """Return the hidden states that the previous stage sends, [R, L, d]; their gradient is sent back.

        Args:
            *shape: R, L, d.
            after: result of an earlier `send`, whose gradient is received only after this one's has been sent.
        """
        return _Receive.apply(self._anchor if after is None else after, self, shape)  # pyright: ignore[reportReturnType]

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
        # The first message of two ranks in an NCCL group waits for both, so they must not both send first.
        if self.is_first:
            self._post(own, other, self._forward)
            self._fetch(received, other, self._backward)
        else:
            self._fetch(received, other, self._forward)
            self._post(own, other, self._backward)
        gradient.copy_(own + received)

    def on_the_way(self) -> list[Tensor]:
        """Return what was sent and is still held, because its receiver may not have it."""
        return [tensor for sent in self._sent.values() for _, tensor in sent]

    def settle(self) -> None:
        """Wait until everything sent has been received, and free it; every stage calls this after a step's passes."""
        for group, sent in self._sent.items():
            self._settle(group, len(sent))

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
        ctx.link, ctx.after = link, None if anchor is link._anchor else anchor.shape
        states = torch.empty(shape, dtype=link.dtype, device=link._device)
        rank, group, _ = link.previous
        return link._fetch(states, rank, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        link: StageLink = ctx.link
        rank, _, group = link.previous
        link._post(gradients[0].contiguous(), rank, group)
        return None if ctx.after is None else gradients[0].new_zeros(()).expand(ctx.after), None, None


class _Send(torch.autograd.Function):
    """Sends hidden states; receives their gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, anchor: Tensor, link: StageLink) -> Tensor:
        ctx.link, ctx.shape = link, states.shape
        rank, group, _ = link.next
        link._post(states.detach().contiguous(), rank, group)
        return states.new_zeros(()).expand(states.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        link: StageLink = ctx.link
        gradient = torch.empty(ctx.shape, dtype=link.dtype, device=link._device)
        rank, _, group = link.next
        return link._fetch(gradient, rank, group), None, None


class _Share(torch.autograd.Function):
    """Broadcast from the last stage in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, link: StageLink) -> Tensor:
        return link.broadcast(outputs, link.num_stages - 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0], None

"""Differentiable exchanges between the ranks that share each layer's weights (`rlpack.models.tensor_parallel`).

Letters: T slots of a row, t = T / ranks, d hidden size, V vocabulary size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # PyTorch before 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens of the vocabulary whose logits a rank computes.

    Attributes:
        group: the ranks that share the vocabulary.
        start: first token of this rank.
        most: largest number of tokens of any rank.
    """

    group: dist.ProcessGroup
    start: int
    most: int


class WeightSplit:
    """This rank's place in the group that shares the weights of each layer.

    Attributes:
        mesh: the group, as a mesh with one dimension.
        group: the process group.
        rank: this rank in it.
        num_ranks: its size.
        splits_tokens: whether a rank keeps only its part of the tokens outside attention and MLP.
    """

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool = True) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.num_ranks = mesh.size()
        self.splits_tokens = sequence_parallel

    @contextmanager
    def whole_tokens(self) -> Iterator[None]:
        """Have every rank keep all tokens inside the context, as a model's own forward pass expects."""
        before, self.splits_tokens = self.splits_tokens, False
        try:
            yield
        finally:
            self.splits_tokens = before

    def gather(self, states: Tensor, *, summands: bool = True) -> Tensor:
        """Return the states of all tokens: [1, t, d] to [1, T, d].

        Args:
            states: states of this rank's tokens, or of all tokens without sequence parallelism.
            summands: whether the gradients of the ranks are summands, because each uses the result with its own part
                of weights, rather than equal.
        """
        if self.splits_tokens:
            return _mapped(states, self._all_gather, self._reduce_scatter if summands else self._own_tokens)
        return _mapped(states, _same, self._all_reduce) if summands else states

    def add(self, summands: Tensor) -> Tensor:
        """Return the sum over ranks of [1, T, d]: [1, t, d], this rank's tokens; all without sequence parallelism."""
        if self.splits_tokens:
            return _mapped(summands, self._reduce_scatter, self._all_gather)
        return _mapped(summands, self._all_reduce, _same)

    def gather_logits(self, logits: Tensor, size: int) -> Tensor:
        """Return the logits of all tokens of the vocabulary, [..., V], from this rank's."""
        start, stop = self.block(size)

        def forward(part: Tensor) -> Tensor:
            most = -(-size // self.num_ranks)
            part = nn.functional.pad(part, (0, most - part.shape[-1]))
            parts = part.new_empty(self.num_ranks * part.numel())
            all_gather_single(parts, part.flatten(), group=self.group)
            return torch.cat(list(parts.view(self.num_ranks, *part.shape)), -1)[..., :size]

        return _mapped(logits, forward, lambda gradient: gradient[..., start:stop].contiguous())

    def block(self, size: int) -> tuple[int, int]:
        """Return the start and end of this rank's part of an axis, as `torch.chunk` cuts it."""
        most = -(-size // self.num_ranks)
        return min(self.rank * most, size), min((self.rank + 1) * most, size)

    def local(self, weight: Tensor, *, summands: bool = False) -> Tensor:
        """Return this rank's part of a weight, differentiable.

        Args:
            weight: whole, or split by `split_weights`.
            summands: whether the ranks' gradients of a weight that each holds whole have to be added.
        """
        if not isinstance(weight, DTensor):
            return weight
        return weight.to_local(grad_placements=[Partial()]) if summands else weight.to_local()

    def output_layer(self, head: nn.Linear, num_logits: int | None) -> tuple[Tensor, Tensor | None, VocabularyPart]:
        """Return this rank's rows of an output layer and its bias, of the first `num_logits` tokens."""
        start, stop = self.block(head.out_features)
        most = -(-head.out_features // self.num_ranks)
        rows = max(0, min(stop, num_logits or stop) - start)
        weight = first_rows(self.local(head.weight), rows)
        bias = None if head.bias is None else self.local(head.bias, summands=True)[start : start + rows]
        return weight, bias, VocabularyPart(self.group, start, most)

    def _all_gather(self, states: Tensor) -> Tensor:
        whole = states.new_empty(1, states.shape[1] * self.num_ranks, *states.shape[2:])
        all_gather_single(whole[0], states[0].contiguous(), group=self.group)
        return whole

    def _reduce_scatter(self, states: Tensor) -> Tensor:
        part = states.new_empty(1, states.shape[1] // self.num_ranks, *states.shape[2:])
        reduce_scatter_single(part[0], states[0].contiguous(), group=self.group)
        return part

    def _all_reduce(self, states: Tensor) -> Tensor:
        total = states.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def _own_tokens(self, states: Tensor) -> Tensor:
        size = states.shape[1] // self.num_ranks
        return states[:, self.rank * size : (self.rank + 1) * size].contiguous()


def first_rows(weight: Tensor, num_rows: int | None) -> Tensor:
    """Return the first rows of a weight; the weight itself for all, since a slice's gradient is copied once more.

    >>> weight = torch.zeros(3, 2)
    >>> first_rows(weight, 2).shape, first_rows(weight, None) is weight
    (torch.Size([2, 2]), True)
    """
    return weight if num_rows is None or num_rows >= weight.shape[0] else weight[:num_rows]


_Map = Callable[[Tensor], Tensor]


class _Mapped(torch.autograd.Function):
    """A linear map, and the map of its gradients."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, forward: _Map, backward: _Map) -> Tensor:
        ctx.map = backward
        return forward(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.map(gradients[0]), None, None


def _mapped(states: Tensor, forward: _Map, backward: _Map) -> Tensor:
    return _Mapped.apply(states, forward, backward)  # pyright: ignore[reportReturnType]


def _same(states: Tensor) -> Tensor:
    return states.view_as(states)

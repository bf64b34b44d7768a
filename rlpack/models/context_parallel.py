"""Context parallelism: every rank of a group runs the model on its part of a packed row's tokens.

A row is cut into equal contiguous parts, regardless of where its sequences begin. Everything but attention works on
single tokens, so a rank needs only its own. Attention exchanges tokens for heads (DeepSpeed-Ulysses, Jacobs et al.
2023, arXiv:2309.14509): an all-to-all gives each rank the whole row for its share of the heads, and a second one
reverses it. Windows, soft caps and segments therefore work as without context parallelism.

Padded rows run as segments of equal length of one packed row. Outputs per token are all-reduced over the group
(`RowSplit.total`), whose ranks compute the same loss; each rank's gradients are those of its own tokens.

Letters: H heads, T slots of the whole row, t = T / ranks, D head size.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from rlpack.models.errors import ModelError

# Groups by name, because operators take no groups.
_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


@dataclass(frozen=True)
class RowSplit:
    """This rank's place in the group that shares a packed row.

    Attributes:
        group: the process group.
        rank: this rank in it.
        num_ranks: its size.
        multiple: of the number of slots of a part, which tensor parallelism divides further.
    """

    group: dist.ProcessGroup | None
    rank: int
    num_ranks: int
    multiple: int = 1

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None, multiple: int = 1) -> "RowSplit":
        """Return this process's place in a group; None for a process that shares no rows."""
        if group is None:
            return cls(None, 0, 1, multiple)
        return cls(group, dist.get_rank(group), dist.get_world_size(group), multiple)

    def padded(self, num_slots: int) -> int:
        """Return the number of slots of a row after padding it to equal parts."""
        unit = self.num_ranks * self.multiple
        return -(-num_slots // unit) * unit

    def part(self, num_slots: int) -> slice:
        """Return this rank's slots of a row, after padding it to equal parts."""
        size = self.padded(num_slots) // self.num_ranks
        return slice(self.rank * size, (self.rank + 1) * size)

    def to_heads(self, states: Tensor) -> Tensor:
        """Exchange tokens for heads: [1, H, t, D] of all heads to [1, H', T, D] of this rank's heads.

        H' is H / ranks. If H isn't divisible by the ranks, as with few key and value heads, heads are repeated first,
        so that each rank has the key heads that its query heads attend to.
        """
        repeats = self.num_ranks // gcd(states.shape[1], self.num_ranks)
        states = states[0].repeat_interleave(repeats, 0) if repeats > 1 else states[0]
        heads, tokens, size = states.shape
        parts = states.reshape(self.num_ranks, heads // self.num_ranks, tokens, size)
        assert self.group is not None
        whole = _all_to_all(parts, self.group).transpose(0, 1)  # [H', ranks, t, D]
        return whole.reshape(1, heads // self.num_ranks, self.num_ranks * tokens, size)

    def to_tokens(self, outputs: Tensor) -> Tensor:
        """Exchange heads for tokens: [1, T, H', D] of this rank's heads to [1, t, H, D] of all heads."""
        _, tokens, heads, size = outputs.shape
        parts = outputs.reshape(self.num_ranks, tokens // self.num_ranks, heads, size)
        assert self.group is not None
        whole = _all_to_all(parts, self.group).transpose(0, 1)  # [t, ranks, H', D]
        return whole.reshape(1, tokens // self.num_ranks, self.num_ranks * heads, size)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks, of which at most one holds a nonzero value at each place.

        All ranks continue with the same values and the same loss, so each already has the whole gradient, and the
        backward pass needs no communication.
        """
        if self.group is None:
            return values
        return _Total.apply(values, self.group)  # pyright: ignore[reportReturnType]

    def check_heads(self, num_heads: int, layer: str) -> None:
        """Raise unless the number of query heads is divisible by the number of ranks.

        Raises:
            ModelError: it is not.
        """
        if num_heads % self.num_ranks:
            raise ModelError(
                f"{layer} has {num_heads} query heads, which is not divisible by the {self.num_ranks} ranks of context "
                "parallelism; set *.parallel.cp to a divisor"
            )


class _AllToAll(torch.autograd.Function):
    """All-to-all: part i of each rank goes to rank i. It is its own inverse, so gradients take the same path."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return exchange(gradients[0], ctx.group), None


class _Total(torch.autograd.Function):
    """All-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0], None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _AllToAll.apply(parts, group)  # pyright: ignore[reportReturnType]


def exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return part i of each rank i of a group, of which every rank sends part j to rank j; not differentiable."""
    return _exchange_operator(parts.contiguous(), group_name(group))


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name under which an operator finds a group by `group_of_name`."""
    _groups[group.group_name] = group
    return group.group_name


def group_of_name(name: str) -> dist.ProcessGroup:
    """Return the group of a name that `group_name` returned."""
    return _groups[name]


# An operator that returns a new tensor, so that selective activation checkpointing can keep it. That of torch fills a
# tensor in place and returns a handle: keeping the handle would skip the exchange and leave the tensor empty.
@torch.library.custom_op("rlpack::all_to_all", mutates_args=())
def _exchange_operator(parts: Tensor, name: str) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group_of_name(name))
    return received


@_exchange_operator.register_fake
def _simulated_exchange(parts: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(parts)

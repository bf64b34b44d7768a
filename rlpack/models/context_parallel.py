"""Context parallelism: every rank of a group runs the model on its part of a packed row's tokens.

Everything but attention works on single tokens, so a rank needs only its own (`rlpack.models.row_parts`). Attention
needs other ranks' tokens, which it gets by one of two methods:

- `ulysses`: ranks exchange tokens for heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509). An all-to-all
  gives each rank the whole row for its share of the heads, and a second one reverses it.
- `all_gather`: ranks gather the keys and values of the whole row, for any number of heads (Llama 3, 2024,
  arXiv:2407.21783, section 3.3.2). Gradients of keys and values are summed and scattered back.

Padded rows run as segments of equal length of one packed row. Outputs per token are all-reduced over the group
(`RowSplit.total`), whose ranks compute the same loss. Gradients of weights are those of the rank's own tokens.

Letters: H heads, T slots of the whole row, t = T / ranks, D head size, K keys that a rank's queries see.
"""

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from rlpack.models.errors import ModelError
from rlpack.models.weight_split import all_gather_single, reduce_scatter_single

if TYPE_CHECKING:  # pydantic is not needed for attention alone
    from rlpack.config.sections.parallelism import ContextMethod

# Groups by name, because operators take no groups.
_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


@dataclass(frozen=True)
class RowSplit:
    """This rank's place in the group that shares a packed row.

    Attributes:
        group: the process group.
        rank: this rank in it.
        num_ranks: its size.
        multiple: divisor of the number of slots of a part, which tensor parallelism divides further.
        method: how attention gets the tokens of other ranks.
    """

    group: dist.ProcessGroup | None
    rank: int
    num_ranks: int
    multiple: int = 1
    method: "ContextMethod" = "ulysses"

    @classmethod
    def of_group(
        cls, group: dist.ProcessGroup | None, multiple: int = 1, method: "ContextMethod" = "ulysses"
    ) -> "RowSplit":
        """Return this process's place in a group; None for a process that shares no rows."""
        if group is None:
            return cls(None, 0, 1, multiple)
        return cls(group, dist.get_rank(group), dist.get_world_size(group), multiple, method)

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

    def gather_keys(self, states: Tensor, places: Tensor) -> Tensor:
        """Return keys or values of all ranks' tokens: [1, H, t, D] of this rank's tokens to [1, H, K, D].

        Args:
            states: keys or values of this rank's tokens.
            places: int64 [K], the place of each among the tokens of all ranks, rank by rank.
        """
        assert self.group is not None
        gathered: Tensor = _GatherRows.apply(states[0].transpose(0, 1), places, self.group, self.num_ranks)  # pyright: ignore[reportAssignmentType]
        return gathered.transpose(0, 1)[None]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over ranks; at each place, at most one rank holds a nonzero value.

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
                "parallelism; set *.parallel.cp to a divisor, or *.parallel.cp_method=all_gather"
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


class _GatherRows(torch.autograd.Function):
    """All-gather of rows and selection of some, which may repeat; their gradients are summed over all ranks.

    Selective activation checkpointing recomputes the result, like the key projection's norm and rotary embedding: it is
    as long as the whole row, and keeping it would take the memory that context parallelism saves.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, group: dist.ProcessGroup, num_ranks: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.group, ctx.num_ranks, ctx.num_rows = group, num_ranks, num_ranks * rows.shape[0]
        whole = rows.new_empty(ctx.num_rows, *rows.shape[1:])
        all_gather_single(whole, rows.contiguous(), group=group)
        return whole.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (places,), gradient = ctx.saved_tensors, gradients[0]
        whole = gradient.new_zeros(ctx.num_rows, *gradient.shape[1:]).index_add_(0, places, gradient)
        own = whole.new_empty(ctx.num_rows // ctx.num_ranks, *whole.shape[1:])
        reduce_scatter_single(own, whole, group=ctx.group)
        return own, None, None, None


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
    """Send part j to each rank j of a group, and return the parts received, in rank order; not differentiable."""
    return _exchange_operator(parts.contiguous(), group_name(group))


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name under which an operator finds a group by `group_of_name`."""
    _groups[group.group_name] = group
    return group.group_name


def group_of_name(name: str) -> dist.ProcessGroup:
    """Return the group with a name that `group_name` returned."""
    return _groups[name]


# An operator that returns a new tensor, so that selective activation checkpointing can keep it. torch's own operator
# fills a tensor in place and returns a handle; keeping the handle would skip the exchange and leave the tensor empty.
@torch.library.custom_op("rlpack::all_to_all", mutates_args=())
def _exchange_operator(parts: Tensor, name: str) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group_of_name(name))
    return received


@_exchange_operator.register_fake
def _simulated_exchange(parts: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(parts)

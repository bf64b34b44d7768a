"""Expert parallelism: each rank of a group holds some of every layer's experts, and tokens travel to them.

The ranks of a group have different tokens. A rank sends each token to the ranks that hold the experts that its router
chose, an all-to-all of as many rows as were routed; these ranks apply their experts, and a second all-to-all returns
the outputs (GShard, Lepikhin et al. 2020, arXiv:2006.16668). The router's weights are applied where the token came
from. Sizes of the exchange depend on the data, so the ranks exchange counts first.

With tensor parallelism, whose ranks have the same tokens, an expert parallel rank's experts are divided further: each
tensor parallel rank sends only the tokens of its own experts, and the outputs are summands.

| expert e of E, with `ep` and `tp` ranks | |
|---|---|
| rank in the group of ep | e // (E / ep) |
| rank in the group of tp | e // (E / (ep · tp)) mod tp |

Weights become DTensors over both groups, whole experts on each rank. FSDP shards each along its second axis, over the
ranks that hold the same experts. A rank's part is therefore one block of the weight, and checkpoints load on any other
layout. A rank whose experts get no token takes part in every exchange, and its gradients are zeros.

Letters: E experts of a layer, T tokens of this rank, k experts of a token, P pairs of a token and an expert, R rows
that this rank receives, d hidden size.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlpack.models.context_parallel import exchange, group_name, group_of_name

_Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertSplit:
    """This rank's place among those that divide the experts of each layer.

    Attributes:
        mesh: these ranks, with the dimension `ep`, and `tp` if tensor parallelism divides the experts further.
        group: the ranks that exchange tokens.
        num_ranks: their number.
        num_parts: number of parts that the experts are divided into.
        part: index of this rank's part.
        is_balanced: whether to assume that all experts get equally many tokens, to count memory without values.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Locate this rank.

        Args:
            mesh: a mesh with the dimension `ep`, and possibly `tp` and others.
        """
        names = tuple(name for name in ("ep", "tp") if name in (mesh.mesh_dim_names or ()))
        self.mesh = mesh[names]
        self.group = self.mesh.get_group("ep")
        self.num_ranks = dist.get_world_size(self.group)
        self.num_parts = self.mesh.size()
        self._tensor_rank = self.mesh.get_local_rank("tp") if "tp" in names else 0
        self._tensor_ranks = self.num_parts // self.num_ranks
        self.is_balanced = False
        self.part = dist.get_rank(self.group) * self._tensor_ranks + self._tensor_rank

    def own_pairs(self, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """Return the pairs that this rank sends, sorted by expert, and their counts.

        Args:
            experts: expert of each pair, int64 [T · k].
            num_experts: number of experts of a part.

        Returns:
            Indices of the pairs, int64 [P], and counts by rank and expert, int64 [ranks, experts of a part].
        """
        order = experts.argsort(stable=True)
        ordered = experts[order]
        if self._tensor_ranks > 1:  # the other tensor parallel ranks have the same tokens, and send the other pairs
            own = ordered // num_experts % self._tensor_ranks == self._tensor_rank
            order, ordered = order[own], ordered[own]
        first = torch.arange(self.num_ranks, device=experts.device) * self._tensor_ranks + self._tensor_rank
        sent = first[:, None] * num_experts + torch.arange(num_experts, device=experts.device)
        counts = torch.searchsorted(ordered, sent, right=True) - torch.searchsorted(ordered, sent)
        return order, counts

    def route(self, experts: Tensor, num_experts: int) -> tuple[Tensor, list[int], list[int], Tensor]:
        """Return what this rank sends and receives; the ranks exchange counts.

        Args:
            experts: expert of each pair, int64 [T · k].
            num_experts: number of experts of a part.

        Returns:
            Indices of the pairs that it sends, int64 [P]; numbers of rows for each rank, and from each rank; and the
            expert of each row that it receives, among its own, int64 [R].
        """
        own = torch.arange(num_experts, device=experts.device).repeat(self.num_ranks)
        if self.is_balanced:
            rows = [-(-len(experts) // self.num_parts)] * self.num_ranks
            total = sum(rows)
            pairs = torch.arange(total, device=experts.device) % len(experts)  # rounding up may take a pair twice
            return pairs, rows, rows, own.repeat(-(-total // len(own)))[:total]
        pairs, counts = self.own_pairs(experts, num_experts)
        received_counts = exchange(counts, self.group)  # [ranks, experts]
        sent, received = counts.sum(1).tolist(), received_counts.sum(1).tolist()
        return pairs, sent, received, own.repeat_interleave(received_counts.flatten(), output_size=sum(received))

    def same(self, outputs: Tensor) -> Tensor:
        """Return the first rank's copy of outputs that differ between ranks by rounding; a collective of all ranks.

        Experts compute the tokens of several ranks in one product, where a token's place may change its rounding. Ranks
        that compare such outputs to decide whether to continue have to reach the same decision.
        """
        outputs = outputs.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(outputs, src=0)
        return outputs


def expert_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold all experts of a layer, by name.

    These are the ones for which transformers has several implementations (`use_experts_implementation`): weights that
    stack experts along the first axis, and a forward pass of tokens, the indices of their experts and their weights.
    """
    for name, module in root.named_modules():
        if name.rpartition(".")[2] == "experts" and {"num_experts", "is_transposed"} <= vars(module).keys():
            yield name, module


def uneven_experts(root: nn.Module, num_shards: int) -> tuple[str, int] | None:
    """Return the name and axis size of an expert weight that FSDP can't shard evenly over `num_shards` ranks."""
    weights = ((f"{name}.{key}", weight) for name, module in expert_modules(root) for key, weight in _own(module))
    return next(((name, weight.shape[1]) for name, weight in weights if weight.shape[1] % num_shards), None)


def split_experts(root: nn.Module, split: ExpertSplit) -> None:
    """Keep this rank's experts, in place, and have the modules exchange tokens for them.

    Call it before `split_weights`, which leaves these modules alone.

    Args:
        root: a policy, critic or reward model; weights are whole, on any device.
        split: the ranks that divide the experts; its `num_parts` divides the number of experts.
    """
    for _, module in list(expert_modules(root)):
        experts = cast(Any, module)
        experts.num_experts = experts.num_experts // split.num_parts
        for key, weight in _own(module):
            module.register_parameter(key, _part(weight, split))
        module.forward = functools.partial(_exchanged, module, module.forward, split)


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a module's own weights, without those of its children."""
    return list(module.named_parameters(recurse=False))


def _part(weight: nn.Parameter, split: ExpertSplit) -> nn.Parameter:
    """Return the DTensor of a whole weight, with a copy of this rank's experts."""
    size = weight.shape[0] // split.num_parts
    part = weight.detach().narrow(0, split.part * size, size).clone(memory_format=torch.contiguous_format)
    placements = [Shard(0)] * split.mesh.ndim
    tensor = DTensor.from_local(
        part, split.mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return nn.Parameter(tensor, requires_grad=weight.requires_grad)


def _exchanged(
    module: nn.Module, forward: _Forward, split: ExpertSplit, states: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Return the outputs of the experts for this rank's tokens; with tensor parallelism, its summand.

    Args:
        module: its `num_experts` is the number of this rank's experts.
        forward: the module's forward pass.
        split: the ranks that divide the experts.
        states: [T, d].
        index: experts of each token, int64 [T, k].
        weights: weights of these experts, [T, k].
    """
    (num_tokens, width), top_k = states.shape, index.shape[1]
    num_experts = cast(int, module.num_experts)
    pairs, sent, received, own = split.route(index.flatten(), num_experts)
    rows = _exchange_rows(states[pairs // top_k], sent, received, split.group)
    outputs = _apply(module, forward, rows, own)
    outputs = _exchange_rows(outputs, received, sent, split.group)
    weighted = outputs * weights.flatten()[pairs][:, None]
    # Every pair has its own row, so the sum over the experts of a token always has the same order.
    by_pair = weighted.new_zeros(num_tokens * top_k, width).index_copy(0, pairs, weighted)
    return by_pair.view(num_tokens, top_k, width).sum(1).to(states.dtype)


def _apply(module: nn.Module, forward: _Forward, rows: Tensor, own: Tensor) -> Tensor:
    """Return the output of one of this rank's experts for each row.

    Args:
        module: the experts' module.
        forward: the module's forward pass.
        rows: [R, d].
        own: the expert of each row, among this rank's, int64 [R].
    """
    whole = dict(module._parameters)
    parts = {name: weight.to_local() for name, weight in _own(module) if isinstance(weight, DTensor)}
    if not len(rows):
        # The result depends on rows and weights all the same, so that this rank takes part in the backward pass and
        # has gradients to reduce.
        return rows + 0.0 * sum(part.sum() for part in parts.values())
    module._parameters.update(cast(Any, parts))  # unlike parameters, the parts may have an autograd history
    try:
        return forward(rows, own[:, None], rows.new_ones(len(rows), 1))
    finally:
        module._parameters.update(whole)


class _ExchangeRows(torch.autograd.Function):
    """All-to-all of rows in parts of different sizes; gradients return on the reverse path."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.reverse = received, sent, group
        return _exchange_rows_operator(rows.contiguous(), sent, received, group_name(group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent, received, group = ctx.reverse
        gradient = gradients[0].contiguous()
        return _exchange_rows_operator(gradient, sent, received, group_name(group)), None, None, None


def _exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sent[i]` of the rows to rank i of a group, in order, and return the `received[i]` rows of each rank i."""
    return _ExchangeRows.apply(rows, sent, received, group)  # pyright: ignore[reportReturnType]


# As `rlpack::all_to_all`, so that selective activation checkpointing can keep what it returns.
@torch.library.custom_op("rlpack::all_to_all_rows", mutates_args=())
def _exchange_rows_operator(rows: Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> Tensor:
    whole = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(whole, rows, list(received), list(sent), group=group_of_name(name))
    return whole


@_exchange_rows_operator.register_fake
def _simulated_exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> Tensor:
    return rows.new_empty(sum(received), *rows.shape[1:])

"""Balance the load of mixture-of-experts routers, and record and replay their choices.

A router gives each token its experts and their weights. Inside a `RoutingPass`, the routers that `Routing` wraps add
the gradient of the load-balancing loss, count the tokens of each expert, record the experts that they choose, or take
recorded ones. A router's own code computes the weights in all cases: only its choice, the call of `topk` over all
experts, is replaced.

The load-balancing loss is the sequence-wise one of DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20), the form for one
sequence of that of Switch Transformer (arXiv:2101.03961, equations 4 to 6). For a row of T tokens and one layer,

    f[e] = E / (k · T) · number of tokens that chose expert e
    p[t, e] = s[t, e] / Σ_e' s[t, e']                      (s: the router's scores, by softmax or sigmoid)
    loss = Σ_e f[e] · 1 / T · Σ_t p[t, e]

It is 1 if the load is even. f is treated as a constant in the gradient. The loss of a layer is the mean over the rows
of an optimizer step, each with the weight of its share of the step's response tokens; layers are added. A row's loss
depends on its own tokens alone, so the sum over microbatches and ranks is exact for any batching. A loss over the
tokens of a microbatch would not be, and for a loss over the tokens of the step, f is known only after the last forward
pass.

Each layer adds its gradient where it is computed, by `_AddLoss`, as in Megatron-LM: pipeline stages and activation
checkpointing need no other output of the model.

Replay (as in Zheng et al. 2025, arXiv:2507.18071, "routing replay") fixes the choice to the recorded one; the weights
are still computed, and differentiated, from the current scores at the recorded experts. A token's experts in the
update are those of its old log-prob, although the router's weights have changed.

Letters: L layers with experts, E experts of a layer, k experts of a token, T tokens and R rows of a microbatch, n slots
of this rank.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlpack.models.errors import ModelError
from rlpack.models.inputs import ModelInputs
from rlpack.models.router_choice import (
    NO_EXPERTS,
    FixedChoice,
    RouterChoice,
    choice_dtype,
    router_modules,
    router_shape,
)
from rlpack.models.row_parts import RowPart, own_places

_ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Routing:
    """The routers of a model on this rank.

    Attributes:
        shape: sizes of the routers.
        row_group: the ranks that share the tokens of a row; None for only this rank.
        is_counted: whether this rank's tokens are counted; of tensor parallel ranks, which have the same tokens, only
            the first's are.
    """

    def __init__(
        self, root: nn.Module, whole: nn.Module, *, row_group: dist.ProcessGroup | None = None, is_counted: bool = True
    ) -> None:
        """Wrap the routers of a model, in place.

        Args:
            root: the model in its final form: split, cut into stages and sharded.
            whole: the same with the layers of all stages.
            row_group: see above.
            is_counted: see above.

        Raises:
            ModelError: it has no routers, or layers differ.
        """
        shape = router_shape(whole)
        if shape is None:
            raise ModelError(NO_EXPERTS)
        self.shape, self.row_group, self.is_counted = shape, row_group, is_counted
        names = [name for name, _ in router_modules(whole)]
        for name, router in list(router_modules(root)):
            router.forward = functools.partial(_route, router.forward, names.index(name))


class RoutingPass:
    """The routers' behavior in the forward pass of one microbatch, and measurements of it.

    The recomputation of activations belongs to the same pass: a layer that runs again adds the same gradient, and
    measures nothing.

    Attributes:
        load: tokens of each expert, int64 [L, E].
        balance: Σ over layers and rows of the row's weight times its balance loss, fp64 [].
        changed: sum over layers of the tokens whose set of experts the replay changed, int64 [].
        recorded: experts of each token, [T, L, k] of `choice_dtype`; 0 for tokens of other ranks and layers of other
            stages. Without recording, empty.
    """

    def __init__(
        self,
        routing: Routing,
        row_weights: Tensor | None = None,
        *,
        coefficient: float = 0.0,
        replay: Tensor | None = None,
        records: bool = False,
    ) -> None:
        """Plan a pass.

        Args:
            routing: the routers.
            row_weights: weight of each row in the balance loss, f32 [R]; None leaves the loss out.
            coefficient: weight of the balance loss in the gradient.
            replay: experts that each token gets, integers [T, L, k]; None for those that the routers choose.
            records: whether to record the experts.
        """
        self._replay, self._records = replay, records
        self._routing, self._row_weights, self._coefficient = routing, row_weights, coefficient
        self._factors: dict[int, Tensor] = {}
        shape = routing.shape
        self.load = torch.zeros(shape.num_layers, shape.num_experts, dtype=torch.int64)
        self.balance = torch.zeros((), dtype=torch.float64)
        self.changed = torch.zeros((), dtype=torch.int64)
        self.recorded = torch.zeros(0, shape.num_layers, shape.top_k, dtype=choice_dtype(shape))

    def place_tokens(self, inputs: ModelInputs, part: RowPart | None) -> None:
        """Locate the tokens of the microbatch; `PackedModel` calls this before the routers run.

        Args:
            inputs: the microbatch.
            part: the slots that this rank runs; None for all.
        """
        device, num_tokens, num_rows = inputs.slots.device, inputs.num_tokens, len(inputs.row_lengths)
        own, places = own_places(part, inputs.slots)
        rows = torch.arange(num_rows, device=device).repeat_interleave(inputs.row_lengths, output_size=num_tokens)
        # By token, not by slot: rows that share a prompt each count its tokens.
        self._rows = rows[own]
        self._lengths = inputs.row_lengths.clamp(min=1)
        if self._row_weights is not None:
            self._row_weights = self._row_weights.to(device, torch.float32)
        self.load, self.balance, self.changed = (sums.to(device) for sums in (self.load, self.balance, self.changed))
        self._own, self._places = torch.arange(num_tokens, device=device)[own], places
        if self._records:
            self.recorded = self.recorded.new_zeros((num_tokens, *self.recorded.shape[1:]), device=device)
        if self._replay is not None:
            assert self._replay.shape == (num_tokens, *self.recorded.shape[1:])
            self._replay = self._replay.to(device, non_blocking=True)

    def route(self, layer: int, forward: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return a router's outputs: logits [n, E], weights [n, k] and indices of experts [n, k].

        Raises:
            ModelError: the router chooses experts in an unknown way.
        """
        with RouterChoice(self._routing.shape, self._fixed(layer)) as choice:
            outputs = forward(*arguments)
        if not choice.is_known(outputs):
            if self._coefficient > 0 or self._records or self._replay is not None:
                raise ModelError("a router doesn't choose experts in a known way; leave actor.moe out")
            return outputs
        logits, weights, index = outputs
        first = layer not in self._factors
        if first:
            self._factors[layer] = self._measure_load(layer, index)
            if self._records:
                self.recorded[:, layer].index_copy_(0, self._own, index[self._places].to(self.recorded.dtype))
            if choice.num_changed is not None and self._routing.is_counted:
                self.changed += choice.num_changed
        if self._row_weights is None or choice.scores is None or not self._routing.is_counted:
            return outputs
        scores = choice.scores.float()
        shares = (scores / scores.sum(1, keepdim=True)).index_select(0, self._places)
        loss = (shares * self._factors[layer][self._rows]).sum()
        if first:
            self.balance += loss.detach()
        if self._coefficient > 0 and loss.requires_grad:
            weights = _AddLoss.apply(weights, self._coefficient * loss)
        return logits, weights, index

    def _fixed(self, layer: int) -> FixedChoice | None:
        """Return the experts that a layer's tokens get."""
        if self._replay is None:
            return None
        return FixedChoice(self._places, self._replay[self._own, layer].long())

    @torch.no_grad()
    def _measure_load(self, layer: int, index: Tensor) -> Tensor:
        """Count the tokens of each expert; return the factor of each score in the loss, f32 [R, E].

        With context parallelism a collective, because f is that of the whole row.
        """
        num_experts, num_rows = self._routing.shape.num_experts, len(self._lengths)
        places = (self._rows[:, None] * num_experts + index[self._places]).flatten()
        counts = places.new_zeros(num_rows * num_experts).scatter_add_(0, places, torch.ones_like(places))
        counts = counts.view(num_rows, num_experts)
        if self._routing.is_counted:
            self.load[layer] = counts.sum(0)
        if self._row_weights is None:
            return counts.new_zeros(0)
        if self._routing.row_group is not None:
            dist.all_reduce(counts, group=self._routing.row_group)
        per_token = num_experts / (self._routing.shape.top_k * self._lengths.double().square())
        return (self._row_weights.double() * per_token)[:, None].mul(counts).float()


# The pass of the model that runs now in this thread.
_current: ContextVar[RoutingPass | None] = ContextVar("routing_pass", default=None)


def current_pass() -> RoutingPass | None:
    """Return the pass that the routers take part in, if any."""
    return _current.get()


@contextmanager
def in_pass(routing: RoutingPass | None) -> Iterator[None]:
    """Have routers take part in a pass inside the context; None for no pass."""
    token = _current.set(routing)
    try:
        yield
    finally:
        _current.reset(token)


def same_pass(contexts: Callable[[], _ContextPair] | None = None) -> _ContextPair:
    """Return contexts of a layer's forward pass and of its recomputation, which belongs to the same routing pass.

    The backward pass runs after that of the model, possibly after another microbatch's pass has started.

    Args:
        contexts: returns another such pair of contexts, which are entered as well.
    """
    forward, recomputation = (nullcontext(), nullcontext()) if contexts is None else contexts()
    return forward, _entered(in_pass(current_pass()), recomputation)


@contextmanager
def _entered(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _route(forward: Callable[..., Any], layer: int, *arguments: Any) -> Any:
    """Return a router's outputs, by the current pass if there is one."""
    routing = current_pass()
    return forward(*arguments) if routing is None else routing.route(layer, forward, arguments)


class _AddLoss(torch.autograd.Function):
    """Identity of a tensor whose backward pass also backpropagates a loss, with gradient 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.one = torch.ones_like(loss)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0], ctx.one

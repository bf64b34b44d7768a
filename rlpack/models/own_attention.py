"""Run a model with transformers' own attention: for padded rows, and as the reference of the model check."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

# transformers' attention for padded rows and for generation; `build_causal_lm` falls back to eager without it.
DEFAULT = "sdpa"
# The reference implementation of attention, which every model has.
REFERENCE = "eager"

_RECORDING = "rlpack_recording"


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run `model` with another attention implementation inside the context.

    A model whose attention doesn't go through transformers' attention interface keeps its own.
    """
    # Its message about such models would be logged on every rank.
    if not model._can_set_attn_implementation():
        yield
        return
    previous = model.config._attn_implementation or REFERENCE
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


@dataclass(frozen=True)
class LayerMask:
    """The mask that transformers builds for one attention layer.

    Attributes:
        layer: the layer's class name.
        allowed: bool [L, L], true where a query (row) sees a key; None without a mask, which is plain causal attention.
        window: the `sliding_window` that the layer passes to its attention function.
        rule: transformers' mask function of batch, head, query and key indices; None if the model built the mask
            itself, or with a function that reads tensors of the row.
    """

    layer: str
    allowed: Tensor | None
    window: int | None
    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None

    def allows(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return bool [Q, K], true where a query sees a key, at positions of a row of any length."""
        assert self.rule is not None
        first = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=queries.device)
        return self.rule(first, first, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1)).expand(
            1, 1, queries.shape[0], keys.shape[0]
        )[0, 0]


@torch.no_grad()
def layer_masks(model: PreTrainedModel, run: Callable[[], object]) -> list[LayerMask]:
    """Return the masks of the attention layers that `run` calls, in order, without computing attention.

    Args:
        model: the model that `run` calls.
        run: a forward pass of one row.
    """
    masks: list[LayerMask] = []
    # Layers share their masks, which are large.
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    rules: dict[int, Callable[..., Tensor]] = {}

    def make_mask(*sizes: Any, **options: Any) -> Tensor:
        mask = eager_mask(*sizes, **options)
        rule = options.get("mask_function")
        # Masks that may not be functions of indices alone are built entry by entry (vmap).
        by_index = options.get("attention_mask") is None and not options.get("use_vmap")
        if rule is not None and by_index and not _reads_rows(rule):
            rules[id(mask)] = rule
            made.append(mask)
        return mask

    made: list[Tensor] = []  # kept alive, so that no other mask reuses an id

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        allowed = rule = None
        if attention_mask is not None:
            rule = rules.get(id(attention_mask))
            if id(attention_mask) not in seen:
                # The mask of head 0, which all heads share. Additive masks allow the entries to which they add 0.
                entries = attention_mask[0, 0]
                seen[id(attention_mask)] = attention_mask, entries if entries.dtype == torch.bool else entries >= 0
            allowed = seen[id(attention_mask)][1]
        masks.append(LayerMask(type(module).__name__, allowed, options.get("sliding_window"), rule))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_RECORDING, record)
    AttentionMaskInterface.register(_RECORDING, make_mask)
    try:
        with attention_implementation(model, _RECORDING):
            run()
    finally:
        # Registered functions live as long as the process, and these hold all masks; there is no way to unregister.
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_RECORDING, None)
    return masks


def _reads_rows(rule: Callable[..., Tensor]) -> bool:
    """Return whether a mask function reads a tensor with an entry for each token, which has none for longer rows."""
    if not inspect.isfunction(rule):
        return True
    for cell in rule.__closure__ or ():
        for value in cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,):
            if isinstance(value, Tensor) and value.ndim > 1:
                return True
            if inspect.isfunction(value) and _reads_rows(value):
                return True
    return False


def forward_arguments(model: nn.Module, **arguments: Any) -> dict[str, Any]:
    """Return the arguments that the model's forward accepts; some models take no positions."""
    names = inspect.signature(model.forward).parameters
    return {name: value for name, value in arguments.items() if name in names}

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
# The plain definition of attention, which every model has.
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
    """

    layer: str
    allowed: Tensor | None
    window: int | None


@torch.no_grad()
def layer_masks(model: PreTrainedModel, run: Callable[[], object]) -> list[LayerMask]:
    """Return the masks of the attention layers that `run` calls, in order; nothing attends meanwhile.

    Args:
        model: the model that `run` calls.
        run: a forward pass of one row.
    """
    masks: list[LayerMask] = []
    # Layers share their masks, which are large.
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        allowed = None
        if attention_mask is not None:
            if id(attention_mask) not in seen:
                # Of head 0: heads share their mask. Additive masks allow where they add 0.
                entries = attention_mask[0, 0]
                seen[id(attention_mask)] = attention_mask, entries if entries.dtype == torch.bool else entries >= 0
            allowed = seen[id(attention_mask)][1]
        masks.append(LayerMask(type(module).__name__, allowed, options.get("sliding_window")))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_RECORDING, record)
    AttentionMaskInterface.register(_RECORDING, eager_mask)
    with attention_implementation(model, _RECORDING):
        run()
    return masks


def forward_arguments(model: nn.Module, **arguments: Any) -> dict[str, Any]:
    """Return the arguments that the model's forward names: some models take no positions."""
    names = inspect.signature(model.forward).parameters
    return {name: value for name, value in arguments.items() if name in names}

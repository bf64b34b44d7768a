"""FLOPs of sequences, from the model's shape: costs for planning, and the work of a phase for rates and MFU.

A backward pass takes twice the linear and twice the quadratic FLOPs of a forward pass. Plans depend only on their
ratio, which stays the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from rlpack.models.packed import language_model
from rlpack.models.text_settings import experts_per_token, num_experts, settings_of, settings_of_layer
from rlpack.packing import Cost

# Kinds of layers (`layer_types`) without products of pairs of tokens.
_WITHOUT_ATTENTION = {"linear_attention", "mamba", "conv", "mlp", "moe"}


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs that a model needs for real tokens, without padding and without recomputation.

    These are the FLOPs of MFU as PaLM defines it (Chowdhery et al., 2022, arXiv:2204.02311, appendix B), but with
    causal attention at half of all pairs, and with the output layer only at the tokens that it scores.

    Attributes:
        body: forward pass without the output layer and without attention in a window.
        head: forward FLOPs of the output layer per scored token.
        trained: share of the matrix weights that a token uses that get a gradient.
        windows: window sizes in keys, and heads times their size, summed over the layers with that window.
    """

    body: Cost
    head: float = 0.0
    trained: float = 1.0
    windows: Mapping[int, float] = field(default_factory=dict)

    def forward(self, lengths: np.ndarray, scored: int) -> float:
        """Return the FLOPs of a forward pass.

        Args:
            lengths: tokens of each row, int64 [B].
            scored: tokens that the output layer scores.
        """
        return self._attention(lengths) + self.body.linear * float(lengths.sum()) + self.head * scored

    def update(self, lengths: np.ndarray, scored: int) -> float:
        """Return the FLOPs of a forward and a backward pass.

        In the backward pass, a product takes its FLOPs once for the gradient of its input, and once more for that of
        its weight if the weight is trained. Both factors of attention's products need a gradient. Arguments are those
        of `forward`.
        """
        attention = self._attention(lengths)
        return 3.0 * attention + (2.0 + self.trained) * (self.forward(lengths, scored) - attention)

    def _attention(self, lengths: np.ndarray) -> float:
        """Return the forward FLOPs of attention's products.

        A token attends to itself and the keys before it, as many as the window has: L²/2 pairs of a row up to a window
        of w, and w·L - w²/2 of a longer one.
        """
        rows = lengths.astype(np.float64)
        flops = self.body.quadratic * float(np.square(rows).sum())
        for window, width in self.windows.items():
            keys = np.minimum(rows, window)
            flops += 4.0 * width * float((keys * rows - keys**2 / 2).sum())
        return flops


def sequence_cost(model: PreTrainedModel, longest: int | None = None) -> Cost:
    """Return the FLOPs of a sequence of L tokens as `linear · L + quadratic · L²`, all of its tokens scored.

    The model may be on the meta device.

    - Each matrix weight takes 2 FLOPs per token. In a mixture of experts, only the routed share of the experts counts;
      an embedding is a lookup and free, unless it is also the output head. Encoders of images don't count.
    - Causal attention of H heads of size D takes 4·H·D FLOPs per pair of a token and an earlier key: 2·H·D·L² per
      layer (Kaplan et al., 2020, arXiv:2001.08361, appendix B, which ignores that the mask halves it). In latent
      attention, D is the mean of the sizes of keys and values.
    - A layer with a window of w keys counts w / 2 keys per token: exact for L = w, and half the true number for much
      longer sequences. If no sequence is longer than the window, its attention is like any other.

    Args:
        model: the model.
        longest: tokens of the longest sequence, if known.
    """
    flops = model_flops(model)
    linear, quadratic = flops.body.linear + flops.head, flops.body.quadratic
    for window, width in flops.windows.items():
        if longest is not None and longest <= window:
            quadratic += 2.0 * width
        else:
            linear += 2.0 * width * window
    return Cost(linear, quadratic)


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """Return the FLOPs of a model, counted as in `sequence_cost`; frozen weights need fewer in an update."""
    shape = settings_of(model.config)
    head = model.get_output_embeddings()
    layers = list(_attention_layers(shape)) if shape.get("num_attention_heads") else []  # else no quadratic part
    full = sum(width for width, window in layers if window is None)
    windows: dict[int, float] = defaultdict(float)
    for width, window in layers:
        if window is not None:
            windows[window] += width
    inner = list(_products(model, shape))
    outer = [(head.weight, float(head.weight.numel()))] if isinstance(head, nn.Linear) else []
    trained = sum(used for weight, used in inner + outer if weight.requires_grad)
    used_inside, used_outside = (sum(used for _, used in products) for products in (inner, outer))
    return ModelFlops(
        Cost(linear=2.0 * used_inside, quadratic=2.0 * full),
        head=2.0 * used_outside,
        trained=trained / max(1.0, used_inside + used_outside),
        windows=windows,
    )


def _head_size(shape: Mapping[str, Any]) -> float:
    """Return the size of a head; where keys and values differ (latent attention), the mean of both."""
    if "qk_nope_head_dim" in shape and "qk_rope_head_dim" in shape:  # its head_dim is the rotary part of keys
        return (shape["qk_nope_head_dim"] + shape["qk_rope_head_dim"] + shape["v_head_dim"]) / 2
    return shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]


def _products(model: PreTrainedModel, shape: Mapping[str, Any]) -> Iterator[tuple[nn.Parameter, float]]:
    """Yield the inner matrices that tokens are multiplied by, and how many weights of each a token uses.

    Lookups aren't products. Encoders of images and sounds, which are outside the decoder or models inside it, aren't
    run.
    """
    decoder, head = language_model(model).get_decoder(), model.get_output_embeddings()
    inner = [
        child for child in decoder.children() if any(isinstance(part, PreTrainedModel) for part in child.modules())
    ]
    if not _has_matrices(child for child in decoder.children() if child not in inner):
        inner = []  # the decoder consists of models, such as BLT's
    others = [*inner, *(module for module in decoder.modules() if isinstance(module, nn.Embedding))]
    others += [] if head is None else [head]
    skipped = {id(weight) for module in others for weight in module.parameters()}
    convolutions = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Conv1d)}
    for name, weight in decoder.named_parameters():
        if weight.ndim >= 2 and id(weight) not in skipped:
            # JetMoE's MLPs call stacked experts otherwise, and its attention has the router among the experts.
            is_stack = weight.ndim == 3 and len(weight) == num_experts(shape) and id(weight) not in convolutions
            is_routed = is_stack or (".experts." in name and ".router." not in name)
            share = _routed_share(name, weight, shape) if is_routed else 1.0
            yield weight, weight.numel() * share * _num_runs(name, shape)


def _has_matrices(modules: Iterable[nn.Module]) -> bool:
    """Return whether modules, lookups aside, have matrices."""
    parts = [part for module in modules for part in module.modules() if not isinstance(part, nn.Embedding)]
    return any(weight.ndim >= 2 for part in parts for weight in part.parameters(recurse=False))


def _routed_share(name: str, weight: nn.Parameter, shape: Mapping[str, Any]) -> float:
    """Return the share of a weight of routed experts that a token uses."""
    layer = next((int(part) for part in name.split(".") if part.isdigit()), 0)
    num_stacked = len(weight) if weight.ndim == 3 else num_experts(shape)
    return min(1.0, experts_per_token(shape, layer) / max(1, num_stacked))


def _num_runs(name: str, shape: Mapping[str, Any]) -> int:
    """Return how often a token passes a layer: several times in the two stacks of HRM's recurrence."""
    stack = name.partition(".")[0]
    if "H_cycles" not in shape or stack not in {"H_module", "L_module"}:
        return 1
    return shape["H_cycles"] * (shape["L_cycles"] if stack == "L_module" else 1)


def _attention_layers(shape: Mapping[str, Any]) -> Iterator[tuple[float, int | None]]:
    """Yield heads times their size, and the window, None for full attention, of each layer with attention."""
    kinds = shape.get("layer_types") or ["sliding_attention" if shape.get("sliding_window") else "full_attention"]
    for layer in range(shape["num_hidden_layers"]):
        own = settings_of_layer(shape, layer)
        kind, window = kinds[layer % len(kinds)], own.get("sliding_window")
        width = own["num_attention_heads"] * _head_size(own)
        if kind == "sliding_attention" and window:
            yield width, window
        elif kind not in _WITHOUT_ATTENTION:
            yield width, None

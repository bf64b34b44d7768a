"""What a sequence costs a model, for plans: floating-point operations of a forward pass, from the model's shape.

A backward pass takes twice as many of both kinds, so the proportion, which is all that a plan asks for, is the same.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlpack.packing import Cost


def sequence_cost(model: PreTrainedModel) -> Cost:
    """Return the FLOPs of a sequence of L tokens as `linear · L + quadratic · L²`; the model may be on the meta device.

    - Each weight of a matrix multiplies every token: 2 FLOPs. Of a mixture of experts, a token meets the
      share of the experts that it is routed to; an embedding is looked up and free, unless it is also the head.
    - Causal attention of H heads of size D takes 4·H·D FLOPs for every token and key before it: 2·H·D·L² a layer
      (Kaplan et al., 2020, arXiv:2001.08361, appendix B, where the mask's half is left out).
    - A layer with a window of w keys counts w / 2 keys for every token, which is right for L = w and too
      few for much longer sequences by a factor of two.
    """
    text = model.config.get_text_config()
    head = model.get_output_embeddings()
    weights = sum(_used_weights(model, text))
    if isinstance(head, nn.Linear):
        weights += head.weight.numel()
    heads = getattr(text, "num_attention_heads", 0)  # a model without attention has no quadratic part
    width = heads * _head_size(text) if heads else 0
    windows = list(_windows(text)) if heads else []
    full = sum(window is None for window in windows)
    windowed = sum(window for window in windows if window is not None)
    return Cost(linear=2.0 * weights + 2.0 * width * windowed, quadratic=2.0 * width * full)


def _used_weights(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[float]:
    """Yield how many weights of each matrix between embedding and head a token is multiplied with."""
    outer = {id(parameter) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None
             for parameter in end.parameters()}  # fmt: skip
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or id(parameter) in outer:
            continue
        yield parameter.numel() * (_routed_share(config) if ".experts." in name else 1.0)


def _routed_share(config: Any) -> float:
    """Return which share of a layer's routed experts sees a token."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((count for key in keys if (count := getattr(config, key, 0))), 1)
    return min(1.0, getattr(config, "num_experts_per_tok", 1) / experts)


def _head_size(config: Any) -> int:
    """Return the size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // max(1, config.num_attention_heads)


def _windows(config: Any) -> Iterator[int | None]:
    """Yield the window of each layer, None where it attends to all tokens before."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    for layer in range(config.num_hidden_layers):
        kind = kinds[layer % len(kinds)]
        if kind == "sliding_attention" and window:
            yield window
        elif "linear" not in kind:
            yield None

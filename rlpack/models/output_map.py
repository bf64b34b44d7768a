"""Measure what a model does around its output layer: scale hidden states or logits, cap logits, drop padding tokens.

Architectures name these operations in their own ways, and the same config key multiplies in one and divides in another.
They are therefore measured on the model: a few tokens run through it while hooks record the inputs of its output layer
and replace its outputs with known numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlpack.models.errors import ModelError
from rlpack.models.own_attention import REFERENCE, attention_implementation
from rlpack.models.packed import language_model
from rlpack.models.parts import forward_device

# Config keys of scaled logits, for models that can't be measured; 1 changes nothing.
_LOGIT_SCALES = (
    *("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier_scale"),
    "final_logit_softcapping",
)
_NUM_TOKENS = 4
# Allowed relative difference from a map: a few roundings.
_LOGIT_ROUNDING = 64 * torch.finfo(torch.float32).eps
_HIDDEN_ROUNDINGS = 8


@dataclass(frozen=True)
class OutputMap:
    """The map from hidden states h to logits: cap · tanh(scale · layer(hidden_scale · h) / cap).

    Attributes:
        hidden_scale: multiplies hidden states.
        scale: multiplies the layer's outputs; positive.
        softcap: bound on the logits; None for none, and then logits are scale · layer(hidden_scale · h).
        num_logits: the logits that are used, the first of the layer's outputs; None for all.
    """

    hidden_scale: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    num_logits: int | None = None


@torch.no_grad()
def measure_output_map(model: PreTrainedModel, head: nn.Linear) -> OutputMap:
    """Return the map that a model applies around its output layer.

    On the meta device, where nothing can be measured, it is the default map, which has no scales and no cap.

    Args:
        model: with its weights, not sharded; its training mode is restored.
        head: its output layer.

    Raises:
        ModelError: the model does something else, so its log-probs can't be computed from its output layer, or its
            hidden states aren't finite.
    """
    if head.weight.is_meta:
        return OutputMap()
    passed: dict[str, Tensor] = {}
    try:
        logits = _run(model, head, passed)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - architectures fail in their own ways; the model check says how
        passed.clear()
        logits = None
    if logits is None or not {"hidden", "given", "left"} <= passed.keys():
        return _unmeasured(model)
    if not passed["hidden"].isfinite().all():
        raise ModelError(
            f"{type(model).__name__}: the first {_NUM_TOKENS} tokens have hidden states that are NaN or infinite, as "
            "with weights that are damaged or have diverged; use other weights"
        )
    hidden_scale = _hidden_scale(passed["hidden"], passed["given"])
    left = passed["left"][..., : logits.shape[-1]]
    fitted = _fit(left.flatten().double(), logits.flatten().double()) if left.shape == logits.shape else None
    if hidden_scale is None or fitted is None:
        raise ModelError(
            f"{type(model).__name__}: the model's own output layer has further operations (a transform, a bias) "
            "besides a scale and a soft cap, so log-probs can't be computed from its last linear layer; use another "
            "model"
        )
    scale, softcap = fitted
    fewer = logits.shape[-1] < head.out_features
    return OutputMap(hidden_scale, scale, softcap, logits.shape[-1] if fewer else None)


@torch.no_grad()
def run_measured_tokens(model: PreTrainedModel) -> None:
    """Run this pipeline stage for the last one, which measures the map."""
    was_training = model.training
    try:
        model.eval()
        with attention_implementation(model, REFERENCE):
            language_model(model)(input_ids=_tokens(model), use_cache=False)
    finally:
        model.train(was_training)


def _tokens(model: PreTrainedModel) -> Tensor:
    """Return the tokens that the map is measured with, int64 [1, 4]."""
    return torch.arange(_NUM_TOKENS, device=forward_device(model))[None] % model.config.get_text_config().vocab_size


def _run(model: PreTrainedModel, head: nn.Linear, passed: dict[str, Tensor]) -> Tensor:
    """Run a few tokens; return the logits, and add hidden states, layer inputs and replaced outputs to `passed`."""

    def record_hidden(module: nn.Module, arguments: Any, outputs: Any) -> None:
        passed["hidden"] = outputs[0]

    def replace_outputs(module: nn.Module, arguments: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
        passed["given"] = arguments[0]
        steps = torch.linspace(-5, 5, outputs.numel() // 2 + 1, dtype=torch.float64)
        magnitudes = torch.cat([10**steps, -(10**steps)])[: outputs.numel()]
        order = torch.randperm(outputs.numel(), generator=torch.Generator().manual_seed(0))
        passed["left"] = (
            magnitudes[order]
            .reshape(outputs.shape)
            .to(outputs.device, torch.promote_types(outputs.dtype, torch.float32))
        )
        return passed["left"].clone()

    was_training = model.training
    hooks = [
        language_model(model).register_forward_hook(record_hidden),
        head.register_forward_hook(replace_outputs),
    ]
    try:
        model.eval()
        with attention_implementation(model, REFERENCE):
            return model(input_ids=_tokens(model), use_cache=False).logits
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()


def _unmeasured(model: PreTrainedModel) -> OutputMap:
    """Return the default map for a model that can't be measured; raise if its config scales or caps logits."""
    settings = model.config.get_text_config().to_dict()
    for name in _LOGIT_SCALES:
        if settings.get(name) not in {None, 1}:
            raise ModelError(
                f"{type(model).__name__} has {name}={settings[name]}, and what it does with it can't be measured; only "
                "models with plain logits can be trained so"
            )
    return OutputMap()


def _hidden_scale(hidden: Tensor, given: Tensor) -> float | None:
    """Return the factor from hidden states to the layer's inputs, None if they aren't proportional."""
    if hidden.numel() != given.numel():
        return None
    rounding = _HIDDEN_ROUNDINGS * max(torch.finfo(tensor.dtype).eps for tensor in (hidden, given))
    hidden, given = hidden.flatten().double(), given.flatten().double()
    scale = ((hidden @ given) / (hidden @ hidden)).item()
    if not (given - scale * hidden).norm() <= rounding * given.norm():
        return None
    return 1.0 if abs(scale - 1) <= rounding else scale


def _fit(left: Tensor, logits: Tensor) -> tuple[float, float | None] | None:
    """Return scale and soft cap of the map from a layer's outputs to logits, None if it is another map."""
    smallest, largest = left.abs().argmin(), left.abs().argmax()
    scale = (logits[largest] / left[largest]).item()
    if scale > 0 and bool(((logits - scale * left).abs() <= _LOGIT_ROUNDING * (scale * left).abs()).all()):
        return (1.0 if abs(scale - 1) <= _LOGIT_ROUNDING else scale), None
    # Largest outputs are saturated; at the smallest ones tanh is linear.
    scale, cap = (logits[smallest] / left[smallest]).item(), logits.abs().max().item()
    if not (scale > 0 and cap > 0):
        return None
    capped = cap * torch.tanh(left * (scale / cap))
    if not bool(((logits - capped).abs() <= _LOGIT_ROUNDING * capped.abs()).all()):
        return None
    return (1.0 if abs(scale - 1) <= _LOGIT_ROUNDING else scale), cap

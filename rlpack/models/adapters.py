"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685), with the `peft` library.

A layer W·x becomes W·x + s·B·(A·x) with s = alpha / rank. A and B are trained, W is frozen; B starts at zero, so the
model starts unchanged. Other roles and exports get the merged weights W + s·B·A under the base model's names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rlpack.config.sections.optimization import Lora
from rlpack.models.errors import ModelError
from rlpack.models.patterns import match_patterns

_NAME = "default"
_ROOT = "model"  # name of the model in the module that peft gets
# peft turns the layer `q_proj` into q_proj.base_layer, q_proj.lora_A.default and q_proj.lora_B.default.
_BASE, _DOWN, _UP = ".base_layer.", f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
_DROPOUT = f".lora_dropout.{_NAME}"


@dataclass(frozen=True)
class Adapter:
    """The names of an adapter's matrices, and the scale of their product.

    `down` is A, `up` is B.
    """

    down: str
    up: str
    scale: float


def adapter_layers(model: PreTrainedModel, settings: Lora) -> list[str]:
    """Return the names of the linear layers in decoder layers that a target matches.

    The output head gets no adapter, because `linear_logprobs` reads its weight directly. Nor do routed experts that
    are one parameter for all of them.

    Raises:
        ModelError: the model has no such layers, there is no target, or a target matches none.
    """
    kinds = set(model._no_split_modules or ())
    inside = [name for name, module in model.named_modules() if type(module).__name__ in kinds]
    layers = [
        name
        for name, module in model.named_modules()
        if is_linear(module) and any(name.startswith(f"{layer}.") for layer in inside)
    ]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no linear layers in its decoder layers, so it can't have adapters; "
            "set actor.lora.rank=0"
        )
    if not settings.targets:
        raise ModelError('actor.lora.targets is [], so no layer would get an adapter; set some, or all of them: ["*"]')
    matching = match_patterns(settings.targets, layers, "actor.lora.targets")
    return [name for name in layers if name in matching]


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies vectors by its weight; routers and grouped layers also derive from Linear."""
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return isinstance(module, nn.Linear)
    try:
        output = module(module.weight.new_zeros(1, module.in_features))
    except Exception:  # noqa: BLE001 - it takes other inputs
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, module.out_features)


def add_adapters(model: PreTrainedModel, settings: Lora, *, seed: int) -> None:
    """Add adapters to a model in place and freeze its other weights; call before sharding.

    Args:
        model: any causal language model with linear layers; on the meta device, adapters still get their values.
        settings: `rank` at least 1.
        seed: random seed for the matrices A; the same on all ranks.

    Raises:
        ModelError: a target matches no linear layer.
    """
    from peft import LoraConfig, inject_adapter_in_model  # imported here because it takes seconds

    layers = adapter_layers(model, settings)
    adapter = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]  # only ever divided by the rank
        lora_dropout=settings.dropout,
        target_modules="|".join(f"{_ROOT}.{name}".replace(".", r"\.") for name in layers),
    )
    # In a model with a config of transformers, peft adapts routed experts, which can't be merged, in place of every
    # layer with a name such as gate_proj, even of dense MLPs.
    root = nn.ModuleDict({_ROOT: model})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with _adapters_on_cpu(model, layers):
                inject_adapter_in_model(adapter, root, adapter_name=_NAME)  # also freezes all other weights
        except ValueError as error:
            raise ModelError(
                f"{type(model).__name__} can't have adapters on all layers of actor.lora.targets="
                f"{list(settings.targets)}: {error}; name other layers, such as *.q_proj"
            ) from error


@contextmanager
def _adapters_on_cpu(model: nn.Module, layers: list[str]) -> Iterator[None]:
    """Give layers on the meta device placeholder weights on the CPU inside the context.

    peft creates adapters on the weight's device; on the meta device their values would be lost. A placeholder is a
    single number, expanded to the weight's shape.
    """
    weights = {name: model.get_submodule(name).get_parameter("weight") for name in layers}
    weights = {name: weight for name, weight in weights.items() if weight.is_meta}
    modules = {name: model.get_submodule(name) for name in weights}
    for name, weight in weights.items():
        entry = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        modules[name].register_parameter("weight", nn.Parameter(entry))
    try:
        yield
    finally:
        for name, weight in weights.items():
            modules[name].register_parameter("weight", weight)
            weight.requires_grad_(False)


def find_adapters(model: nn.Module) -> dict[str, Adapter]:
    """Return a model's adapters by the names of the weights that they are added to."""
    layers = [name.removesuffix(_DOWN) for name, _ in model.named_parameters() if name.endswith(_DOWN)]
    scales = {layer: cast(Any, model.get_submodule(layer)).scaling[_NAME] for layer in layers}
    return {f"{layer}{_BASE}weight": Adapter(layer + _DOWN, layer + _UP, scale) for layer, scale in scales.items()}


def merged_name(name: str) -> str | None:
    """Return a weight's name in the model without adapters, None for an adapter's own weights.

    >>> merged_name("layers.0.q_proj.base_layer.weight"), merged_name("layers.0.q_proj.lora_A.default.weight")
    ('layers.0.q_proj.weight', None)
    """
    return None if name.endswith((_DOWN, _UP)) else name.replace(_BASE, ".")


def peft_name(name: str) -> str | None:
    """Return the name of an adapter's matrix in peft's files, None for other weights.

    >>> peft_name("model.layers.0.q_proj.lora_A.default.weight"), peft_name("model.layers.0.q_proj.base_layer.weight")
    ('base_model.model.model.layers.0.q_proj.lora_A.weight', None)
    """
    return "base_model.model." + name.replace(f".{_NAME}.", ".") if name.endswith((_DOWN, _UP)) else None


def is_adapter_dropout(name: str) -> bool:
    """Whether the module of this name is an adapter's dropout."""
    return name.endswith(_DROPOUT)


@contextmanager
def dropout_seed(settings: Lora, device: torch.device, *numbers: int) -> Iterator[None]:
    """Seed the adapters' dropout by `numbers` inside the context; do nothing without dropout.

    Dropout then depends only on the run's seed and the microbatch's position in the run. The process's random state is
    restored on exit.
    """
    if settings.rank == 0 or settings.dropout == 0:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))
        yield

"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank matrices beside frozen weights, by the `peft` library.

A layer W becomes W·x + s·B·(A·x) with s = alpha / rank. A and B are trained, W is not; B begins at zero, so the model
begins as what it was. Whoever else gets weights (rollout, reference, export) gets W + s·B·A under the plain model's
names, and knows of no adapter.
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
from rlpack.models.patterns import chosen

_NAME = "default"
# What peft makes of the layer `q_proj`: q_proj.base_layer, q_proj.lora_A.default and q_proj.lora_B.default.
_BASE, _DOWN, _UP = ".base_layer.", f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
_DROPOUT = f".lora_dropout.{_NAME}"


@dataclass(frozen=True)
class Adapter:
    """The names of an adapter's matrices, A `down` and B `up`, and what their product is scaled by."""

    down: str
    up: str
    scale: float


def adapter_layers(model: PreTrainedModel, settings: Lora) -> list[str]:
    """Return the names of the linear layers that get an adapter: those inside of decoder layers that a target matches.

    The head gets none: its weight goes by itself into `linear_logprobs`.

    Raises:
        ModelError: the model has no such layers, there is no target, or one matches none.
    """
    kinds = set(model._no_split_modules or ())
    inside = [name for name, module in model.named_modules() if type(module).__name__ in kinds]
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(name.startswith(f"{layer}.") for layer in inside)
    ]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no linear layers in its decoder layers, so it takes no adapters; "
            "set actor.lora.rank=0"
        )
    if not settings.targets:
        raise ModelError('actor.lora.targets is [], so no layer would get an adapter; name some, or all of them: ["*"]')
    found = chosen(settings.targets, layers, "actor.lora.targets")
    return [name for name in layers if name in found]


def add_adapters(model: PreTrainedModel, settings: Lora, *, seed: int) -> None:
    """Put adapters into a model, in place, and freeze all that it had; before it is sharded.

    Args:
        model: any causal language model with linear layers.
        settings: `rank` at least 1.
        seed: of the matrices A; all ranks give the same.

    Raises:
        ModelError: a target matches no linear layer.
    """
    from peft import LoraConfig, inject_adapter_in_model  # seconds of imports, that a run without adapters saves

    layers = adapter_layers(model, settings)
    adapter = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]  # only ever divided by the rank
        lora_dropout=settings.dropout,
        target_modules="|".join(name.replace(".", r"\.") for name in layers),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(adapter, model, adapter_name=_NAME)  # which freezes all the rest


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a model by the names of the weights that they stand beside."""
    layers = [name.removesuffix(_DOWN) for name, _ in model.named_parameters() if name.endswith(_DOWN)]
    scales = {layer: cast(Any, model.get_submodule(layer)).scaling[_NAME] for layer in layers}
    return {f"{layer}{_BASE}weight": Adapter(layer + _DOWN, layer + _UP, scale) for layer, scale in scales.items()}


def plain_name(name: str) -> str | None:
    """Return the name that a weight has in the model without adapters, None for an adapter's own.

    >>> plain_name("layers.0.q_proj.base_layer.weight"), plain_name("layers.0.q_proj.lora_A.default.weight")
    ('layers.0.q_proj.weight', None)
    """
    return None if name.endswith((_DOWN, _UP)) else name.replace(_BASE, ".")


def is_adapter_dropout(name: str) -> bool:
    """Whether the module of this name is an adapter's dropout."""
    return name.endswith(_DROPOUT)


@contextmanager
def dropout_seed(settings: Lora, device: torch.device, *numbers: int) -> Iterator[None]:
    """Let adapters' dropout inside draw from a stream of its own, that `numbers` fix; without dropout do nothing.

    So what is dropped follows from the run's seed and the place of a microbatch in the run, and the process's random
    state is left alone.
    """
    if settings.rank == 0 or settings.dropout == 0:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))
        yield

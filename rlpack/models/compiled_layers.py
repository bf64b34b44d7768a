"""Compile the decoder layers of a model with `torch.compile`.

Each layer's own forward pass is compiled, inside activation checkpointing and FSDP2's hooks, which stay as they are.
Attention is opaque to the compiler. It runs between two compiled parts of the layer, with the same kernel as without
compilation, and reads sequence lengths from the host, so that no compiled code depends on them. Lengths of packed rows
are symbolic. A layer is therefore compiled once with gradients and once without, and both again for the single slot of
dummy microbatches. After that, no row triggers another compilation. Layers of one class share their code.

Outputs and gradients equal those without compilation up to rounding.
"""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from rlpack.models import attention
from rlpack.models.checks import has_experts
from rlpack.models.compiled_graphs import CompiledGraphs
from rlpack.models.cpu_products import FasterLinear
from rlpack.models.errors import ModelError
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import decoder_layers

# Graphs of one class of layers: at most eight parts, with and without gradients, for one slot and for several, and as
# many again for layers of the same class that differ, such as those with a window.
_MOST_GRAPHS = 64


def compile_layers(model: PackedModel, role: str = "actor", *, backend: str = "inductor") -> CompiledGraphs:
    """Compile a model's decoder layers in place, before or after it is sharded; they are compiled when they first run.

    Args:
        model: one whose rows are packed.
        role: the model's role, for errors.
        backend: backend of `torch.compile`.

    Raises:
        ModelError: the model has experts, whose token counts depend on the data.
    """
    if has_experts(model.model):
        raise ModelError(
            f"{type(model.model).__name__} routes tokens to experts, whose numbers of tokens change with every row, so "
            f"its layers would be recompiled repeatedly; set {role}.compile=false"
        )
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.attention))
    compiled: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in decoder_layers(model):
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = _with_compiled_forward(kind, backend)
        layer.__class__ = compiled[kind]
        for module in layer.modules():
            if type(module) is FasterLinear:  # on CPUs; it rounds up the number of rows, which can't be compiled
                module.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]  # has the same attributes
    return CompiledGraphs(role, _MOST_GRAPHS * len(compiled))


def _with_compiled_forward(kind: type[nn.Module], backend: str) -> type[nn.Module]:
    """Return a class of layers like `kind` with a compiled forward pass; transformers adds checkpointing to it."""
    own = next(base for base in kind.__mro__ if "forward" in vars(base)).forward
    # transformers replaces a layer's forward by one that checkpoints activations, which must not be compiled.
    forward = torch.compile(inspect.unwrap(own), backend=backend, dynamic=True)

    def run(self: nn.Module, *args: Any, **options: Any) -> Any:
        return forward(self, *args, **options)

    return type(kind.__name__, (kind,), {"forward": run, "__module__": kind.__module__})

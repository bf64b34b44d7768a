"""Selective activation checkpointing: keep the outputs of costly operations, recompute the rest in backward.

Matrix products, attention and exchanges of tokens between ranks take nearly all the time of a layer's forward pass,
but their outputs are only a part of its activations. Norms, rotary embeddings, activation functions and residual sums
are recomputed from them.

Which outputs are kept depends only on the operation. All ranks therefore keep the same ones, and recompute and
communicate in the same order.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from rlpack.models.errors import ModelError
from rlpack.models.parts import local_part

# Operators by the names they are registered under; those of packages that aren't installed match nothing.
_KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "mkldnn::_linear_pointwise",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
        "transformers::grouped_mm_fallback",
        "rlpack::all_to_all",
        "rlpack::all_to_all_rows",
    }
)
# aten::_scaled_dot_product_flash_attention, …_flash_attention_for_cpu, …_efficient_attention, …_cudnn_attention.
_ATTENTION = "aten::_scaled_dot_product_"


def selective_contexts(key: str) -> tuple[Any, Any]:
    """Return the contexts of a layer's forward pass and of its recomputation, for `torch.utils.checkpoint`.

    Args:
        key: configuration key that chose selective checkpointing, for the error.
    """
    # FSDP may open more profiler ranges in the recomputation than in the forward pass, which PyTorch 2.13 refuses:
    # experts are separate FSDP units inside a layer, and with shared experts, whose backward pass comes first, the
    # layer is recomputed before theirs has started.
    ranges = torch.ops.profiler
    SAC_IGNORED_OPS.update((ranges._record_function_enter_new.default, ranges._record_function_exit._RecordFunction))
    policy = _KeptOutputs(key)
    forward, recomputation = create_selective_checkpoint_contexts(policy)
    policy.storage = forward.storage
    return forward, recomputation


def is_kept(operation: str) -> bool:
    """Return whether the outputs of an operator are kept.

    Args:
        operation: its name, with or without an overload.

    >>> is_kept("aten::mm"), is_kept("aten::_scaled_dot_product_flash_attention_for_cpu"), is_kept("aten::silu")
    (True, True, False)
    """
    name = operation.partition(".")[0]
    return name in _KEPT or name.startswith(_ATTENTION)


class _KeptOutputs:
    """The policy of one layer's forward pass: decides which outputs are kept, and checks that none of them changes.

    torch checks this by version counters, which miss a change through a view as `nn.Linear` returns it for
    three-dimensional inputs (`_unsafe_view`): the backward pass would then give wrong gradients without an error.

    Attributes:
        storage: torch's own store of the outputs that are kept. PyTorch before 2.13 decides before an operator runs, so
            outputs are known from there alone.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._memory: set[int] = set()
        self.storage: Mapping[Any, Any] = {}

    def __call__(
        self, context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        name = operation.name()
        if context.is_recompute:
            # PyTorch before 2.13 asks again. By now, kept outputs may be freed, and others have their memory.
            return CheckpointPolicy.MUST_SAVE if is_kept(name) else CheckpointPolicy.PREFER_RECOMPUTE
        if is_kept(name):
            self._memory |= _memories(vars(context).get("op_output"))
            return CheckpointPolicy.MUST_SAVE
        written = _written(operation, args, kwargs) if operation._schema.is_mutable else []
        if written and not self._kept_memory().isdisjoint(_memories(written)):
            raise ModelError(
                f"a layer of this model changes the output of a matrix product in place ({name}), which "
                f"{self._key}=selective keeps for the backward pass; set {self._key} to full or none"
            )
        return CheckpointPolicy.PREFER_RECOMPUTE

    def _kept_memory(self) -> set[int]:
        """Return the memory of all outputs that are kept."""
        if "op_output" in vars(SelectiveCheckpointContext(is_recompute=False)):
            return self._memory
        return _memories([entry.val for entry in tree_leaves(list(self.storage.values()))])


def _written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call of an operator writes to."""
    arguments = operation._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    values = [named.get(argument.name) for argument in arguments if argument.is_write]
    lists = [value if isinstance(value, list | tuple) else [value] for value in values]
    return [tensor for value in lists for tensor in value if isinstance(tensor, Tensor)]


def _memories(outputs: Any) -> set[int]:
    """Return the memory of the tensors in outputs, which may be nested; empty tensors have none."""
    return {_memory(output) for output in tree_leaves(outputs) if isinstance(output, Tensor) and output.numel()}


def _memory(tensor: Tensor) -> int:
    """Return an id of a tensor's memory, which its views share; tensors without values have no address."""
    return local_part(tensor).untyped_storage()._cdata

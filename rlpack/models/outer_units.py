"""Shard embedding and output layer as separate FSDP units, gathered while in use rather than for a whole pass.

With a large vocabulary these are the largest weights of a model. In the root's unit, both would be gathered during the
whole forward and backward pass, and both gradients would exist at one time before they are summed over ranks.

A tied weight stays in the root's unit: it is the first that is used and the last that gets its gradient.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from rlpack.models.packed import PackedModel
from rlpack.models.vocabulary import find_embedding

R = TypeVar("R")
_METHOD = "_call_gathered"


def shard_outer_modules(policy: PackedModel, *, reshard_after_forward: bool, **options: Any) -> None:
    """Make the embedding and the output layer FSDP units, in place, unless another module shares their weights.

    Args:
        policy: its layers may be sharded; its root isn't yet.
        reshard_after_forward: free the embedding's gathered weights after forward.
        options: options of `fully_shard`.
    """
    owners = Counter(id(weight) for module in policy.modules() for weight in module._parameters.values())
    embedding, head = find_embedding(policy.model), policy.model.get_output_embeddings()
    if isinstance(embedding, nn.Embedding) and _is_only_owner(embedding, owners):
        unit = fully_shard(embedding, reshard_after_forward=reshard_after_forward, **options)
        unit.set_unshard_in_backward(False)  # its gradient doesn't depend on its weight
    if isinstance(head, nn.Linear) and _is_only_owner(head, owners):
        # Its backward directly follows its forward.
        fully_shard(head, reshard_after_forward=False, **options)
        setattr(head, _METHOD, _call)
        register_fsdp_forward_method(head, _METHOD)


def call_gathered(module: nn.Module, function: Callable[[Tensor], R], states: Tensor) -> R:
    """Return `function(states)`, which reads weights of a module instead of calling it; gather them if it is a unit.

    Args:
        module: the output layer.
        function: returns tensors, or a tuple of them.
        states: the only tensor with an autograd history that the function reads.
    """
    if not isinstance(module, FSDPModule):
        return function(states)
    return cast(Callable[..., R], getattr(module, _METHOD))(function, states)


def _call(function: Callable[[Tensor], R], states: Tensor) -> R:
    return function(states)


def _is_only_owner(module: nn.Module, owners: Counter[int]) -> bool:
    """Return whether a module has weights, no submodules, and no weight in common with another module."""
    weights = list(module.parameters())
    return bool(weights) and all(owners[id(weight)] == 1 for weight in weights) and not any(module.children())

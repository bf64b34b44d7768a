"""Fully sharded data parallelism (FSDP2) for packed models, summing gradients where FSDP2 would average.

Losses are sums over tokens with denominators that are global to the optimizer step, so gradients of ranks add up and
the world size appears nowhere.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from rlpack.models.adapters import find_adapters, merged_name
from rlpack.models.errors import ModelError
from rlpack.models.packed import PackedModel

_PRECISION = {
    "fp32": MixedPrecisionPolicy(),
    # No output dtype: an fp32 output would meet the next layer's bf16 weights.
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def shard_model(
    policy: PackedModel,
    mesh: DeviceMesh,
    *,
    precision: Literal["fp32", "bf16"] = "fp32",
    reshard_after_forward: bool = True,
) -> None:
    """Shard a model over a mesh in place: each decoder layer by itself, the rest with the root.

    All ranks must hold the same weights. Build the optimizer afterwards, from `policy.parameters()`.

    Args:
        policy: on the mesh's device, weights in fp32.
        mesh: `dp_shard`; before it `dp_replicate`, where the sharded model is replicated.
        precision: compute dtype; weights, gradient sums and optimizer state stay fp32.
        reshard_after_forward: free each layer's gathered weights after forward and gather them again in backward;
            False needs more memory and half the gathers.
    """
    if precision not in _PRECISION:
        raise ModelError(f"precision is {precision!r}; choose one of {', '.join(_PRECISION)}")
    rules = _PRECISION[precision]
    policy.reshard_after_forward = reshard_after_forward
    policy.compute_dtype = rules.param_dtype or policy.compute_dtype
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=mesh, mp_policy=rules, reshard_after_forward=reshard_after_forward)
    # The root's backward directly follows its forward, so freeing its weights in between would only cost a gather.
    fully_shard(policy, mesh=mesh, mp_policy=rules, reshard_after_forward=False)
    for module in _sharded_modules(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for name in ("probe", "probe_wrapped_model"):
        register_fsdp_forward_method(policy, name)


def decoder_layers(policy: PackedModel) -> list[nn.Module]:
    """Return the model's decoder layers, first to last.

    Raises:
        ModelError: the model doesn't name them.
    """
    names = set(policy.model._no_split_modules or ())
    layers = [module for module in policy.model.modules() if type(module).__name__ in names]
    if not layers:
        kind = type(policy.model).__name__
        raise ModelError(f"{kind} names no decoder layers (_no_split_modules), so it can't be sharded; use another")
    return layers


def set_gradient_sync(policy: PackedModel, last: bool) -> None:
    """Synchronize gradients only in the last microbatch of an optimizer step; call before each forward.

    Does nothing to a model that is not sharded.
    """
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(last)
        policy.set_is_last_backward(last)
        # Weights kept after forward can be kept after backward too: they don't change before the last microbatch.
        policy.set_reshard_after_backward(last or policy.reshard_after_forward)


def reshard(policy: PackedModel) -> None:
    """Free the gathered weights that a forward without a backward leaves at the root.

    Until then `policy.parameters()` returns the gathered copies: an optimizer built from them would train nothing, and
    a checkpoint would miss the sharded weights.
    """
    for module in _sharded_modules(policy):
        module.reshard()


def clip_grad_norm(policy: PackedModel, max_norm: float) -> float:
    """Clip gradients to a global L2 norm of `max_norm`; return the norm before. A collective.

    The norm is that of the whole model, the same on every rank and for any number of ranks. If it is NaN or infinite,
    the gradients are unusable and the caller must skip the step.
    """
    norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def full_state_dict(policy: PackedModel, *, keep: bool = True) -> dict[str, Tensor]:
    """Return the full weights on the CPU under the wrapped model's own names; a collective.

    A tied weight appears once, under its first name, as in `named_parameters`. Adapters are merged into the returned
    weights, W + scale·B·A; the model itself is unchanged.

    Args:
        policy: sharded or not.
        keep: False on a rank that only takes part in the gathers and returns nothing.
    """
    state: dict[str, Tensor] = {}
    weights, adapters = dict(_named_weights(policy)), find_adapters(policy.model)
    for name, tensor in weights.items():
        base_name = merged_name(name)
        if base_name is None:
            continue
        full = _gather(tensor)
        if (adapter := adapters.get(name)) is not None:
            down, up = _gather(weights[adapter.down]), _gather(weights[adapter.up])
            full = full + adapter.scale * (up @ down)
        if keep:
            state[base_name] = full.to("cpu", copy=True)
    return state


def head_state_dict(policy: PackedModel) -> dict[str, Tensor]:
    """Return the full weights outside the wrapped model, a value head's, on the CPU; a collective."""
    reshard(policy)
    named = [(name, weight) for name, weight in policy.named_parameters() if not name.startswith("model.")]
    return {name: _gather(weight).to("cpu", copy=True) for name, weight in named}


def load_full_state_dict(policy: PackedModel, state: Mapping[str, Tensor]) -> None:
    """Copy full weights, the same on every rank, into the model; no communication.

    Raises:
        ModelError: a weight is missing or has another shape, or a name is unknown.
    """
    weights = dict(_named_weights(policy))
    # A tied weight may appear under any of its names.
    known = {name for name, _ in policy.model.named_parameters(remove_duplicate=False)} | set(weights)
    if missing := sorted(set(weights) - set(state)):
        raise ModelError(f"{len(missing)} weights are missing, the first is {missing[0]}; load this model's own state")
    if unknown := sorted(set(state) - known):
        raise ModelError(f"{len(unknown)} weights are not the model's, the first is {unknown[0]}; load its own state")
    for name, weight in weights.items():
        if weight.shape != state[name].shape:
            shapes = f"{list(state[name].shape)}, the model's {list(weight.shape)}"
            raise ModelError(f"weight {name} has shape {shapes}; load this model's own state")
    with torch.no_grad():
        for name, weight in weights.items():
            full = state[name].to(device=weight.device, dtype=weight.dtype)
            if isinstance(weight, DTensor):
                full = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)
            weight.copy_(full)


def load_base_weights(model: PackedModel, state: Mapping[str, Tensor]) -> None:
    """Copy a language model's weights without its head into a model that wraps the same one without a head.

    Raises:
        ModelError: a weight is missing or has another shape.
    """
    prefix = f"{model.model.base_model_prefix}."
    load_full_state_dict(model, {n.removeprefix(prefix): w for n, w in state.items() if n.startswith(prefix)})


def _named_weights(policy: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers, sharded if the model is."""
    reshard(policy)
    yield from policy.model.named_parameters()
    saved = policy.model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in policy.model.named_buffers() if name in saved)


def _sharded_modules(policy: PackedModel) -> list[FSDPModule]:
    """Return the FSDP modules, root first; none if the model is not sharded."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def _gather(tensor: Tensor) -> Tensor:
    """Return one full weight on its device; a collective if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

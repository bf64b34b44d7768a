"""Fully sharded data parallelism (FSDP2) for a policy or a critic, with sums where FSDP2 would average.

A loss is a sum over tokens with denominators that are global to the optimizer step, so gradients of ranks add up and
no world size appears anywhere.
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

from rlpack.models.adapters import adapters_of, plain_name
from rlpack.models.errors import ModelError
from rlpack.models.packed import PackedModel

_PRECISION = {
    "fp32": MixedPrecisionPolicy(),
    # No output type: forcing fp32 out of one layer would feed fp32 to the next one's bf16 weights.
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def shard_model(
    policy: PackedModel,
    mesh: DeviceMesh,
    *,
    precision: Literal["fp32", "bf16"] = "fp32",
    reshard_after_forward: bool = True,
) -> None:
    """Shard a policy over a mesh in place: each decoder layer by itself, the rest with the root.

    All ranks have to hold the same weights. Make the optimizer afterwards, from `policy.parameters()`.

    Args:
        policy: on the mesh's device, weights in fp32.
        mesh: `dp_shard`; before it `dp_replicate`, where the sharded model is replicated.
        precision: type of the computation; weights, their gradients' sums and the optimizer stay fp32.
        reshard_after_forward: free each layer's gathered weights after forward and gather them again in backward;
            False takes more memory and half the gathers.
    """
    if precision not in _PRECISION:
        raise ModelError(f"precision is {precision!r}; choose one of {', '.join(_PRECISION)}")
    rules = _PRECISION[precision]
    policy.reshard_after_forward = reshard_after_forward
    policy.compute_dtype = rules.param_dtype or policy.compute_dtype
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=mesh, mp_policy=rules, reshard_after_forward=reshard_after_forward)
    # The root's backward follows its forward at once, so freeing its weights in between would only cost a gather.
    fully_shard(policy, mesh=mesh, mp_policy=rules, reshard_after_forward=False)
    for module in _sharded_modules(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for name in ("probe", "probe_wrapped_model"):
        register_fsdp_forward_method(policy, name)


def decoder_layers(policy: PackedModel) -> list[nn.Module]:
    """Return the model's decoder layers, first to last.

    Raises:
        ModelError: the model does not say which modules they are.
    """
    names = set(policy.model._no_split_modules or ())
    layers = [module for module in policy.model.modules() if type(module).__name__ in names]
    if not layers:
        kind = type(policy.model).__name__
        raise ModelError(f"{kind} names no decoder layers (_no_split_modules), so it can't be sharded; use another")
    return layers


def set_gradient_sync(policy: PackedModel, last: bool) -> None:
    """Say, before a microbatch's forward, whether it is the optimizer step's last: only then are gradients summed.

    Does nothing to a policy that is not sharded.
    """
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(last)
        policy.set_is_last_backward(last)
        # Weights that survive forward may survive backward too: they don't change before the last microbatch.
        policy.set_reshard_after_backward(last or policy.reshard_after_forward)


def reshard(policy: PackedModel) -> None:
    """Free the gathered copies that a forward without backward leaves at the root.

    While they are there, `policy.parameters()` gives the copies and not the weights: an optimizer made from them would
    train nothing, a checkpoint would miss them.
    """
    for module in _sharded_modules(policy):
        module.reshard()


def clip_grad_norm(policy: PackedModel, max_norm: float) -> float:
    """Scale gradients down to a global L2 norm of at most `max_norm`; return the norm before. All ranks call.

    The norm is that of the whole model, the same on every rank and for any number of ranks. It may be NaN or
    infinite; then gradients are not usable and the caller skips the step.
    """
    norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def full_state_dict(policy: PackedModel, *, keep: bool = True) -> dict[str, Tensor]:
    """Return whole weights on the CPU under the wrapped model's own names; all ranks call.

    A tied weight comes once, under its first name, as `named_parameters` has it. An adapter's product is added to the
    weight that it stands beside, W + scale·B·A, in the copy alone.

    Args:
        policy: sharded or not.
        keep: False on a rank that only takes part in the gathers: it copies nothing and returns nothing.
    """
    state: dict[str, Tensor] = {}
    weights, adapters = dict(_weights(policy)), adapters_of(policy.model)
    for name, tensor in weights.items():
        plain = plain_name(name)
        if plain is None:
            continue
        whole = _gathered(tensor)
        if (adapter := adapters.get(name)) is not None:
            down, up = _gathered(weights[adapter.down]), _gathered(weights[adapter.up])
            whole = whole + adapter.scale * (up @ down)
        if keep:
            state[plain] = whole.to("cpu", copy=True)
    return state


def head_state_dict(policy: PackedModel) -> dict[str, Tensor]:
    """Return the whole weights outside the wrapped model, such as a value head's, on the CPU; all ranks call."""
    reshard(policy)
    own = [(name, weight) for name, weight in policy.named_parameters() if not name.startswith("model.")]
    return {name: _gathered(weight).to("cpu", copy=True) for name, weight in own}


def load_full_state_dict(policy: PackedModel, state: Mapping[str, Tensor]) -> None:
    """Copy whole weights, the same on every rank, into the policy; no rank talks to another.

    Raises:
        ModelError: a weight is missing or has another shape, or a name belongs to no weight.
    """
    weights = dict(_weights(policy))
    # A tied weight may come under each of its names.
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
    """Copy a language model's weights, its head left out, into a model that wraps the same one without it.

    Raises:
        ModelError: a weight is missing or has another shape.
    """
    prefix = f"{model.model.base_model_prefix}."
    load_full_state_dict(model, {n.removeprefix(prefix): w for n, w in state.items() if n.startswith(prefix)})


def _weights(policy: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and the buffers that a checkpoint holds, sharded where the policy is."""
    reshard(policy)
    yield from policy.model.named_parameters()
    saved = policy.model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in policy.model.named_buffers() if name in saved)


def _sharded_modules(policy: PackedModel) -> list[FSDPModule]:
    """Return the modules that gather and free weights, root first; none if the policy is not sharded."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def _gathered(tensor: Tensor) -> Tensor:
    """Return one weight whole, on its device; a collective where it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

"""Fully sharded data parallelism (FSDP2) for packed models, summing gradients where FSDP2 would average.

Losses are sums over tokens with denominators that are global to the optimizer step, so gradients of ranks add up and
the world size appears nowhere.
"""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from rlpack.config.sections.compute import Offload
from rlpack.models.errors import ModelError
from rlpack.models.expert_parallel import expert_modules
from rlpack.models.kernel_device import effective_device_type
from rlpack.models.outer_units import shard_outer_modules
from rlpack.models.packed import PackedModel
from rlpack.models.parts import local_part
from rlpack.models.piecewise_collectives import use_pieces
from rlpack.models.pipeline_parallel import duplicate_weights
from rlpack.models.tensor_parallel import sharded_axis

_PRECISION = {
    "fp32": MixedPrecisionPolicy(),
    # No output dtype: an fp32 output would meet the next layer's bf16 weights.
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
# The largest size of a small model's weights.
SMALL_BYTES = 128 * 2**20


def shard_model(
    policy: PackedModel,
    mesh: DeviceMesh,
    *,
    expert_mesh: DeviceMesh | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    reshard_after_forward: bool = True,
    offload: Offload = "none",
    small_bytes: int = SMALL_BYTES,
) -> None:
    """Shard a model over a mesh in place: decoder layers, embedding and output layer as units, the rest with the root.

    A small model is sharded as one unit, and its gathered weights are kept for all microbatches of an optimizer step,
    because gathering a small layer takes longer than computing it. `reshard_after_forward` then has no effect.

    All ranks must hold the same weights; those on the meta device are sharded and stay there. Build the optimizer
    afterwards, from `policy.parameters()`.

    Args:
        policy: on the mesh's device or the meta device, weights in fp32, already split if at all (`split_experts`,
            `split_weights`).
        mesh: one dimension to shard over, or two: replicas first, then shards.
        expert_mesh: mesh of the experts, in the same form, if the model was split by `split_experts`.
        precision: compute dtype; weights, gradient sums and optimizer state stay fp32.
        reshard_after_forward: free each layer's gathered weights after forward and gather them again in backward;
            False needs more memory and half the gathers.
        offload: `parameters` keeps weights and gradients in host memory, pinned if the mesh is of GPUs; `optimizer` is
            left to `build_optimizer`.
        small_bytes: maximum size of a small model's weights.
    """
    if precision not in _PRECISION:
        raise ModelError(f"precision is {precision!r}; choose one of {', '.join(_PRECISION)}")
    rules = _PRECISION[precision]
    one_unit = weight_bytes(policy) <= small_bytes
    policy.reshard_after_forward = reshard_after_forward and not one_unit
    policy.compute_dtype = rules.param_dtype or policy.compute_dtype
    policy.offload = offload
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload == "parameters" else OffloadPolicy()
    layers = decoder_layers(policy)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": rules, "offload_policy": place}
    if policy.weight_split is not None or expert_mesh is not None:
        options["shard_placement_fn"] = lambda weight: Shard(sharded_axis(weight))
    for _, experts in expert_modules(policy) if expert_mesh is not None else ():
        # Only this unit has other ranks. Its inputs keep their dtypes: some routers give fp32 weights.
        own = options | {"mesh": expert_mesh, "mp_policy": replace(rules, cast_forward_inputs=False)}
        fully_shard(experts, reshard_after_forward=policy.reshard_after_forward, **own)
    if not one_unit:
        for layer in layers:
            fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)
        shard_outer_modules(policy, reshard_after_forward=reshard_after_forward, **options)
    # The root's backward directly follows its forward, so freeing its weights in between would only cost a gather.
    fully_shard(policy, reshard_after_forward=False, **options)
    for module in _sharded_modules(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if effective_device_type(mesh.device_type) == "cpu":
            _save_host_memory(module)
    for name in ("run", "probe", "probe_wrapped_model"):
        register_fsdp_forward_method(policy, name)


def weight_bytes(policy: PackedModel) -> int:
    """Return the bytes of a model's weights, of all ranks that share them by FSDP2."""
    return sum(weight.numel() * weight.element_size() for weight in policy.parameters())


def _save_host_memory(module: FSDPModule) -> None:
    """Save memory on CPUs: over gloo, FSDP2 waits for each collective, so gathering ahead gains no time."""
    # A unit that prefetches itself prefetches nothing; an empty list would restore the default.
    module.set_modules_to_backward_prefetch([module])
    use_pieces(module)


def decoder_layers(policy: PackedModel) -> list[nn.Module]:
    """Return the model's decoder layers, first to last; of nested ones the outermost. The model may be sharded.

    Raises:
        ModelError: the model doesn't name them.
    """
    names = set(policy.model._no_split_modules or ())
    # FSDP2 gives a sharded layer a subclass of another name.
    layers = [module for module in policy.model.modules() if names & {kind.__name__ for kind in type(module).__mro__}]
    nested = {id(inner) for layer in layers for inner in layer.modules() if inner is not layer}
    layers = [layer for layer in layers if id(layer) not in nested]
    if not layers:
        kind = type(policy.model).__name__
        raise ModelError(f"{kind} names no decoder layers (_no_split_modules), so it can't be sharded; use another")
    return layers


def set_gradient_sync(policy: PackedModel, last: bool) -> None:
    """Synchronize gradients only in the last microbatch of an optimizer step; call before each backward.

    Does nothing to a model that is not sharded.
    """
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(last)
        policy.set_is_last_backward(last)
        # Weights kept after forward can be kept after backward, too: they only change after the last microbatch.
        policy.set_reshard_after_backward(last or policy.reshard_after_forward)


def reshard(policy: PackedModel) -> None:
    """Free the gathered weights that a forward without a backward leaves at the root and the output layer.

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
    gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    counted = {id(weight.grad) for weight in duplicate_weights(policy)}
    square = _square_norm([gradient for gradient in gradients if id(gradient) not in counted])
    norm = (square if policy.stage is None else policy.stage.total(square)).sqrt().item()
    if math.isfinite(norm) and norm > max_norm:
        for gradient in gradients:
            local_part(gradient).mul_(max_norm / norm)
    return norm


def _square_norm(gradients: list[Tensor]) -> Tensor:
    """Return the square of the L2 norm of all gradients together, fp64 []; a collective.

    Squares of sharded gradients are summed over ranks here, because dispatching each DTensor operation takes longer
    than the arithmetic.
    """
    by_ranks: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        key = None, ()
        if isinstance(gradient, DTensor):
            if any(placement.is_partial() for placement in gradient.placements):
                gradient = gradient.redistribute(placements=[_whole(placement) for placement in gradient.placements])
            sharded = (dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
            key = gradient.device_mesh, tuple(sharded)
        by_ranks.setdefault(key, []).append(local_part(gradient))
    total = torch.zeros((), dtype=torch.float64, device=local_part(gradients[0]).device if gradients else None)
    for (mesh, dims), parts in by_ranks.items():
        square = nn.utils.get_total_norm(parts).double().square()
        for dim in dims:
            assert mesh is not None
            square = square.to(mesh.device_type)  # from the host, if parameters are there
            dist.all_reduce(square, group=mesh.get_group(dim))
        total += square.to(total.device)
    return total


def _whole(placement: Placement) -> Placement:
    """Return `Replicate` for a partial sum, else the placement itself."""
    return Replicate() if placement.is_partial() else placement


def _sharded_modules(policy: PackedModel) -> list[FSDPModule]:
    """Return the FSDP modules, root first; none if the model is not sharded."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]

"""Check of a model's backward pass: gradients of rows together are the sum of those of each row alone.

Whole gradients would take as much memory as the weights. Each weight's gradient G is reduced, as soon as it exists, to
UᵀGV with random U and V. This is linear in G, so that sums of gradients can be compared, and the expected square of
each entry is ‖G‖². For a sharded weight, each rank reduces its part with the matching rows of U and V, and the results
are summed over ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers.modeling_layers import GradientCheckpointingLayer

from rlpack.models.adapters import is_adapter_dropout
from rlpack.models.check_outputs import depth_factor, equal_groups, lay_out, layout_name
from rlpack.models.errors import ModelError
from rlpack.models.own_attention import REFERENCE, attention_implementation
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import reshard
from rlpack.models.parts import local_part, part_offsets

# Allowed difference of a weight's gradient, relative to its norm, or to this part of the norm of all gradients: the
# gradients of some weights, such as the biases of keys, consist of rounding errors only.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
_LEAST_PART = 1e-2
# Columns of U and V.
_WIDTH = 8


def check_gradients(
    model: PackedModel, rows: list[Tensor], device: torch.device | str, *, packed: bool, role: str
) -> None:
    """Raise unless the gradients of rows together are the sum of those of each row under eager attention.

    Rows together run as in training: with activation checkpointing, if it is enabled, and without adapters' dropout.

    Args:
        model: in evaluation mode afterwards.
        rows: int64 [L] each.
        device: the model's device.
        packed: whether the rows are packed together, or padded.
        role: the model's role, for the error.

    Raises:
        ModelError: a weight's gradient differs; the message names it.
    """
    if not any(weight.requires_grad for weight in model.uncut.parameters()):
        return
    together = _gradients_together(model, rows, device, packed=packed, training=True)
    alone = _gradients_alone(model, rows, device)
    gap, worst = model.worst_of_stages(*_largest_gap(together, alone))
    allowed = _TOLERANCE[model.compute_dtype] * depth_factor(model)
    if gap <= allowed:
        return
    way_out, suffix = "use another model, or correct its backward pass", ""
    if _checkpoints(model.uncut):
        plain = _gradients_together(model, rows, device, packed=packed, training=False)
        suffix = " with activation checkpointing"
        if model.worst_of_stages(*_largest_gap(plain, alone))[0] <= allowed:
            suffix += ", and not without"
            way_out = f"set {role}.gradient_checkpointing=none"
    raise ModelError(
        f"the gradient of {worst} over {len(rows)} {layout_name(packed)} rows differs by {gap:.2e} from the sum over "
        f"the rows alone under transformers' eager attention (at most {allowed:.0e}){suffix}; {way_out}"
    )


def _gradients_together(
    model: PackedModel, rows: list[Tensor], device: torch.device | str, *, packed: bool, training: bool
) -> dict[str, Tensor]:
    """Return the reduced gradients of all rows in one microbatch."""
    model.train(training)
    for name, module in model.named_modules():
        if is_adapter_dropout(name):
            module.eval()
    try:
        with _reduced_gradients(model) as gradients, torch.enable_grad():
            outputs = model.probe(lay_out(rows, packed=packed).to(device))
            _weighted_sum(outputs, range(len(rows)), rows).backward()
    finally:
        model.eval()
    return gradients


def _gradients_alone(model: PackedModel, rows: list[Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """Return the sum of the reduced gradients of the rows; rows of equal length run together, side by side."""
    with _reduced_gradients(model) as gradients, attention_implementation(model.model, REFERENCE), torch.enable_grad():
        for indices in equal_groups(rows):
            outputs = model.probe_wrapped_model(torch.stack([rows[index] for index in indices]).to(device))
            _weighted_sum(outputs.flatten(0, 1), indices, rows).backward()
    return gradients


def _weighted_sum(outputs: Tensor, indices: list[int] | range, rows: list[Tensor]) -> Tensor:
    """Return the loss: the sum of outputs [T] or [T, d] of some rows, with different random weights for each row."""
    weights = []
    for index in indices:
        generator = torch.Generator().manual_seed(1000 + index)
        weights.append(torch.randn(rows[index].shape[0], *outputs.shape[1:], generator=generator))
    return (outputs * torch.cat(weights).to(outputs)).sum()


@contextmanager
def _reduced_gradients(model: PackedModel) -> Iterator[dict[str, Tensor]]:
    """Collect reduced gradients, f64 [8, 8] by weight, of all backward passes inside the context; store none."""
    gradients: dict[str, Tensor] = {}
    reshard(model)  # hooks on gathered weights would never be called

    def collect(name: str, index: int, weight: Tensor) -> None:
        gradient = weight.grad
        weight.grad = None
        assert gradient is not None
        reduced = _reduced(gradient.detach(), index)
        gradients[name] = gradients[name] + reduced if name in gradients else reduced

    hooks = [
        weight.register_post_accumulate_grad_hook(lambda weight, name=name, index=index: collect(name, index, weight))
        for index, (name, weight) in enumerate(model.named_parameters())
        if weight.requires_grad
    ]
    try:
        yield gradients
    finally:
        for hook in hooks:
            hook.remove()
    for name, weight in model.named_parameters():
        if name in gradients and isinstance(weight, DTensor):
            gradients[name] = _sum_of_parts(gradients[name], weight)


def _reduced(gradient: Tensor, seed: int) -> Tensor:
    """Return UᵀGV, f64 [8, 8] on the CPU; for a sharded gradient, this rank's summand."""
    if isinstance(gradient, DTensor) and gradient.device_mesh.device_type != gradient.device.type:
        torch.cuda.synchronize()  # FSDP2 may still be copying the gradient to the host
    shape = gradient.shape if gradient.ndim > 1 else (*gradient.shape, 1)
    part, offsets = local_part(gradient), part_offsets(gradient)
    assert offsets is not None, "the check runs before weights are sharded in another way than over whole blocks"
    part = part.reshape(*part.shape, *(1 for _ in range(len(shape) - part.ndim)))
    generator = torch.Generator(part.device).manual_seed(seed)
    sizes = (*shape[:-1], _WIDTH), (shape[-1], _WIDTH)
    left, right = (torch.randn(size, generator=generator, device=part.device, dtype=torch.float32) for size in sizes)
    for axis, offset in enumerate(offsets[: len(shape) - 1]):
        left = left.narrow(axis, offset, part.shape[axis])
    if len(offsets) == len(shape):
        right = right.narrow(0, offsets[-1], part.shape[-1])
    rows = part.reshape(-1, part.shape[-1])
    return (left.reshape(-1, _WIDTH).to(rows.dtype).t() @ (rows @ right.to(rows.dtype))).double().cpu()


def _sum_of_parts(reduced: Tensor, weight: DTensor) -> Tensor:
    """Return the sum over the ranks that hold different parts of a weight."""
    kinds = [Partial() if placement.is_shard() else Replicate() for placement in weight.placements]
    return DTensor.from_local(reduced.to(weight.device), weight.device_mesh, kinds, run_check=False).full_tensor().cpu()


def _largest_gap(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative difference of a weight's gradient, NaN if any is, and the weight."""
    zero = torch.zeros(_WIDTH, _WIDTH, dtype=torch.float64)
    norms = {name: _norm(gradient) for name, gradient in expected.items()}
    least = _LEAST_PART * sum(norm**2 for norm in norms.values()) ** 0.5
    gaps = {}
    for name in gradients.keys() | expected.keys():
        difference = _norm(gradients.get(name, zero) - expected.get(name, zero))
        unit = max(norms.get(name, 0.0), least)
        gaps[name] = 0.0 if difference == 0 else difference / unit if unit > 0 else float("inf")
    worst = max(sorted(gaps), key=lambda name: float("inf") if gaps[name] != gaps[name] else gaps[name], default="")
    return gaps.get(worst, 0.0), worst


def _norm(reduced: Tensor) -> float:
    """Return the estimate of a gradient's norm."""
    return reduced.square().mean().sqrt().item()


def _checkpoints(model: nn.Module) -> bool:
    """Return whether a layer recomputes its activations in training."""
    return any(
        isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing for module in model.modules()
    )

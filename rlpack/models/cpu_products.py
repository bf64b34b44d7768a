"""Matrix products in fp32 on CPUs by oneDNN, where it is faster than MKL.

PyTorch computes such products with MKL, which doesn't use AVX-512 on AMD CPUs. oneDNN, which is part of the same build
of PyTorch, does: it is about 2.2 times as fast in the forward pass, and 1.6 to 2.2 times in the backward pass (EPYC
with AVX-512, PyTorch 2.13). On EPYCs of the fourth generation, which split AVX-512 instructions in two, it is 0.9 to
1.2 times as fast with 512 rows or more. It compiles a kernel for every number of rows, so rows of zeros round that
number up, and products of few rows stay with MKL. From 64 rows on, the result of a row doesn't depend on their number.

Letters: M rows, K inputs, N outputs.
"""

import functools
import os
import platform
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# With fewer rows MKL is as fast.
_LEAST_ROWS = 64
# Numbers of rows are rounded up to a multiple of the second number if they are at most the first.
_STEPS = ((512, 64), (4096, 128), (8192, 256))
_Model = TypeVar("_Model", bound=nn.Module)
# Whether this process rounds numbers of rows up; None if ranks haven't agreed on it, so that its own CPU decides.
_rounds: bool | None = None


@functools.cache
def is_faster() -> bool:
    """Return whether oneDNN is faster than MKL on this machine, and can be called."""
    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        vendor = "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:  # not Linux
        return False
    return vendor and _can_be_called()


def rounded_rows(count: int) -> int:
    """Return the number of rows, at least `count`, with which products of `count` rows are computed.

    If a model is given this many tokens, its layers need not add zeros.
    """
    if count < _LEAST_ROWS or not (is_faster() if _rounds is None else _rounds):
        return count
    step = next((step for most, step in _STEPS if count <= most), 512)
    return count + -count % step


def agree_on_rounding() -> None:
    """Round numbers of rows up on every rank if one of them needs it; a collective of the default process group.

    Ranks that share the tokens, weights or layers of a microbatch must lay it out alike, also on nodes with different
    CPUs.
    """
    global _rounds
    rounds = torch.tensor(int(is_faster()))
    dist.all_reduce(rounds, dist.ReduceOp.MAX)
    _rounds = bool(rounds)


def matmul_transposed(left: Tensor, right: Tensor) -> Tensor:
    """Return left · rightᵀ; not differentiable.

    Args:
        left: [..., K].
        right: [N, K].

    Returns:
        [..., N].
    """
    if left.dtype == torch.float32 and left.device.type == "cpu" and _num_rows(left) >= _LEAST_ROWS and is_faster():
        return _product(left, right)
    return left @ right.t()


def packed_weight(weight: Tensor) -> Tensor:
    """Return a copy of a weight [N, K] in the layout that oneDNN reads for any number of rows; opaque to PyTorch."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.detach())


def packed_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows · weightᵀ + bias by oneDNN; not differentiable.

    A kernel is compiled for every number of rows, so the caller has to round it.

    Args:
        rows: fp32 [M, K], on the CPU.
        weight: [N, K], or from `packed_weight`.
        bias: [N].

    Returns:
        [M, N].
    """
    return _call(rows, weight, bias)


def use_faster_products(model: _Model) -> _Model:
    """Replace the class of a model's linear layers in place if oneDNN is faster here, and return the model."""
    if is_faster():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = FasterLinear
    return model


class FasterLinear(nn.Linear):
    """A linear layer that uses oneDNN in fp32 on CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input · weightᵀ + bias, as `nn.Linear` does."""
        weight, bias = self.weight, self.bias
        # Autocast, other devices and dtypes, and empty inputs are left to PyTorch.
        if input.dtype != torch.float32 or weight.dtype != torch.float32 or input.device.type != "cpu":
            return F.linear(input, weight, bias)
        if _num_rows(input) < _LEAST_ROWS or torch.is_autocast_enabled("cpu"):
            return F.linear(input, weight, bias)
        if not torch.is_grad_enabled():  # generation calls it for every token
            return _product(input, weight, bias)
        return _Linear.apply(input, weight, bias)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    """input · weightᵀ + bias."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad
        gradient = gradients[0]
        rows, inputs = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (gradient, input))
        # With create_graph=True (a gradient penalty) these products are differentiated again: PyTorch's own can be.
        by_bias = rows.sum(0) if wants_bias else None
        if torch.is_grad_enabled():
            return F.linear(gradient, weight.t()), F.linear(rows.t(), inputs.t()), by_bias
        rows = _padded(rows)
        by_input = _call(rows, weight.t())[: len(inputs)].reshape(input.shape) if wants_input else None
        return by_input, _gradient_of_weight(rows, _padded(inputs)) if wants_weight else None, by_bias


def _gradient_of_weight(rows: Tensor, inputs: Tensor) -> Tensor:
    """Return rowsᵀ · inputs: [M, N] and [M, K] to [N, K]."""
    # oneDNN copies its left operand into rows, which for a transposed matrix costs up to a third of the product's time.
    # With `inputs` on the left, this copies fewer numbers, but autograd then copies the result into rows.
    (num_rows, outputs), width = rows.shape, inputs.shape[1]
    if num_rows * (outputs - width) > 2 * outputs * width:
        return _call(inputs.t(), rows.t()).t()
    return _call(rows.t(), inputs.t())


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left · rightᵀ + bias by oneDNN: [..., K] and [N, K] to [..., N]."""
    rows = left.reshape(-1, left.shape[-1])
    product = _call(_padded(rows), right, bias)[: len(rows)]
    # A result that autograd takes for a view could not be changed in place by the model's code.
    return torch.ops.aten._unsafe_view.default(product, [*left.shape[:-1], right.shape[0]])


def _num_rows(tensor: Tensor) -> int:
    """Return the number of rows, all axes but the last together; 0 if they are empty."""
    return tensor.numel() // tensor.shape[-1] if tensor.shape[-1] else 0


def _padded(rows: Tensor) -> Tensor:
    """Pad with rows of zeros to one of a few row counts, because oneDNN compiles a kernel for each count."""
    missing = rounded_rows(len(rows)) - len(rows)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _call(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left · rightᵀ + bias: [M, K] and [N, K] to [M, N]."""
    return torch.ops.mkldnn._linear_pointwise.default(left, right, bias, "none", [], "")


def _can_be_called() -> bool:
    """Return whether this build of PyTorch has the operator with the signature used here."""
    _bound_caches()
    left, right = torch.eye(3), torch.arange(6.0).reshape(2, 3)
    try:
        packed = _call(left, packed_weight(right))
        return torch.equal(_call(left, right), right.t()) and torch.equal(packed, right.t())
    except (AttributeError, RuntimeError, TypeError):
        return False


def _bound_caches() -> None:
    """Have oneDNN and its wrapper in PyTorch cache 640 shapes instead of 1024; they read this on their first call.

    A cached shape takes up to 1 MB. A model with four shapes of weights needs up to 624: for each of them, 52 numbers
    of rows up to 8,192, in three products each (one forward and two backward).
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "640")

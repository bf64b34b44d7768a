"""Matrix products in fp32 on CPUs by oneDNN, where it is faster than MKL.

PyTorch computes such products with MKL, which doesn't use AVX-512 on AMD CPUs. oneDNN, which is part of the same build
of PyTorch, does: it is about 2.2 times as fast in the forward pass, and 1.6 to 2.2 times in the backward pass (EPYC
with AVX-512, PyTorch 2.13). With two or more rows, oneDNN's result for a row also doesn't depend on their number.

Letters: M rows, K inputs, N outputs.
"""

import functools
import os
import platform
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Model = TypeVar("_Model", bound=nn.Module)


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


def matmul_transposed(left: Tensor, right: Tensor) -> Tensor:
    """Return left · rightᵀ; not differentiable.

    Args:
        left: [..., K].
        right: [N, K].

    Returns:
        [..., N].
    """
    if left.dtype == torch.float32 and left.device.type == "cpu" and left.numel() > 0 and is_faster():
        return _product(left, right)
    return left @ right.t()


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
        if input.numel() == 0 or torch.is_autocast_enabled("cpu"):
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
        rows = gradient.reshape(-1, gradient.shape[-1])
        # With create_graph=True (a gradient penalty) these products are differentiated again: PyTorch's own can be.
        product = F.linear if torch.is_grad_enabled() else _product
        return (
            product(gradient, weight.t()) if wants_input else None,
            product(rows.t(), input.reshape(-1, input.shape[-1]).t()) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left · rightᵀ + bias by oneDNN: [..., K] and [N, K] to [..., N]."""
    return torch.ops.mkldnn._linear_pointwise.default(left, right, bias, "none", [], "")


def _can_be_called() -> bool:
    """Return whether this build of PyTorch has the operator with the signature used here."""
    _bound_caches()
    left, right = torch.eye(3), torch.arange(6.0).reshape(2, 3)
    try:
        return torch.equal(_product(left, right), right.t())
    except (AttributeError, RuntimeError, TypeError):
        return False


def _bound_caches() -> None:
    """Have oneDNN and its wrapper in PyTorch remember 64 shapes instead of 1024; they read this at their first call.

    Packed batches have another number of rows every time, and a remembered shape takes up to 1 MB.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")

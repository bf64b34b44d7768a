"""Entries of any type as whole numbers of the same size, for what torch or NumPy can't do with the type itself.

Rows are moved, never reckoned with, so their bits are all that counts.
"""

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOAT8 = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
)
# torch can't index columns of these, or only some of the ways.
_NO_INDEX = _FLOAT8 | {torch.uint16, torch.uint32, torch.uint64}
_NO_NUMPY = _FLOAT8 | {torch.bfloat16, torch.complex32}


def indexable(values: Tensor) -> Tensor:
    """Return `values`, or their bits on the same memory where torch can't index their type.

    >>> indexable(torch.tensor([1, 2], dtype=torch.uint16)).dtype
    torch.int16
    """
    if values.dtype not in _NO_INDEX or values.requires_grad:
        return values
    return values.view(_BITS[values.element_size()])


def take(values: Tensor, index: Tensor) -> Tensor:
    """Return the entries at `index`, int64 [n]: [n, ...].

    >>> take(torch.tensor([1, 2, 3], dtype=torch.uint16), torch.tensor([2, 0]))
    tensor([3, 1], dtype=torch.uint16)
    """
    picked = indexable(values).index_select(0, index)
    return picked if picked.dtype == values.dtype else picked.view(values.dtype)


def put(target: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Return `target` with `values` at its entries `index`, distinct int64 [n]; it is written to, but for gradients."""
    if values.requires_grad:
        return target.index_copy(0, index, values)
    indexable(target).index_copy_(0, index, indexable(values))
    return target


def numpy_ready(host: Tensor) -> Tensor:
    """Return a tensor on the CPU, or its bits on the same memory where NumPy lacks its type."""
    whole = host.resolve_conj().resolve_neg().contiguous()
    return whole.view(_BITS[whole.element_size()]) if whole.dtype in _NO_NUMPY else whole

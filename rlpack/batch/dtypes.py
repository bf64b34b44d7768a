"""Index and convert tensors of dtypes that torch or NumPy supports only in part.

Such tensors are viewed as integers of the same size. Columns are moved and never computed with, so operations on their
bits are exact.
"""

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOAT8 = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
)
# torch can't index these dtypes, or only with some of its indexing functions.
_NO_INDEX = _FLOAT8 | {torch.uint16, torch.uint32, torch.uint64}
_NO_NUMPY = _FLOAT8 | {torch.bfloat16, torch.complex32}


def indexable(values: Tensor) -> Tensor:
    """Return `values`, or their bits on the same memory if torch can't index the dtype.

    >>> indexable(torch.tensor([1, 2], dtype=torch.uint16)).dtype
    torch.int16
    """
    if values.dtype not in _NO_INDEX or values.requires_grad:
        return values
    return values.view(_BITS[values.element_size()])


def take_entries(values: Tensor, index: Tensor) -> Tensor:
    """Return the entries at `index` (int64 [n]), [n, ...].

    >>> take_entries(torch.tensor([1, 2, 3], dtype=torch.uint16), torch.tensor([2, 0]))
    tensor([3, 1], dtype=torch.uint16)
    """
    entries = indexable(values).index_select(0, index)
    return entries if entries.dtype == values.dtype else entries.view(values.dtype)


def put_entries(target: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Return `target` with `values` at the entries `index`, distinct int64 [n].

    Writes to `target`, unless `values` require gradients.
    """
    if values.requires_grad:
        return target.index_copy(0, index, values)
    indexable(target).index_copy_(0, index, indexable(values))
    return target


def numpy_ready(host: Tensor) -> Tensor:
    """Return a CPU tensor, or its bits on the same memory if NumPy lacks the dtype."""
    dense = host.resolve_conj().resolve_neg().contiguous()
    return dense.view(_BITS[dense.element_size()]) if dense.dtype in _NO_NUMPY else dense

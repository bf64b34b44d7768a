"""Concatenate rows of numbers as one dtype, or refuse values that don't fit it.

Rounding to a floating-point dtype is allowed. Any other change of a value is an error.

Shape letters: B rows, T tokens over all rows.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.errors import DataError

_INTEGERS = (int, np.integer, np.bool_)


def concat_tensors(rows: Sequence[Tensor], dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return the values, [T, ...], and the lengths, int64 [B], of rows [n, ...].

    Args:
        rows: at least one tensor; empty ones may be of any dtype.
        dtype: dtype of the values; None for that of the rows.

    Raises:
        DataError: rows with tokens differ in dtype or in the shape of a token, a row has no dimension of tokens, or a
            value does not fit the dtype.
    """
    if scalars := [number for number, row in enumerate(rows) if not row.ndim]:
        raise DataError(f"row {scalars[0]} is a single number; pass a tensor with one entry per token, [n, ...]")
    filled = {number: row for number, row in enumerate(rows) if row.shape[:1] != (0,)}
    first = next(iter(filled), 0)
    for number, row in filled.items():
        if row.dtype != rows[first].dtype:  # torch would convert both, and round integers above 2**24
            raise DataError(
                f"row {number} is {row.dtype} and row {first} is {rows[first].dtype}; convert all rows to one dtype"
            )
        if row.shape[1:] != rows[first].shape[1:]:
            raise DataError(
                f"row {number} has the shape {list(row.shape)} and row {first} {list(rows[first].shape)}; all "
                "dimensions but the first, which counts tokens, have to be the same"
            )
    values = torch.cat(list(filled.values()) or list(rows))
    lengths = torch.tensor([len(row) for row in rows], device=values.device)
    return (values if dtype is None else _convert(values, lengths, dtype)), lengths


def concat_lists(lists: Sequence[list[Any]], lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the concatenation of all lists, of `lengths` items (int64 [B]), as `dtype`, [T, ...].

    Raises:
        DataError: a value is not a number, or does not fit the dtype.
    """
    flat = list(chain.from_iterable(lists))
    is_integer = _is_integer(dtype)
    try:
        values = torch.tensor(flat, dtype=None if is_integer and flat else dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"rows can't be converted to {dtype}: {error}; pass lists of numbers that fit it") from error
    if not is_integer and not (is_finite := _is_finite(values)).all():
        source = torch.tensor(flat, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        _check_overflow(source, is_finite, lengths, dtype)
    if values.dtype == dtype:
        return values
    if _is_integer(values.dtype):
        return _to_integers(values, lengths, dtype)
    floats = ((row, item) for row, items in enumerate(lists) for item in items if not isinstance(item, _INTEGERS))
    row, value = next(floats, (0, lists[0]))
    raise DataError(f"row {row} has {value!r} and the column is {dtype}, which has no fractions; pass integers")


def _convert(values: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values [T, ...] of rows of `lengths` tokens as `dtype`.

    Raises:
        DataError: a value does not fit it.
    """
    if values.dtype == dtype or not len(values):
        return values.to(dtype)
    if _is_integer(dtype) and not _is_integer(values.dtype):
        raise DataError(f"rows are {values.dtype}, the column is {dtype}, which has no fractions; convert them")
    if values.dtype.is_complex and not dtype.is_complex:
        raise DataError(f"rows are {values.dtype}, the column is {dtype}, which has no imaginary part; convert them")
    if _is_integer(dtype):
        return _to_integers(values, lengths, dtype)
    converted = values.to(dtype)
    if not (is_finite := _is_finite(converted)).all():
        _check_overflow(values, is_finite, lengths, dtype)
    return converted


def _is_integer(dtype: torch.dtype) -> bool:
    """Return whether a type holds integers or booleans, and so no fractions."""
    return not (dtype.is_floating_point or dtype.is_complex)


def _is_finite(values: Tensor) -> Tensor:
    """Return which values are finite, bool [T, ...]."""
    if _is_integer(values.dtype):
        return torch.ones_like(values, dtype=torch.bool)
    if values.is_complex():
        return torch.view_as_real(values).isfinite().all(dim=-1)
    return (values.float() if values.element_size() == 1 else values).isfinite()  # torch lacks it for float8


def _check_overflow(source: Tensor, is_finite: Tensor, lengths: Tensor, dtype: torch.dtype) -> None:
    """Raise a `DataError` if a finite value of `source`, [T, ...], is no longer finite as `dtype`."""
    overflows = (_is_finite(source) & ~is_finite).nonzero()
    if len(overflows):
        position = tuple(overflows[0].tolist())
        raise DataError(
            f"row {_row_of(position[0], lengths)} has {source[position].item()}, and the column is {dtype}, whose "
            f"largest number is {torch.finfo(dtype).max}; pass smaller values, or a wider dtype"
        )


def _row_of(token: int, lengths: Tensor) -> int:
    """Return the row of a token."""
    return int(np.searchsorted(lengths.cumsum(0).cpu().numpy(), token, side="right"))


def _to_integers(values: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Return integers or booleans [T, ...] as `dtype`, another such type.

    Raises:
        DataError: a value is outside of the range of `dtype`, which torch would silently wrap.
    """
    (low, high), (least, most) = _range_of(dtype), _range_of(values.dtype)
    if least < low or most > high:
        array = values.cpu().numpy()  # torch compares no uint64
        outside = np.argwhere((array < low) | (array > high))
        if outside.size:
            position = tuple(outside[0])
            raise DataError(
                f"row {_row_of(position[0], lengths)} has {array[position]}, and the column is {dtype}, which holds "
                f"{low} to {high}; pass values in this range, or a wider dtype"
            )
    return values.to(dtype)


def _range_of(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and the greatest value of a type of integers or booleans."""
    return (0, 1) if dtype == torch.bool else (int(torch.iinfo(dtype).min), int(torch.iinfo(dtype).max))

"""Describe the first difference between two batches."""

import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.fields import describe
from rlpack.batch.ragged import Ragged


def difference(one: BatchedDataDict, other: BatchedDataDict, *, tolerance: float) -> str | None:
    """Describe the first difference between two batches, None if equal.

    >>> one, other = (BatchedDataDict({"rewards": torch.tensor([0.5, last])}) for last in (1.0, 2.0))
    >>> difference(one, other, tolerance=1e-5)
    "'rewards' of row 1 is 1.0 and 2.0"

    Args:
        one: the first batch.
        other: the second batch, with its rows in the same order.
        tolerance: absolute and relative tolerance of floats, also of those within the entries of lists; NaN equals NaN.
    """
    if one.num_rows != other.num_rows:
        return f"{one.num_rows} and {other.num_rows} rows"
    if set(one) != set(other):
        return f"columns {sorted(one)} and {sorted(other)}"
    differences = (_in_column(name, one[name], other[name], tolerance) for name in one)
    return next((text for text in differences if text), None)


def _in_column(name: str, one: Any, other: Any, tolerance: float) -> str | None:
    kinds = describe(one), describe(other)
    if kinds[0] != kinds[1]:
        return f"{name!r} is {kinds[0]} and {kinds[1]}"
    if isinstance(one, list):
        rows = [row for row, pair in enumerate(zip(one, other, strict=True)) if _differ(*pair, tolerance)]
        return f"{name!r} of row {rows[0]} is {one[rows[0]]!r} and {other[rows[0]]!r}" if rows else None
    if isinstance(one, Ragged):
        return _in_tokens(name, one, other, tolerance)
    if one.shape != other.shape:
        return f"{name!r} is {list(one.shape)} and {list(other.shape)}"
    if (place := _apart(one, other, tolerance)) is None:
        return None
    return f"{name!r} of row {place[0]} is {one[place].item()} and {other[place].item()}"


def _differ(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether two objects differ: by value where Python, NumPy and torch define it, else by their pickles."""
    if type(one) is not type(other):
        return True
    match one:
        case Tensor() | np.ndarray() | np.generic() | float() | complex():
            return _numbers_differ(one, other, tolerance)
        case list() | tuple():
            return len(one) != len(other) or any(_differ(*pair, tolerance) for pair in zip(one, other, strict=True))
        case dict():
            return one.keys() != other.keys() or any(_differ(one[key], other[key], tolerance) for key in one)
        case None | int() | str() | bytes() | set() | frozenset():
            return one != other
    return pickle.dumps(one) != pickle.dumps(other)


def _numbers_differ(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether two tensors, arrays or numbers of one class differ in type, shape or value."""
    if isinstance(one, Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return not is_alike or _apart(one, other, tolerance) is not None
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return True
    if one.dtype.kind in "fc":
        return not np.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True).all()
    return (
        one.tobytes() != other.tobytes() if one.dtype.kind != "O" else _differ(one.tolist(), other.tolist(), tolerance)
    )


def _in_tokens(name: str, one: Ragged, other: Ragged, tolerance: float) -> str | None:
    differing = (one.lengths != other.lengths).nonzero().flatten().tolist()
    if differing:
        row = differing[0]
        return f"{name!r} of row {row} has {int(one.lengths[row])} and {int(other.lengths[row])} tokens"
    if one.values.shape != other.values.shape:
        return f"{name!r} has values {list(one.values.shape)} and {list(other.values.shape)}"
    if (place := _apart(one.values, other.values, tolerance)) is None:
        return None
    row = int(one.segment_ids[place[0]])
    token = place[0] - int(one.offsets[row])
    return f"{name!r} of row {row}, token {token}, is {one.values[place].item()} and {other.values[place].item()}"


def _apart(one: Tensor, other: Tensor, tolerance: float) -> tuple[int, ...] | None:
    """Return the position of the first entries outside the tolerance."""
    if one.is_floating_point() or one.is_complex():
        apart = ~torch.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        apart = one != other
    places = apart.nonzero()
    return tuple(places[0].tolist()) if len(places) else None

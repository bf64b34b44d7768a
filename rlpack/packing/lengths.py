"""Check lengths that a caller hands in, and round them up."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlpack.packing.errors import PackingError

# Segment bounds are int32 in every attention kernel.
MAX_LENGTH = 2**31 - 1

Integers = Sequence[int] | np.ndarray | Iterable[Any]


def check_lengths(lengths: Integers, name: str = "length") -> np.ndarray:
    """Return `lengths` as int64 [B].

    >>> check_lengths([3, 0, 2])
    array([3, 0, 2])

    Args:
        lengths: whole numbers of at least 0, one a row.
        name: what errors call one of them.

    Raises:
        PackingError: a value is negative, too large, boolean, a fraction, NaN or no number; names row and value.
    """
    array = check_integers(lengths, name)
    wrong = (array < 0) | (array > MAX_LENGTH)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise PackingError(f"{name} of row {row} is {array[row]}; it has to be between 0 and {MAX_LENGTH}")
    return array


def check_integers(values: Integers, name: str) -> np.ndarray:
    """Return `values` as int64 [B]; booleans, fractions, NaN and text are refused.

    Raises:
        PackingError: names row and value.
    """
    if isinstance(values, (list, tuple)):
        for row, value in enumerate(values):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                raise _not_whole(name, row, value)
            if abs(int(value)) > 2**62:
                raise PackingError(f"{name} of row {row} is {value}; it has to be a whole number of 62 bits at most")
        return np.array(values, dtype=np.int64)
    array = np.asarray(values)
    if array.ndim != 1:
        raise PackingError(f"{name}s have shape {array.shape}; give one whole number a row")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        row = int(np.argmax(np.isnan(array))) if array.dtype.kind == "f" else 0
        raise _not_whole(name, row, array[row].item())
    if array.dtype.kind == "u" and int(array.max()) > 2**62:
        row = int(np.argmax(array))
        raise PackingError(f"{name} of row {row} is {array[row]}; it has to be a whole number of 62 bits at most")
    return array.astype(np.int64)


def align(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Round every length up to a multiple of `multiple`.

    >>> align(np.array([5, 8, 0]), 4)
    array([8, 8, 0])
    """
    return -(-lengths // multiple) * multiple


def check_count(value: Any, name: str) -> int:
    """Return `value`, a whole number of at least 1.

    Raises:
        PackingError: it is none; `name` says which key.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise PackingError(f"{name} is {value!r}; it has to be a whole number of at least 1")
    return int(value)


def _not_whole(name: str, row: int, value: Any) -> PackingError:
    return PackingError(f"{name} of row {row} is {value!r}, of type {type(value).__name__}; give whole numbers")

"""Validate lengths, counts and seeds, and align lengths."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlpack.packing.errors import PackingError

# Segment bounds are int32 in every attention kernel.
MAX_LENGTH = 2**31 - 1
# Stands for "no limit" where kernels compare products of rows and slots.
UNLIMITED = 2**62
# Ids leave room for one sum or difference in int64.
_LARGEST = 2**62

Integers = Sequence[int] | np.ndarray | Iterable[Any]


@runtime_checkable
class _ArrayLike(Protocol):
    """An array, series or tensor that NumPy converts at once."""

    def __array__(self) -> np.ndarray: ...


def check_lengths(lengths: Integers, name: str = "length") -> np.ndarray:
    """Return `lengths` as int64 [B].

    >>> check_lengths([3, 0, 2])
    array([3, 0, 2])

    Args:
        lengths: integers of at least 0, one per row.
        name: name of one length in error messages.

    Raises:
        PackingError: a value is negative, too large or not an integer; the message names its row.
    """
    array = check_integers(lengths, name)
    wrong = (array < 0) | (array > MAX_LENGTH)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise PackingError(f"{name} of row {row} is {array[row]}; it has to be between 0 and {MAX_LENGTH}")
    return array


def check_integers(values: Integers, name: str) -> np.ndarray:
    """Return `values` as int64 [B]; reject booleans, fractions, NaN and text.

    >>> check_integers((row * row for row in range(3)), "length")
    array([0, 1, 4])

    Raises:
        PackingError: a value is not an integer or too large; the message names its row.
    """
    items = to_list_or_array(values, name)
    if isinstance(items, list):
        for row, value in enumerate(items):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                raise _not_whole(name, row, value)
            if abs(int(value)) > _LARGEST:
                raise _too_large(name, row, value)
        return np.array(items, dtype=np.int64)
    if items.size == 0:
        return np.zeros(0, dtype=np.int64)
    if items.dtype.kind not in "iu":
        row = int(np.argmax(np.isnan(items))) if items.dtype.kind == "f" else 0
        raise _not_whole(name, row, items[row].item())
    if items.dtype.kind == "u" and int(items.max()) > _LARGEST:
        row = int(np.argmax(items))
        raise _too_large(name, row, items[row])
    return items.astype(np.int64)


def to_list_or_array(values: Any, name: str) -> list[Any] | np.ndarray:
    """Return `values` as a list; an array, a series or a tensor becomes an array [B] of one dtype.

    Raises:
        PackingError: they are neither one-dimensional nor iterable.
    """
    if isinstance(values, Iterable) and not isinstance(values, _ArrayLike):
        return list(values)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        # A tensor of a dtype that NumPy lacks, on the autograd graph, or on another device.
        reason = str(error).partition("\n")[0]
        raise PackingError(f"{name}s can't be read as an array: {reason}; give plain numbers, one per row") from error
    if array.ndim != 1:
        raise PackingError(f"{name}s have shape {array.shape}; give one number per row")
    return array.tolist() if array.dtype == object else array


def align(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Round every length up to a multiple of `multiple`.

    >>> align(np.array([5, 8, 0]), 4)
    array([8, 8, 0])
    """
    return -(-lengths // multiple) * multiple


def check_count(value: Any, name: str, limit: int = MAX_LENGTH) -> int:
    """Return `value`, checked to be an integer from 1 to `limit`.

    Raises:
        PackingError: it is not; the message starts with `name`.
    """
    if isinstance(value, float) and value.is_integer() and 1 <= value <= limit:
        raise PackingError(f"{name} is {value!r}; write it as {int(value)}, without a point or an exponent")
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise PackingError(f"{name} is {value!r}; it has to be a whole number of at least 1")
    if value > limit:
        raise PackingError(f"{name} is {value}, over the limit of {limit}; lower it")
    return int(value)


def check_seed(seed: Any) -> int:
    """Return `seed`, checked to be an integer.

    Raises:
        PackingError: it is not.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise PackingError(f"seed is {seed!r}; it has to be a whole number")
    return int(seed)


def _not_whole(name: str, row: int, value: Any) -> PackingError:
    return PackingError(f"{name} of row {row} is {value!r}, of type {type(value).__name__}; give whole numbers")


def _too_large(name: str, row: int, value: Any) -> PackingError:
    return PackingError(f"{name} of row {row} is {value}; it has to be a whole number of at most 62 bits")

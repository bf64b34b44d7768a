"""`Ragged`: a column with one run of tokens per row, without padding."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.copying import can_copy, copy_runs, new_values
from rlpack.batch.dtypes import put, take
from rlpack.batch.errors import DataError
from rlpack.batch.serialization import from_array, to_array

Rows = Sequence[int] | np.ndarray | Tensor
_FLOATS = (float, np.floating)


def row_index(rows: Rows, num_rows: int) -> np.ndarray:
    """Return `rows` as int64 positions in `[0, num_rows)`; negative ones count from the end, a bool mask selects.

    >>> row_index([-1, 0], 3)
    array([2, 0])

    Raises:
        DataError: a row does not exist, or `rows` is not one-dimensional and whole.
    """
    index = as_array(rows, "rows")
    if index.dtype == bool:
        if index.size != num_rows:
            raise DataError(f"a row mask has {index.size} entries for {num_rows} rows")
        return np.flatnonzero(index)
    outside = (index < -num_rows) | (index >= num_rows)
    if outside.any():
        raise DataError(f"row {index[outside][0]} does not exist; there are {num_rows} rows")
    index = index.astype(np.int64)
    return np.where(index < 0, index + num_rows, index)


def as_array(values: Rows, what: str) -> np.ndarray:
    """Return whole numbers or booleans as an array of one dimension; `what` is what errors call them.

    Raises:
        DataError: they are neither, or some of a list are booleans and others are not.
    """
    if isinstance(values, (list, tuple)) and len({isinstance(value, (bool, np.bool_)) for value in values}) > 1:
        raise DataError(f"{what} mix booleans with numbers; give whole numbers, or a mask of booleans alone")
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} can't be read as an array: {error}; give one list of whole numbers") from error
    if array.size == 0 and array.dtype != bool:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise DataError(f"{what} are {array.dtype} with {array.ndim} dimensions; give one list of whole numbers")
    return array


def repeated(num_rows: int, n: int) -> np.ndarray:
    """Return every position of `num_rows` rows `n` times, copies side by side, int64 [n · num_rows].

    >>> repeated(2, 3)
    array([0, 0, 0, 1, 1, 1])

    Raises:
        DataError: `n` is no whole number of at least 0.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
        raise DataError(f"n is {n!r}; rows are repeated a whole number of times, at least 0")
    return np.repeat(np.arange(num_rows), n)


def spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the concatenation of `arange(start, start + length)`, int64 [T], for every pair of entries.

    >>> spans(torch.tensor([5, 0]), torch.tensor([2, 3]))
    tensor([5, 6, 0, 1, 2])
    """
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    shift = torch.repeat_interleave(starts - ends + lengths, lengths, output_size=total)
    return shift.add_(torch.arange(total, device=lengths.device))


@dataclass(frozen=True, eq=False)
class Ragged:
    """Tokens of all rows end to end, and how many each row has. Rows may be empty; there may be none.

    Nothing writes into a `Ragged`: methods return new ones, which share memory where they can.

    >>> column = Ragged(torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))
    >>> column.select([2, 0]).values
    tensor([3, 1, 2])

    Attributes:
        values: one entry a token, [T, ...].
        lengths: tokens of each row, int64 [B], on the device of `values`; their sum is T.

    Raises:
        DataError: lengths are not int64 [B], negative, or don't add up to T.
    """

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        """Check that lengths and values fit."""
        values, lengths = self.values, self.lengths
        if not isinstance(values, Tensor) or not isinstance(lengths, Tensor):
            raise DataError(f"values are a {type(values).__name__}, lengths a {type(lengths).__name__}; give tensors")
        if values.ndim < 1 or lengths.ndim != 1 or lengths.dtype != torch.int64:
            shapes = f"values {list(values.shape)}, lengths {lengths.dtype} {list(lengths.shape)}"
            raise DataError(f"{shapes}; a ragged column needs values [T, ...] and lengths int64 [B]")
        if lengths.device != values.device:
            raise DataError(f"values are on {values.device} and lengths on {lengths.device}; put them on one device")
        if lengths.numel() and int(lengths.min()) < 0:
            row = int(lengths.argmin())
            raise DataError(f"row {row} has length {int(lengths[row])}; a length is at least 0")
        if (total := int(lengths.sum())) != values.shape[0]:
            raise DataError(f"lengths add up to {total} tokens, and values have {values.shape[0]}")

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> "Ragged":
        """Return the first `lengths[b]` entries of every row of `padded` [B, L, ...].

        >>> Ragged.from_padded(torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1])).values
        tensor([1, 2, 3])

        Raises:
            DataError: there are not B lengths, they are not whole numbers, or one is outside 0 to L.
        """
        _check_whole(lengths)
        if padded.ndim < 2 or lengths.shape != padded.shape[:1]:
            raise DataError(
                f"padded is {list(padded.shape)} and lengths are {list(lengths.shape)}; give [B, L] and [B]"
            )
        rows, width = padded.shape[:2]
        lengths = lengths.to(device=padded.device, dtype=torch.int64)
        if rows and (int(lengths.min()) < 0 or int(lengths.max()) > width):
            raise DataError(f"lengths go from {int(lengths.min())} to {int(lengths.max())}; rows have {width} entries")
        starts = torch.arange(rows, device=padded.device) * width
        return cls(take(padded.reshape(rows * width, *padded.shape[2:]), spans(starts, lengths)), lengths)

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor | Iterable[Any]], dtype: torch.dtype | None = None) -> "Ragged":
        """Return a column whose row b holds the tokens `rows[b]`: 1-D tensors or plain lists.

        >>> Ragged.from_rows([[1, 2], [], [3]], torch.int64).lengths
        tensor([2, 0, 1])

        Raises:
            DataError: without a row and a type there is nothing to tell the column's type from; a value does not fit
                the type, as a fraction does not fit one of whole numbers.
        """
        if rows and all(isinstance(row, Tensor) for row in rows):
            tensors = [row for row in rows if isinstance(row, Tensor)]
            values = torch.cat(tensors)
            if dtype is not None and values.is_floating_point() and not dtype.is_floating_point:
                raise DataError(f"rows are {values.dtype}, the column {dtype}, which has no fractions; convert them")
            return cls(values if dtype is None else values.to(dtype), torch.tensor([len(row) for row in tensors]))
        if dtype is None:
            raise DataError("from_rows needs a dtype, unless it is given tensors")
        lists = [row.tolist() if isinstance(row, Tensor) else list(row) for row in rows]
        lengths = torch.tensor([len(row) for row in lists], dtype=torch.int64)
        return cls(_from_lists(lists, dtype), lengths)

    @classmethod
    def concat(cls, columns: Sequence["Ragged"]) -> "Ragged":
        """Return the rows of all `columns`, one after the other.

        >>> Ragged.concat([Ragged.from_rows([[1]], torch.int64)] * 2).values
        tensor([1, 1])

        Raises:
            DataError: there is no column, or types, devices or shapes differ.
        """
        if not columns:
            raise DataError("concat needs at least one ragged column")
        kinds = {(str(c.values.dtype), str(c.values.device), tuple(c.values.shape[1:])) for c in columns}
        if len(kinds) > 1:
            raise DataError(f"ragged columns differ in type, device or shape: {sorted(map(str, kinds))}")
        return cls(torch.cat([c.values for c in columns]), torch.cat([c.lengths for c in columns]))

    @cached_property
    def offsets(self) -> Tensor:
        """Where each row starts, and at the end T: int64 [B + 1]."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def segment_ids(self) -> Tensor:
        """The row of every token, int64 [T]."""
        rows = torch.arange(self.num_rows, device=self.values.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=self.values.shape[0])

    @property
    def num_rows(self) -> int:
        """How many rows there are (B)."""
        return self.lengths.shape[0]

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Tensor:
        """Return row `row` as a view, [n, ...]."""
        position = int(row_index([row], self.num_rows)[0])
        return self.values[int(self.offsets[position]) : int(self.offsets[position + 1])]

    def rows(self) -> list[Tensor]:
        """Return every row as a view."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def select(self, rows: Rows) -> "Ragged":
        """Return the given rows in the given order; a row may come more than once.

        Neighbouring rows in their own order are a view, others one gather.

        Raises:
            DataError: a row does not exist.
        """
        index = row_index(rows, self.num_rows)
        if index.size and (np.diff(index) == 1).all():
            first, last = int(index[0]), int(index[-1]) + 1
            return Ragged(self.values[int(self.offsets[first]) : int(self.offsets[last])], self.lengths[first:last])
        positions = torch.from_numpy(index).to(self.values.device)
        return self.gather(positions, self.lengths[positions])

    def gather(self, rows: Tensor, lengths: Tensor) -> "Ragged":
        """Return the first `lengths[i]` tokens of row `rows[i]` (int64 [n]); no length passes its row's."""
        if can_copy(self.values):
            values = new_values(self.values, int(lengths.sum()))
            copy_runs(self.values, values, self.offsets[:-1][rows], lengths.cumsum(0) - lengths, lengths)
            return Ragged(values, lengths)
        return Ragged(take(self.values, spans(self.offsets[:-1][rows], lengths)), lengths)

    def repeat_interleave(self, n: int) -> "Ragged":
        """Return every row `n` times, copies side by side.

        >>> Ragged.from_rows([[1, 2], [3]], torch.int64).repeat_interleave(2).values
        tensor([1, 2, 1, 2, 3, 3])

        Raises:
            DataError: `n` is no whole number of at least 0.
        """
        return self.select(repeated(self.num_rows, n))

    def with_values(self, values: Tensor) -> "Ragged":
        """Return a column of the same lengths that holds `values` [T, ...]."""
        return Ragged(values, self.lengths)

    def with_lengths(self, lengths: Tensor) -> "Ragged":
        """Return the column with rows cut, or filled up with zeros at their end, to `lengths` (int64 [B]).

        >>> Ragged.from_rows([[1, 2], [3]], torch.int64).with_lengths(torch.tensor([1, 3])).values
        tensor([1, 3, 0, 0])

        Raises:
            DataError: there is not one length a row, or one is negative or no whole number.
        """
        _check_whole(lengths)
        if lengths.shape != self.lengths.shape:
            raise DataError(f"{lengths.numel()} lengths were given for {self.num_rows} rows")
        if lengths.numel() and int(lengths.min()) < 0:
            raise DataError(
                f"row {int(lengths.argmin())} is to have {int(lengths.min())} tokens; a length is at least 0"
            )
        kept = torch.minimum(self.lengths, lengths)
        filled = self.values.new_zeros((int(lengths.sum()), *self.values.shape[1:]))
        tokens = take(self.values, spans(self.offsets[:-1], kept))
        return Ragged(put(filled, spans(lengths.cumsum(0) - lengths, kept), tokens), lengths)

    def to_padded(self, pad_value: float = 0, length: int | None = None) -> Tensor:
        """Return the rows side by side, filled up at their end with `pad_value`: [B, L, ...].

        L is `length`, or the longest row.

        >>> Ragged.from_rows([[1, 2], [3]], torch.int64).to_padded(-1)
        tensor([[ 1,  2],
                [ 3, -1]])

        Raises:
            DataError: a row is longer than `length`.
        """
        longest = int(self.lengths.max()) if self.num_rows else 0
        width = longest if length is None else length
        if width < longest:
            raise DataError(f"row {int(self.lengths.argmax())} has {longest} tokens, over the length of {width}")
        padded = self.values.new_full((self.num_rows * width, *self.values.shape[1:]), pad_value)
        starts = torch.arange(self.num_rows, device=self.values.device) * width
        padded = put(padded, spans(starts, self.lengths), self.values)
        return padded.view(self.num_rows, width, *self.values.shape[1:])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Ragged":
        """Return the column on `device`."""
        move = {"device": device, "non_blocking": non_blocking}
        return Ragged(self.values.to(**move), self.lengths.to(**move))

    def pin_memory(self) -> "Ragged":
        """Return the column in page-locked memory, from which copies to a GPU can overlap."""
        return Ragged(self.values.pin_memory(), self.lengths.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (*to_array(self.values), to_array(self.lengths)[0])

    def __copy__(self) -> "Ragged":
        return Ragged(self.values, self.lengths)

    def __repr__(self) -> str:
        kind = str(self.values.dtype).removeprefix("torch.")
        inner = "".join(f", {size}" for size in self.values.shape[1:])
        return f"Ragged({kind}, {self.num_rows} rows, {self.values.shape[0]} tokens{inner})"


def _check_whole(lengths: Tensor) -> None:
    """Raise a `DataError` unless `lengths` is a tensor of whole numbers."""
    if not isinstance(lengths, Tensor):
        raise DataError(f"lengths are a {type(lengths).__name__}; give a tensor of whole numbers, one a row")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise DataError(f"lengths are {lengths.dtype}; give whole numbers (torch.int64)")


def _from_lists(lists: Sequence[list[Any]], dtype: torch.dtype) -> Tensor:
    """Return the numbers of all lists, one list after the other, as `dtype`."""
    flat = list(chain.from_iterable(lists))
    whole = not (dtype.is_floating_point or dtype.is_complex)
    try:
        values = torch.tensor(flat, dtype=None if whole and flat else dtype)
        fractions = whole and bool(flat) and values.is_floating_point()
        if not fractions:
            return values if values.dtype == dtype else torch.tensor(flat, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"rows can't be made {dtype}: {error}; give lists of numbers that fit it") from error
    floats = ((row, item) for row, items in enumerate(lists) for item in items if isinstance(item, _FLOATS))
    row, value = next(floats, (0, lists[0]))
    raise DataError(f"row {row} holds {value!r}, the column is {dtype}, which has no fractions; give whole numbers")


def _rebuild(values: np.ndarray, dtype: str, lengths: np.ndarray) -> Ragged:
    """Put a pickled column together again; its tensors use the arrays' memory."""
    return Ragged(from_array(values, dtype), from_array(lengths, "int64"))

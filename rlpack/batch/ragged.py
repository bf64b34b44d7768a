"""`Ragged`: a column with a variable number of tokens per row, without padding.

Shape letters: B rows, T tokens over all rows, L tokens of the longest row, n selected rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.conversion import concat_lists, concat_tensors
from rlpack.batch.copying import can_copy, clone, copy_runs, new_values
from rlpack.batch.dtypes import put_entries, take_entries
from rlpack.batch.errors import DataError
from rlpack.batch.serialization import from_array, to_array

Rows = Sequence[int] | np.ndarray | Tensor


def row_index(rows: Rows, num_rows: int) -> np.ndarray:
    """Return `rows` as int64 positions in `[0, num_rows)`.

    Negative positions count from the end; a bool mask [num_rows] selects its true rows.

    >>> row_index([-1, 0], 3)
    array([2, 0])

    Raises:
        DataError: a row does not exist, or `rows` is not a one-dimensional list of integers or booleans, or is uint8.
    """
    index = as_array(rows, "rows")
    if index.dtype == bool:
        if index.size != num_rows:
            raise DataError(f"a row mask has {index.size} entries for {num_rows} rows")
        return np.flatnonzero(index)
    if index.dtype == np.uint8:  # the type of masks in older code, whose zeros and ones would be read as rows 0 and 1
        raise DataError("rows are uint8, which may be a mask or positions; pass bool for a mask, int64 for positions")
    outside = (index < -num_rows) | (index >= num_rows)
    if outside.any():
        raise DataError(f"row {index[outside][0]} does not exist; there are {num_rows} rows")
    index = index.astype(np.int64)
    return np.where(index < 0, index + num_rows, index)


def as_array(values: Rows, what: str) -> np.ndarray:
    """Return integers or booleans as a one-dimensional array; error messages call them `what`.

    Raises:
        DataError: they are neither, or a list mixes both.
    """
    if isinstance(values, (list, tuple)) and len({isinstance(value, (bool, np.bool_)) for value in values}) > 1:
        raise DataError(f"{what} mix booleans with numbers; pass integers, or a mask of booleans only")
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} can't be read as an array: {error}; pass a flat list of integers") from error
    if array.size == 0 and array.dtype != bool:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise DataError(f"{what} are {array.dtype} with {array.ndim} dimensions; pass a flat list of integers")
    return array


def repeat_positions(num_rows: int, n: int) -> np.ndarray:
    """Return positions 0 to num_rows − 1, each repeated `n` times, int64 [n · num_rows].

    >>> repeat_positions(2, 3)
    array([0, 0, 0, 1, 1, 1])

    Raises:
        DataError: `n` is not a non-negative integer.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
        raise DataError(f"n is {n!r}; it must be an integer of at least 0")
    return np.repeat(np.arange(num_rows), n)


def spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the concatenation of `arange(start, start + length)` over all pairs, int64 [T].

    >>> spans(torch.tensor([5, 0]), torch.tensor([2, 3]))
    tensor([5, 6, 0, 1, 2])
    """
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    shift = torch.repeat_interleave(starts - ends + lengths, lengths, output_size=total)
    return shift.add_(torch.arange(total, device=lengths.device))


@dataclass(frozen=True, eq=False)
class Ragged:
    """A column with a variable number of tokens per row, stored end to end.

    A `Ragged` is immutable: methods return new ones, which share memory where possible.

    >>> column = Ragged(torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))
    >>> column.select([2, 0]).values
    tensor([3, 1, 2])

    Attributes:
        values: one entry per token, [T, ...].
        lengths: tokens of each row, int64 [B], on the device of `values`; their sum is T.

    Raises:
        DataError: lengths are not int64 [B], are negative, or don't add up to T.
    """

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        """Check that lengths and values match."""
        values, lengths = self.values, self.lengths
        if not isinstance(values, Tensor) or not isinstance(lengths, Tensor):
            raise DataError(f"values are a {type(values).__name__}, lengths a {type(lengths).__name__}; pass tensors")
        if values.ndim < 1 or lengths.ndim != 1 or lengths.dtype != torch.int64:
            shapes = f"values {list(values.shape)}, lengths {lengths.dtype} {list(lengths.shape)}"
            raise DataError(f"{shapes}; a ragged column needs values [T, ...] and lengths int64 [B]")
        if lengths.device != values.device:
            raise DataError(f"values are on {values.device} and lengths on {lengths.device}; move them to one device")
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
            DataError: there are not B lengths, they are not integers, or one is outside 0 to L.
        """
        _check_integers(lengths)
        if padded.ndim < 2 or lengths.shape != padded.shape[:1]:
            shapes = f"padded is {list(padded.shape)} and lengths are {list(lengths.shape)}"
            raise DataError(f"{shapes}; they must be [B, L, ...] and [B]")
        rows, width = padded.shape[:2]
        lengths = lengths.to(device=padded.device, dtype=torch.int64)
        if rows and (int(lengths.min()) < 0 or int(lengths.max()) > width):
            raise DataError(f"lengths go from {int(lengths.min())} to {int(lengths.max())}; rows have {width} entries")
        starts = torch.arange(rows, device=padded.device) * width
        return cls(take_entries(padded.reshape(rows * width, *padded.shape[2:]), spans(starts, lengths)), lengths)

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor | Iterable[Any]], dtype: torch.dtype | None = None) -> "Ragged":
        """Return a column whose row b has the tokens `rows[b]`, a 1-D tensor or a list.

        Numbers are rounded to the nearest one of a floating-point dtype: 16777217 is 16777216 in float32.

        >>> Ragged.from_rows([[1, 2], [], [3]], torch.int64).lengths
        tensor([2, 0, 1])

        Raises:
            DataError: `dtype` is missing and rows are not tensors, tensor rows with tokens differ in dtype, or a value
                does not fit the dtype, such as a fraction in an integer column, −1 in an unsigned one, 2 in a boolean
                one, 70000 in a float16 one, or a complex number in a real one.
        """
        if rows and all(isinstance(row, Tensor) for row in rows):
            return cls(*concat_tensors([row for row in rows if isinstance(row, Tensor)], dtype))
        if dtype is None:
            raise DataError("from_rows needs a dtype, unless rows are tensors")
        lists = [row.tolist() if isinstance(row, Tensor) else list(row) for row in rows]
        lengths = torch.tensor([len(row) for row in lists], dtype=torch.int64)
        return cls(concat_lists(lists, lengths, dtype), lengths)

    @classmethod
    def concat(cls, columns: Sequence["Ragged"]) -> "Ragged":
        """Return the rows of all `columns`, one after the other.

        >>> Ragged.concat([Ragged.from_rows([[1]], torch.int64)] * 2).values
        tensor([1, 1])

        Raises:
            DataError: there is no column, or dtypes, devices or shapes differ.
        """
        if not columns:
            raise DataError("concat needs at least one ragged column")
        kinds = {(str(c.values.dtype), str(c.values.device), tuple(c.values.shape[1:])) for c in columns}
        if len(kinds) > 1:
            raise DataError(f"ragged columns differ in dtype, device or shape: {sorted(map(str, kinds))}")
        return cls(torch.cat([c.values for c in columns]), torch.cat([c.lengths for c in columns]))

    @cached_property
    def offsets(self) -> Tensor:
        """Return the start of each row, and T at the end, int64 [B + 1]."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def segment_ids(self) -> Tensor:
        """Return the row of each token, int64 [T]."""
        rows = torch.arange(self.num_rows, device=self.values.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=self.values.shape[0])

    @property
    def num_rows(self) -> int:
        """Return the number of rows (B)."""
        return self.lengths.shape[0]

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the rows, each a view [n, ...]."""
        return iter(self.rows())

    def __getitem__(self, row: int) -> Tensor:
        """Return row `row` as a view, [n, ...]."""
        position = int(row_index([row], self.num_rows)[0])
        return self.values[int(self.offsets[position]) : int(self.offsets[position + 1])]

    def rows(self) -> list[Tensor]:
        """Return every row as a view."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def select(self, rows: Rows) -> "Ragged":
        """Return the given rows in the given order; rows may repeat, and consecutive ones are a view.

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
        """Return the first `lengths[i]` tokens of row `rows[i]`, int64 [n] each; no length may exceed its row's."""
        if can_copy(self.values):
            values = new_values(self.values, int(lengths.sum()))
            copy_runs(self.values, values, self.offsets[:-1][rows], lengths.cumsum(0) - lengths, lengths)
            return Ragged(values, lengths)
        return Ragged(take_entries(self.values, spans(self.offsets[:-1][rows], lengths)), lengths)

    def repeat_interleave(self, n: int) -> "Ragged":
        """Return every row `n` times, copies next to each other.

        >>> Ragged.from_rows([[1, 2], [3]], torch.int64).repeat_interleave(2).values
        tensor([1, 2, 1, 2, 3, 3])

        Raises:
            DataError: `n` is not a non-negative integer.
        """
        return self.select(repeat_positions(self.num_rows, n))

    def with_values(self, values: Tensor) -> "Ragged":
        """Return a column of the same lengths with other `values`, [T, ...]."""
        return Ragged(values, self.lengths)

    def count_nonzero(self) -> Tensor:
        """Return the number of nonzero (for a mask, true) tokens per row, int64 [B].

        >>> Ragged.from_rows([[True, False, True], []], torch.bool).count_nonzero()
        tensor([2, 0])
        """
        nonzero = (self.values != 0).long()
        return self.lengths.new_zeros(self.num_rows).index_add(0, self.segment_ids, nonzero)

    def with_lengths(self, lengths: Tensor) -> "Ragged":
        """Return the column with rows cut, or zero-padded at the end, to `lengths` (int64 [B]).

        >>> Ragged.from_rows([[1, 2], [3]], torch.int64).with_lengths(torch.tensor([1, 3])).values
        tensor([1, 3, 0, 0])

        Raises:
            DataError: lengths are not B non-negative integers.
        """
        _check_integers(lengths)
        if lengths.shape != self.lengths.shape:
            raise DataError(f"there are {lengths.numel()} lengths and {self.num_rows} rows; pass one length per row")
        if lengths.numel() and int(lengths.min()) < 0:
            raise DataError(f"row {int(lengths.argmin())} has length {int(lengths.min())}; a length is at least 0")
        copied = torch.minimum(self.lengths, lengths)
        padded = self.values.new_zeros((int(lengths.sum()), *self.values.shape[1:]))
        tokens = take_entries(self.values, spans(self.offsets[:-1], copied))
        return Ragged(put_entries(padded, spans(lengths.cumsum(0) - lengths, copied), tokens), lengths)

    def to_padded(self, pad_value: float = 0, length: int | None = None) -> Tensor:
        """Return the rows padded at the end with `pad_value`, [B, L, ...]; L is `length`, or the longest row's.

        >>> Ragged.from_rows([[1, 2], [3]], torch.int64).to_padded(-1)
        tensor([[ 1,  2],
                [ 3, -1]])

        Raises:
            DataError: a row is longer than `length`, or `length` is negative.
        """
        longest = int(self.lengths.max()) if self.num_rows else 0
        width = longest if length is None else length
        if width < 0:
            raise DataError(f"length is {width}; it has to be at least 0")
        if width < longest:
            raise DataError(f"row {int(self.lengths.argmax())} has {longest} tokens, which exceeds the length {width}")
        padded = self.values.new_full((self.num_rows * width, *self.values.shape[1:]), pad_value)
        starts = torch.arange(self.num_rows, device=self.values.device) * width
        padded = put_entries(padded, spans(starts, self.lengths), self.values)
        return padded.view(self.num_rows, width, *self.values.shape[1:])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Ragged":
        """Return the column on `device`."""
        move = {"device": device, "non_blocking": non_blocking}
        return Ragged(self.values.to(**move), self.lengths.to(**move))

    def pin_memory(self) -> "Ragged":
        """Return the column in page-locked memory, from which copies to a GPU are asynchronous."""
        return Ragged(self.values.pin_memory(), self.lengths.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (*to_array(self.values), to_array(self.lengths)[0])

    def __copy__(self) -> "Ragged":
        return Ragged(self.values, self.lengths)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ragged":
        return Ragged(clone(self.values, memo), clone(self.lengths, memo))

    def __repr__(self) -> str:
        kind = str(self.values.dtype).removeprefix("torch.")
        inner = "".join(f", {size}" for size in self.values.shape[1:])
        return f"Ragged({kind}, {self.num_rows} rows, {self.values.shape[0]} tokens{inner})"


def _check_integers(lengths: Tensor) -> None:
    """Raise a `DataError` unless `lengths` is an integer tensor."""
    if not isinstance(lengths, Tensor):
        raise DataError(f"lengths are a {type(lengths).__name__}; pass an integer tensor, one length per row")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise DataError(f"lengths are {lengths.dtype}; they must be integers (torch.int64)")


def _rebuild(values: np.ndarray, dtype: str, lengths: np.ndarray) -> Ragged:
    """Rebuild a pickled column; its tensors share the arrays' memory."""
    return Ragged(from_array(values, dtype), from_array(lengths, "int64"))

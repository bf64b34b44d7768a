"""`RemoteColumn`: handles, positions and lengths of rows in the object store.

The driver moves these columns, so its traffic grows with the rows of a batch and never with their tokens. A payload is
a mapping from name to column, as one rank produced it. The store defines what a handle is and how payloads are read
(`rlpack.distributed.ray_store` uses Ray's object store).

Invariant (tests/unit/batch/test_remote.py): any operation on a `RemoteColumn` gives, once resolved, the result of the
same operation on the column itself.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.copying import copy_from, new_values
from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from rlpack.batch.serialization import from_array, to_array

Handle = Hashable
# Maps handles to their payloads, in order.
PayloadReader = Callable[[Sequence[Handle]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, eq=False)
class RemoteColumn:
    """The location of each row of a ragged column, a tensor [B, k, ...] or a list.

    Payloads hold a tensor as a ragged column with one entry per row.

    Attributes:
        handles: handles of the payloads.
        names: the column's name in each payload.
        source: position of the row's payload in `handles`, int32 [B]; -1 for a row of zeros (None in a list).
        stored_row: the row's position in its payload, int64 [B].
        read_lengths: number of leading tokens to read from each row, int64 [B], followed by zeros up to its length.
            Zeros for a list, ones for a tensor.
        lengths: tokens of each row, int64 [B]; None for a list and for a tensor.
        empty: the column without rows: its kind, dtype and shape.
    """

    handles: tuple[Handle, ...]
    names: tuple[str, ...]
    source: np.ndarray
    stored_row: np.ndarray
    read_lengths: np.ndarray
    lengths: Tensor | None
    empty: Ragged | Tensor | list

    @classmethod
    def whole(cls, handle: Handle, name: str, column: Ragged | Tensor | list) -> "RemoteColumn":
        """Return a column whose rows are, in order, all rows of one payload."""
        count, lengths = len(column), column.lengths.cpu() if isinstance(column, Ragged) else None
        reads = np.full(count, isinstance(column, Tensor), dtype=np.int64) if lengths is None else lengths.numpy()
        empty: Ragged | Tensor | list = []
        if isinstance(column, Ragged):
            empty = column.select([]).to("cpu")
        elif isinstance(column, Tensor):
            empty = torch.empty((0, *column.shape[1:]), dtype=column.dtype)
        return cls((handle,), (name,), np.zeros(count, dtype=np.int32), np.arange(count), reads, lengths, empty)

    def __len__(self) -> int:
        return self.stored_row.size

    def __repr__(self) -> str:
        kind = "a list" if isinstance(self.empty, list) else str(self._no_values.dtype).removeprefix("torch.")
        return f"RemoteColumn({kind}, {len(self)} rows in {len(self.handles)} payloads)"

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise, as the driver doesn't have the values.

        Raises:
            TypeError: always, with the way out.
        """
        raise TypeError(self._has_no_values())

    def __iter__(self) -> NoReturn:
        """Raise, as `__getitem__`."""
        raise TypeError(self._has_no_values())

    def _compute(self, *_: object) -> NoReturn:
        """Raise, as `__getitem__`."""
        raise TypeError(self._has_no_values())

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _compute
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __invert__ = _compute
    __eq__ = __ne__ = _compute  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__

    if not TYPE_CHECKING:  # type checkers report unknown names

        def __getattr__(self, name: str) -> NoReturn:
            """Raise for methods and attributes of tensors."""
            raise AttributeError(f".{name}: {self._has_no_values()}", name=name, obj=self)

    def _has_no_values(self) -> str:
        """Return the message for a recipe that computes with the column."""
        names = ", ".join(sorted(set(self.__dict__.get("names", ()))))
        column = f"the column {names}" if names else "this column"
        if isinstance(self.__dict__.get("empty"), list):
            what, way_out = "is a list", "return a tensor with one value per row from the role instead"
        else:
            what, way_out = "has several values per row", "compute with it in a role"
        return f"{column} {what} and stays on the ranks, so the driver can't use its values; {way_out}"

    def __reduce__(self) -> tuple[Any, ...]:
        lengths = None if self.lengths is None else self.lengths.numpy()
        empty = to_array(self.empty) if isinstance(self.empty, Tensor) else self.empty
        columns = self.source, self.stored_row, self.read_lengths
        return _rebuild, (self.handles, self.names, *columns, lengths, empty)

    @property
    def _places(self) -> list[tuple[Handle, str]]:
        return list(zip(self.handles, self.names, strict=True))

    @property
    def _no_values(self) -> Tensor:
        """Return an empty tensor of the column's dtype and shape."""
        assert not isinstance(self.empty, list)
        return self.empty.values if isinstance(self.empty, Ragged) else self.empty

    def gather(self, rows: np.ndarray, lengths: Tensor | None = None) -> "RemoteColumn":
        """Return the given rows, int64 [n], in this order; they may repeat.

        Rows are cut to `lengths` (int64 [n]) if it is not None. Handles that none of them needs are left out.
        """
        reads, own = self.read_lengths[rows], None if self.lengths is None else self.lengths[torch.from_numpy(rows)]
        if lengths is not None and own is not None:
            reads, own = np.minimum(reads, lengths.numpy()), lengths
        used, source = _used(self.source[rows], len(self.handles))
        places = tuple(self.handles[number] for number in used), tuple(self.names[number] for number in used)
        return RemoteColumn(*places, source, self.stored_row[rows], reads, own, self.empty)

    def with_lengths(self, lengths: Tensor) -> "RemoteColumn":
        """Return the column with rows cut, or zero-padded, to `lengths` (int64 [B])."""
        return replace(self, read_lengths=np.minimum(self.read_lengths, lengths.numpy()), lengths=lengths)

    def with_handles(self, handles: Mapping[Handle, Handle]) -> "RemoteColumn":
        """Return the column with its handles replaced, `{old: new}`."""
        return replace(self, handles=tuple(handles[handle] for handle in self.handles))

    def reindexed(self, remaining: Mapping[tuple[Handle, str], np.ndarray]) -> "RemoteColumn":
        """Adjust row positions to payloads that hold only some rows.

        `remaining` maps (handle, name) to those rows, ascending int64.
        """
        stored_row = self.stored_row.copy()
        for place, rows in zip(self._places, _rows_by_source(self.source, len(self.handles)), strict=True):
            if place in remaining:
                stored_row[rows] = np.searchsorted(remaining[place], stored_row[rows])
        return replace(self, stored_row=stored_row)

    @classmethod
    def concat(cls, columns: Sequence["RemoteColumn"]) -> "RemoteColumn":
        """Return the rows of all columns, one after the other.

        Raises:
            DataError: they differ in kind, dtype or shape.
        """
        first = columns[0]
        kinds = {_kind(column.empty) for column in columns}
        if len(kinds) > 1:
            raise DataError(f"remote columns differ in dtype or shape: {sorted(kinds)}")
        number = {place: i for i, place in enumerate(dict.fromkeys(place for c in columns for place in c._places))}
        sources = [_renumbered(c.source, np.array([number[p] for p in c._places], dtype=np.int32)) for c in columns]
        lengths = None if first.lengths is None else torch.cat([c.lengths for c in columns if c.lengths is not None])
        stored_row = np.concatenate([column.stored_row for column in columns])
        read_lengths = np.concatenate([column.read_lengths for column in columns])
        handles, names = tuple(place[0] for place in number), tuple(place[1] for place in number)
        return cls(handles, names, np.concatenate(sources), stored_row, read_lengths, lengths, first.empty)

    @classmethod
    def place(cls, columns: Sequence["RemoteColumn"], positions: Sequence[np.ndarray], num_rows: int) -> "RemoteColumn":
        """Return a column whose row `positions[c][i]` is row i of column c; others are zeros."""
        joined, index = cls.concat(columns), np.concatenate(positions)
        source, (stored_row, reads) = np.full(num_rows, -1, dtype=np.int32), np.zeros((2, num_rows), dtype=np.int64)
        source[index], stored_row[index], reads[index] = joined.source, joined.stored_row, joined.read_lengths
        lengths = None
        if joined.lengths is not None:
            lengths = torch.zeros(num_rows, dtype=torch.int64)
            lengths[torch.from_numpy(index)] = joined.lengths
        return replace(joined, source=source, stored_row=stored_row, read_lengths=reads, lengths=lengths)

    def resolve(self, read: PayloadReader) -> Ragged | Tensor | list:
        """Return the column itself; every token is copied once from the payloads that `read` returns."""
        used, source = _used(self.source, len(self.handles))
        payloads = read([self.handles[number] for number in used]) if used else []
        stored = [payload[self.names[number]] for number, payload in zip(used, payloads, strict=True)]
        if isinstance(self.empty, list):
            places = zip(source.tolist(), self.stored_row.tolist(), strict=True)
            return [stored[number][row] if number >= 0 else None for number, row in places]
        values = self._copy_tokens(stored, source)
        return values if self.lengths is None else Ragged(values, self.lengths)

    def _copy_tokens(self, stored: Sequence[Ragged], source: np.ndarray) -> Tensor:
        """Return the tokens of all rows, [T, ...], from `stored[source[b]]` for row b."""
        lengths = torch.ones(len(self), dtype=torch.int64) if self.lengths is None else self.lengths
        starts = lengths.cumsum(0) - lengths
        values = new_values(self._no_values, int(lengths.sum()))
        if not np.array_equal(self.read_lengths, lengths.numpy()):
            values.zero_()
        rows = np.flatnonzero(source >= 0)
        # The row starts of all payloads end to end; those of payload p begin at first_row[p].
        offsets = torch.cat([column.offsets[:-1] for column in stored]) if stored else starts
        first_row = np.cumsum([0, *(column.num_rows for column in stored)])
        stored_starts = offsets[torch.from_numpy(first_row[source[rows]] + self.stored_row[rows])]
        runs = torch.from_numpy(source[rows].astype(np.int64)), stored_starts, starts[torch.from_numpy(rows)]
        copy_from([column.values for column in stored], values, *runs, torch.from_numpy(self.read_lengths[rows]))
        return values


def rows_by_place(columns: Sequence[RemoteColumn]) -> dict[tuple[Handle, str], np.ndarray]:
    """Return the payload rows that the columns read, ascending int64, each once, for each (handle, name)."""
    if not columns:
        return {}
    number: dict[tuple[Handle, str], int] = {}
    sources: list[np.ndarray] = []
    for column in columns:
        numbers = [number.setdefault(place, len(number)) for place in column._places]
        sources.append(_renumbered(column.source, np.array(numbers, dtype=np.int32)))
    source, rows = np.concatenate(sources), np.concatenate([column.stored_row for column in columns])
    order = np.lexsort((rows, source))
    source, rows = source[order], rows[order]
    is_first = np.ones(rows.size, dtype=bool)
    is_first[1:] = (np.diff(source) != 0) | (np.diff(rows) != 0)
    source, rows = source[is_first], rows[is_first]
    bounds = np.searchsorted(source, np.arange(len(number) + 1))
    return {place: rows[first:last] for place, (first, last) in zip(number, pairwise(bounds), strict=True)}


def _used(source: np.ndarray, count: int) -> tuple[list[int], np.ndarray]:
    """Return which of the `count` sources are used, and each row's source renumbered among them."""
    is_used = np.bincount(source[source >= 0], minlength=count) > 0
    return np.flatnonzero(is_used).tolist(), _renumbered(source, np.cumsum(is_used, dtype=np.int32) - 1)


def _renumbered(source: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return `numbers[source]`, and -1 where `source` is -1."""
    return np.where(source >= 0, numbers[source], -1).astype(np.int32) if numbers.size else source


def _rows_by_source(source: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Yield the rows of each of `count` sources, ascending."""
    order = np.argsort(source, kind="stable")
    bounds = np.searchsorted(source[order], np.arange(count + 1))
    for first, last in pairwise(bounds):
        yield order[first:last]


def _kind(empty: Ragged | Tensor | list) -> str:
    if isinstance(empty, list):
        return "list"
    values, rows = (empty.values, "ragged") if isinstance(empty, Ragged) else (empty, "one entry per row")
    return f"{rows} {values.dtype} {list(values.shape[1:])}"


def _rebuild(
    handles: tuple[Handle, ...],
    names: tuple[str, ...],
    source: np.ndarray,
    stored_row: np.ndarray,
    read_lengths: np.ndarray,
    lengths: np.ndarray | None,
    empty: Ragged | tuple[np.ndarray, str] | list,
) -> RemoteColumn:
    """Rebuild a pickled column. Lengths are copied, because memory that came through Ray may be read-only."""
    no_rows = from_array(*empty) if isinstance(empty, tuple) else empty
    counts = None if lengths is None else torch.from_numpy(lengths.copy())
    return RemoteColumn(handles, names, source, stored_row, read_lengths, counts, no_rows)

"""`Remote`: a column whose rows lie elsewhere, of which one holds only where they are and how long.

The driver moves these: a batch of them grows with its rows and never with their tokens. A part is what rows lie in,
together with those of other columns: a mapping from name to column, as one rank made it. What a part's handle is, and
how parts are fetched, is up to the store (`rlpack.distributed.ray_store` keeps them in Ray's object store).

tests/unit/data/test_remote.py asserts that whatever is done to a `Remote` gives, once resolved, what the same does to
the column itself.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.copying import copy_from, new_values
from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from rlpack.batch.serialization import from_array, to_array

Part = Hashable
# Returns the columns of each part.
Fetch = Callable[[Sequence[Part]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, eq=False)
class Remote:
    """Where each row of a ragged column, of a tensor [B, k, ...] or of a list lies.

    A tensor lies in its parts as a ragged column of one entry a row.

    Attributes:
        parts: handles of what the rows lie in.
        names: the column's name in each part.
        part: the row's part, int32 [B]; -1 for a row of zeros (None in a list).
        row: its row there, int64 [B].
        taken: how many of its tokens are taken, from the first on, int64 [B]; zeros follow. Zeros for a list, ones for
            a tensor.
        lengths: tokens of each row, int64 [B]; None for a list and for a tensor.
        empty: the column without a row: its kind, type and shape.
    """

    parts: tuple[Part, ...]
    names: tuple[str, ...]
    part: np.ndarray
    row: np.ndarray
    taken: np.ndarray
    lengths: Tensor | None
    empty: Ragged | Tensor | list

    @classmethod
    def whole(cls, part: Part, name: str, column: Ragged | Tensor | list) -> "Remote":
        """Return a column that lies in `part` row by row."""
        count, lengths = len(column), column.lengths.cpu() if isinstance(column, Ragged) else None
        taken = np.full(count, isinstance(column, Tensor), dtype=np.int64) if lengths is None else lengths.numpy()
        empty: Ragged | Tensor | list = []
        if isinstance(column, Ragged):
            empty = column.select([]).to("cpu")
        elif isinstance(column, Tensor):
            empty = torch.empty((0, *column.shape[1:]), dtype=column.dtype)
        return cls((part,), (name,), np.zeros(count, dtype=np.int32), np.arange(count), taken, lengths, empty)

    def __len__(self) -> int:
        return self.row.size

    def __repr__(self) -> str:
        kind = "a list" if isinstance(self.empty, list) else str(self._no_values.dtype).removeprefix("torch.")
        return f"Remote({kind}, {len(self)} rows in {len(self.parts)} parts)"

    def __reduce__(self) -> tuple[Any, ...]:
        lengths = None if self.lengths is None else self.lengths.numpy()
        empty = to_array(self.empty) if isinstance(self.empty, Tensor) else self.empty
        return _rebuild, (self.parts, self.names, self.part, self.row, self.taken, lengths, empty)

    @property
    def _places(self) -> list[tuple[Part, str]]:
        return list(zip(self.parts, self.names, strict=True))

    @property
    def _no_values(self) -> Tensor:
        """Return the values of no row, of the column's type and shape."""
        assert not isinstance(self.empty, list)
        return self.empty.values if isinstance(self.empty, Ragged) else self.empty

    def gather(self, rows: np.ndarray, lengths: Tensor | None = None) -> "Remote":
        """Return the given rows (int64 [n], may repeat) in this order, cut to `lengths` (int64 [n]) if given.

        Parts that none of them lies in are left out.
        """
        taken, own = self.taken[rows], None if self.lengths is None else self.lengths[torch.from_numpy(rows)]
        if lengths is not None and own is not None:
            taken, own = np.minimum(taken, lengths.numpy()), lengths
        used, part = _used(self.part[rows], len(self.parts))
        places = tuple(self.parts[number] for number in used), tuple(self.names[number] for number in used)
        return Remote(*places, part, self.row[rows], taken, own, self.empty)

    def with_lengths(self, lengths: Tensor) -> "Remote":
        """Return the column with rows cut, or filled up with zeros, to `lengths` (int64 [B])."""
        return replace(self, taken=np.minimum(self.taken, lengths.numpy()), lengths=lengths)

    def relocated(self, handles: Mapping[Part, Part]) -> "Remote":
        """Return the column with other handles of its parts."""
        return replace(self, parts=tuple(handles[part] for part in self.parts))

    def rows_of_parts(self) -> list[np.ndarray]:
        """Return the rows that are wanted of each part, ascending, int64."""
        return [np.unique(self.row[rows]) for rows in _rows_of_parts(self.part, len(self.parts))]

    def renumbered(self, kept: Mapping[tuple[Part, str], np.ndarray]) -> "Remote":
        """Return the column for parts that hold only the rows `kept` (int64, ascending) of what they held."""
        row = self.row.copy()
        for place, rows in zip(self._places, _rows_of_parts(self.part, len(self.parts)), strict=True):
            if place in kept:
                row[rows] = np.searchsorted(kept[place], row[rows])
        return replace(self, row=row)

    @classmethod
    def concat(cls, columns: Sequence["Remote"]) -> "Remote":
        """Return the rows of all columns, one after the other.

        Raises:
            DataError: they differ in kind, type or shape.
        """
        first = columns[0]
        kinds = {_kind(column.empty) for column in columns}
        if len(kinds) > 1:
            raise DataError(f"remote columns differ in type or shape: {sorted(kinds)}")
        place = {pair: number for number, pair in enumerate(dict.fromkeys(p for c in columns for p in c._places))}
        part = [_renumbered(c.part, np.array([place[p] for p in c._places], dtype=np.int32)) for c in columns]
        lengths = None if first.lengths is None else torch.cat([c.lengths for c in columns if c.lengths is not None])
        row, taken = (np.concatenate([vars(c)[name] for c in columns]) for name in ("row", "taken"))
        parts, names = tuple(pair[0] for pair in place), tuple(pair[1] for pair in place)
        return cls(parts, names, np.concatenate(part), row, taken, lengths, first.empty)

    @classmethod
    def place(cls, columns: Sequence["Remote"], positions: Sequence[np.ndarray], num_rows: int) -> "Remote":
        """Return a column of `num_rows` rows in which row i of column c is row `positions[c][i]`; others are zeros."""
        joined, where = cls.concat(columns), np.concatenate(positions)
        part, (row, taken) = np.full(num_rows, -1, dtype=np.int32), np.zeros((2, num_rows), dtype=np.int64)
        part[where], row[where], taken[where] = joined.part, joined.row, joined.taken
        lengths = None
        if joined.lengths is not None:
            lengths = torch.zeros(num_rows, dtype=torch.int64)
            lengths[torch.from_numpy(where)] = joined.lengths
        return replace(joined, part=part, row=row, taken=taken, lengths=lengths)

    def resolve(self, fetch: Fetch) -> Ragged | Tensor | list:
        """Return the column itself, of the tokens that `fetch` finds; each is copied once."""
        used, part = _used(self.part, len(self.parts))
        found = fetch([self.parts[number] for number in used]) if used else []
        sources = [columns[self.names[number]] for number, columns in zip(used, found, strict=True)]
        if isinstance(self.empty, list):
            places = zip(part.tolist(), self.row.tolist(), strict=True)
            return [sources[p][r] if p >= 0 else None for p, r in places]
        lengths = torch.ones(len(self), dtype=torch.int64) if self.lengths is None else self.lengths
        starts = lengths.cumsum(0) - lengths
        values = new_values(self._no_values, int(lengths.sum()))
        if not np.array_equal(self.taken, lengths.numpy()):
            values.zero_()
        rows = np.flatnonzero(part >= 0)
        # Where a row starts: offsets of all parts end to end, of which each part has its own stretch.
        offsets = torch.cat([source.offsets[:-1] for source in sources]) if sources else starts
        firsts = np.cumsum([0, *(source.num_rows for source in sources)])[part[rows]]
        there = offsets[torch.from_numpy(firsts + self.row[rows])]
        runs = torch.from_numpy(part[rows].astype(np.int64)), there, starts[torch.from_numpy(rows)]
        copy_from([source.values for source in sources], values, *runs, torch.from_numpy(self.taken[rows]))
        return values if self.lengths is None else Ragged(values, self.lengths)


def _used(part: np.ndarray, count: int) -> tuple[list[int], np.ndarray]:
    """Return which of `count` parts rows lie in, and the rows' places among those."""
    found = np.bincount(part[part >= 0], minlength=count) > 0
    return np.flatnonzero(found).tolist(), _renumbered(part, np.cumsum(found, dtype=np.int32) - 1)


def _renumbered(part: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return `places[part]`, and -1 where `part` is -1."""
    return np.where(part >= 0, places[part], -1).astype(np.int32) if places.size else part


def _rows_of_parts(part: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Yield the rows that lie in each of the parts, ascending."""
    order = np.argsort(part, kind="stable")
    bounds = np.searchsorted(part[order], np.arange(count + 1))
    for first, last in pairwise(bounds):
        yield order[first:last]


def _kind(empty: Ragged | Tensor | list) -> str:
    if isinstance(empty, list):
        return "list"
    values, rows = (empty.values, "ragged") if isinstance(empty, Ragged) else (empty, "one entry a row")
    return f"{rows} {values.dtype} {list(values.shape[1:])}"


def _rebuild(
    parts: tuple[Part, ...],
    names: tuple[str, ...],
    part: np.ndarray,
    row: np.ndarray,
    taken: np.ndarray,
    lengths: np.ndarray | None,
    empty: Ragged | tuple[np.ndarray, str] | list,
) -> Remote:
    """Put a pickled column together again; what came by Ray may be read-only memory, so lengths are copied."""
    none = from_array(*empty) if isinstance(empty, tuple) else empty
    return Remote(parts, names, part, row, taken, None if lengths is None else torch.from_numpy(lengths.copy()), none)

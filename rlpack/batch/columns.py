"""Vectorized operations on columns of every kind."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.copying import can_copy, clone, copy_from, new_values
from rlpack.batch.dtypes import put_entries, take_entries
from rlpack.batch.errors import DataError
from rlpack.batch.fields import Column, check_kind
from rlpack.batch.ragged import Ragged, Rows, as_array, spans
from rlpack.batch.remote import RemoteColumn
from rlpack.batch.serialization import from_array, to_array


def positions_of(ids: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the position of each query in the distinct `ids`, int64; -1 if missing.

    >>> positions_of(np.array([7, 3, 5]), np.array([5, 4, 7]))
    array([ 2, -1,  0])
    """
    if not ids.size:
        return np.full(queries.shape, -1, dtype=np.int64)
    if np.array_equal(ids, queries):  # as for each optimizer step of a whole shard: many times faster than sorting
        return np.arange(ids.size)
    order = np.argsort(ids, kind="stable")
    nearest = order[np.minimum(np.searchsorted(ids, queries, sorter=order), ids.size - 1)]
    return np.where(ids[nearest] == queries, nearest, -1)


def row_numbers(columns: Mapping[str, Column]) -> np.ndarray:
    """Return the positions of the first column's rows, int64 [B]; without columns, B is 0.

    Raises:
        DataError: the column has an unknown kind.
    """
    name, first = next(iter(columns.items()), ("", []))
    check_kind(name, first)
    return np.arange(len(first))


def distinct_ids(row_ids: Rows) -> np.ndarray:
    """Return a copy of row ids, int64 [B].

    Raises:
        DataError: they are not integers, or two are equal.
    """
    ids = as_array(row_ids, "row_ids")
    if ids.dtype == bool or (ids.dtype.kind == "u" and int(ids.max(initial=0)) >= 2**63):
        raise DataError(f"row_ids are {ids.dtype} with maximum {ids.max(initial=0)}; pass int64")
    if (distinct := np.unique(ids).size) != ids.size:
        raise DataError(f"row_ids are {ids.size} ids, of which {distinct} are distinct; all must be")
    return np.array(ids, dtype=np.int64)


def ids_of_repeats(num_rows: int, *, of_shard: bool) -> np.ndarray:
    """Return the ids of rows of which some occur twice, int64 [B]: 0 to B − 1; if they are of a shard, −1 to −B.

    A batch has no negative ids unless they were passed, so `restore` takes no repeated row of a shard for another one.

    >>> ids_of_repeats(3, of_shard=True)
    array([-1, -2, -3])
    """
    ids = np.arange(num_rows)
    return -1 - ids if of_shard else ids


def union(left: Mapping[str, Column], right: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns of both.

    Raises:
        DataError: a column is in both.
    """
    if shared := sorted(set(left) & set(right)):
        raise DataError(f"columns {shared} are in both batches; drop them in one, or assign them")
    return {**left, **right}


def consecutive_rows(sizes: Sequence[int], num_rows: int) -> list[np.ndarray]:
    """Return the rows of consecutive parts of these sizes, int64 each.

    >>> consecutive_rows([1, 2], 3)
    [array([0]), array([1, 2])]

    Raises:
        DataError: a size is negative, or sizes don't add up to the number of rows.
    """
    if negative := [size for size in sizes if size < 0]:
        raise DataError(f"sizes {list(sizes)} contain {negative[0]}; a part has 0 rows or more")
    if sum(sizes) != num_rows:
        raise DataError(f"sizes {list(sizes)} add up to {sum(sizes)}, and the batch has {num_rows} rows")
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    return [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def lengths_of(column: Column) -> Tensor | None:
    """Return the tokens per row of a (remote) ragged column, int64 [B]; None for other columns."""
    return column.lengths if isinstance(column, Ragged | RemoteColumn) else None


def same_lengths(left: Tensor, right: Tensor) -> bool:
    """Return whether two columns' lengths, int64 [B] each, are equal."""
    return left is right or torch.equal(left.cpu(), right.cpu())


class _TokenIndex(NamedTuple):
    """The positions of the tokens that a gather reads, for columns of the same lengths."""

    source_lengths: Tensor  # int64 [B]
    lengths: Tensor  # int64 [n]
    tokens: Tensor  # int64 [T]

    def fits(self, source_lengths: Tensor, lengths: Tensor) -> bool:
        """Return whether the index was built for a gather between these lengths."""
        if self.source_lengths.device != lengths.device:
            return False
        return torch.equal(self.source_lengths, source_lengths) and torch.equal(self.lengths, lengths)


def _are_consecutive(rows: np.ndarray) -> bool:
    return bool(rows.size and rows[-1] - rows[0] == rows.size - 1 and (np.diff(rows) == 1).all())


def select(columns: Mapping[str, Column], rows: np.ndarray) -> dict[str, Column]:
    """Return every column with the rows at the positions `rows`, int64 [n]; consecutive rows are views."""
    if _are_consecutive(rows):
        first, last = int(rows[0]), int(rows[-1]) + 1
        return {
            name: column[first:last] if isinstance(column, Tensor | list) else _select_tokens(column, rows)
            for name, column in columns.items()
        }
    return gather(columns, rows, {})


def _select_tokens(column: Ragged | RemoteColumn, rows: np.ndarray) -> Ragged | RemoteColumn:
    return column.select(rows) if isinstance(column, Ragged) else column.gather(rows)


def gather(columns: Mapping[str, Column], rows: np.ndarray, truncated: Mapping[str, Tensor]) -> dict[str, Column]:
    """Return every column with the rows at `rows`, int64 [n].

    Rows of the ragged columns named in `truncated` are cut to its lengths, int64 [n]. Ragged columns of the same
    lengths share one token index, which is as large as a column of int64.
    """
    if not truncated and _are_consecutive(rows):
        return select(columns, rows)
    gathered: dict[str, Column] = {}
    token_indices: list[_TokenIndex] = []
    rows = rows if rows.flags.writeable else rows.copy()  # torch warns of read-only memory, which Ray returns
    for name, column in columns.items():
        if isinstance(column, list):
            gathered[name] = [column[row] for row in rows.tolist()]
            continue
        if isinstance(column, RemoteColumn):
            gathered[name] = column.gather(rows, truncated.get(name))
            continue
        device = column.values.device if isinstance(column, Ragged) else column.device
        index = torch.from_numpy(rows).to(device)
        if isinstance(column, Tensor):
            gathered[name] = take_entries(column, index)
            continue
        lengths = truncated[name].to(device) if name in truncated else column.lengths[index]
        gathered[name] = _gather_tokens(column, index, lengths, token_indices)
    return gathered


def _gather_tokens(column: Ragged, rows: Tensor, lengths: Tensor, token_indices: list[_TokenIndex]) -> Ragged:
    """Return the first `lengths` tokens of the given rows, reusing or extending `token_indices`."""
    if can_copy(column.values):
        return column.gather(rows, lengths)
    for index in token_indices:
        if index.fits(column.lengths, lengths):
            return Ragged(take_entries(column.values, index.tokens), index.lengths)
    index = _TokenIndex(column.lengths, lengths, spans(column.offsets[:-1][rows], lengths))
    token_indices.append(index)
    return Ragged(take_entries(column.values, index.tokens), lengths)


def concat(name: str, parts: Sequence[Column]) -> Column:
    """Return the rows of all parts of column `name`, one after the other.

    Raises:
        DataError: the parts differ in kind, dtype, device or shape.
    """
    ragged = [part for part in parts if isinstance(part, Ragged)]
    dense = [part for part in parts if isinstance(part, Tensor)]
    lists = [part for part in parts if isinstance(part, list)]
    remote = [part for part in parts if isinstance(part, RemoteColumn)]
    if len(parts) not in {len(ragged), len(dense), len(lists), len(remote)}:
        kinds = sorted({type(part).__name__ for part in parts})
        raise DataError(f"column {name!r} is {' in one batch and '.join(kinds)} in another")
    if lists:
        return [item for part in lists for item in part]
    if ragged or remote:
        try:
            return Ragged.concat(ragged) if ragged else RemoteColumn.concat(remote)
        except DataError as error:
            raise DataError(f"column {name!r}: {error}") from error
    kinds = {f"{part.dtype} [B, {', '.join(map(str, part.shape[1:]))}] on {part.device}" for part in dense}
    if len(kinds) > 1:
        raise DataError(f"column {name!r} differs between batches: {' and '.join(sorted(kinds))}")
    return torch.cat(dense)


def place_rows(
    parts: Sequence[Mapping[str, Column]], positions: Sequence[np.ndarray], num_rows: int
) -> dict[str, Column]:
    """Return columns whose row `positions[p][i]` is row i of part p.

    Rows at no position are zeros, or None in lists. Tokens on the CPU are copied once, from the parts to their final
    position.

    Raises:
        DataError: a column is not in all parts, or differs in kind.
    """
    placed: dict[str, Column] = {}
    rest: list[str] = []
    check_same_names(parts)
    for name in parts[0]:
        columns = [part[name] for part in parts]
        remote = [column for column in columns if isinstance(column, RemoteColumn)]
        ragged = [column for column in columns if isinstance(column, Ragged) and can_copy(column.values)]
        has_one_type = len({(column.values.dtype, column.values.shape[1:]) for column in ragged}) == 1
        if len(ragged) == len(columns) and has_one_type:
            placed[name] = _place_ragged(ragged, positions, num_rows)
        elif len(remote) == len(columns):
            placed[name] = RemoteColumn.place(remote, positions, num_rows)
        else:
            rest.append(name)
    joined = {name: concat(name, [part[name] for part in parts]) for name in rest}
    scattered = _scatter(joined, np.concatenate(positions), num_rows)
    return {name: placed[name] if name in placed else scattered[name] for name in parts[0]}


def _place_ragged(parts: Sequence[Ragged], positions: Sequence[np.ndarray], num_rows: int) -> Ragged:
    """Return the ragged column of `place_rows`; rows that no part has are empty."""
    rows = torch.from_numpy(np.concatenate(positions))
    sizes = torch.cat([part.lengths for part in parts])
    starts = torch.cat([part.offsets[:-1] for part in parts])
    part_of_run = torch.repeat_interleave(torch.tensor([part.num_rows for part in parts]))
    lengths = torch.zeros(num_rows, dtype=torch.int64).index_copy(0, rows, sizes)
    values = new_values(parts[0].values, int(lengths.sum()))
    target_starts = (lengths.cumsum(0) - lengths)[rows]
    order = torch.argsort(rows)
    copy_from(
        [part.values for part in parts], values, *(run[order] for run in (part_of_run, starts, target_starts, sizes))
    )
    return Ragged(values, lengths)


def _scatter(columns: Mapping[str, Column], positions: np.ndarray, num_rows: int) -> dict[str, Column]:
    """Return columns whose row `positions[i]` is row i; others are zeros, empty or None."""
    ordered = select(columns, np.argsort(positions, kind="stable"))
    if positions.size == num_rows:
        return ordered
    return {name: _spread(column, np.sort(positions), num_rows) for name, column in ordered.items()}


def _spread(column: Column, positions: np.ndarray, num_rows: int) -> Column:
    """Return a column whose row `positions[i]` (ascending) is row i of `column`."""
    if isinstance(column, list):
        placed: list = [None] * num_rows
        for position, item in zip(positions.tolist(), column, strict=True):
            placed[position] = item
        return placed
    index = torch.from_numpy(positions)
    if isinstance(column, Tensor):
        return put_entries(column.new_zeros((num_rows, *column.shape[1:])), index.to(column.device), column)
    assert isinstance(column, Ragged), "remote columns are placed, not scattered"
    lengths = column.lengths.new_zeros(num_rows).index_copy(0, index.to(column.lengths.device), column.lengths)
    return Ragged(column.values, lengths)


def join(batches: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Return the columns of all batches, their rows one after the other.

    Raises:
        DataError: a column is not in all of them, or differs in kind.
    """
    check_same_names(batches)
    return {name: concat(name, [batch[name] for batch in batches]) for name in batches[0]}


def check_same_names(batches: Sequence[Mapping[str, Column]]) -> None:
    """Raise a `DataError` unless all batches have the same columns."""
    for number, batch in enumerate(batches):
        differing = sorted(set(batches[0]) ^ set(batch))
        if differing:
            raise DataError(f"column {differing[0]!r} is not in all batches; batches 0 and {number} differ")


def rename(columns: Mapping[str, Column], names: Mapping[str, str]) -> dict[str, Column]:
    """Return the columns renamed, `{old: new}`.

    Raises:
        DataError: two columns would have the same name.
    """
    renamed = [names.get(name, name) for name in columns]
    duplicates = {name for name in renamed if renamed.count(name) > 1}
    if duplicates:
        raise DataError(
            f"renaming would give two columns the same name {sorted(duplicates)}; the batch has {', '.join(columns)}"
        )
    return dict(zip(renamed, columns.values(), strict=True))


def deep_copy(columns: Mapping[str, Column], memo: dict[int, Any]) -> dict[str, Column]:
    """Return copies of columns, each on its device; `memo` is that of `copy.deepcopy`.

    Remote columns are the same objects: they are immutable, and handles of an object store are not to be copied.

    Raises:
        DataError: a column was computed on the autograd graph.
    """
    copies: dict[str, Column] = {}
    for name, column in columns.items():
        try:
            if isinstance(column, Tensor):
                copies[name] = clone(column, memo)
            else:
                copies[name] = column if isinstance(column, RemoteColumn) else copy.deepcopy(column, memo)
        except DataError as error:
            raise DataError(f"column {name!r}: {error}") from error
    return copies


def to_picklable(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return columns as they are pickled: tensors as out-of-band arrays (`rlpack.batch.serialization`).

    Raises:
        DataError: a column is on the autograd graph.
    """
    picklable: dict[str, Any] = {}
    for name, column in columns.items():
        try:
            picklable[name] = to_array(column) if isinstance(column, Tensor) else column
            if isinstance(column, Ragged) and column.values.requires_grad:
                to_array(column.values)
        except DataError as error:
            raise DataError(f"column {name!r}: {error}") from error
    return picklable


def from_picklable(columns: Mapping[str, Any]) -> dict[str, Column]:
    """Return the columns that `to_picklable` was called with."""
    return {name: from_array(*column) if isinstance(column, tuple) else column for name, column in columns.items()}

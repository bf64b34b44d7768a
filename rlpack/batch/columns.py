"""Whole-column operations on all kinds of column; nothing here walks rows of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.copying import can_copy, copy_from, new_values
from rlpack.batch.dtypes import put, take
from rlpack.batch.errors import DataError
from rlpack.batch.fields import Column
from rlpack.batch.ragged import Ragged, Rows, as_array, spans
from rlpack.batch.remote import RemoteColumn
from rlpack.batch.serialization import from_array, to_array


def find(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return where each of `wanted` stands in the distinct `ids`, -1 where it doesn't.

    >>> find(np.array([7, 3, 5]), np.array([5, 4, 7]))
    array([ 2, -1,  0])
    """
    if not ids.size:
        return np.full(wanted.shape, -1, dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    nearest = order[np.minimum(np.searchsorted(ids, wanted, sorter=order), ids.size - 1)]
    return np.where(ids[nearest] == wanted, nearest, -1)


def distinct_ids(row_ids: Rows) -> np.ndarray:
    """Return a copy of row ids, int64 [B].

    Raises:
        DataError: they are no whole numbers, or two are alike.
    """
    ids = as_array(row_ids, "row_ids")
    if ids.dtype == bool or (ids.dtype.kind == "u" and int(ids.max(initial=0)) >= 2**63):
        raise DataError(f"row_ids are {ids.dtype}, the greatest {ids.max(initial=0)}; give int64")
    if (differing := np.unique(ids).size) != ids.size:
        raise DataError(f"row_ids are {ids.size} ids of which {differing} differ; all have to")
    return np.array(ids, dtype=np.int64)


def lengths_of(column: Column) -> Tensor | None:
    """Return the tokens of each row, int64 [B], of a ragged column, here or elsewhere; None for another."""
    return column.lengths if isinstance(column, Ragged | RemoteColumn) else None


def same_lengths(left: Tensor, right: Tensor) -> bool:
    """Return whether rows have the same numbers of tokens, int64 [B] each."""
    return left is right or torch.equal(left.cpu(), right.cpu())


def select(columns: Mapping[str, Column], rows: np.ndarray) -> dict[str, Column]:
    """Return every column with the rows at the positions `rows`, int64 [n]; rows in a line are views."""
    if rows.size and rows[-1] - rows[0] == rows.size - 1 and (np.diff(rows) == 1).all():
        first, last = int(rows[0]), int(rows[-1]) + 1
        return {
            name: column[first:last] if isinstance(column, Tensor | list) else _pick(column, rows)
            for name, column in columns.items()
        }
    return gather(columns, rows, {})


def _pick(column: Ragged | RemoteColumn, rows: np.ndarray) -> Ragged | RemoteColumn:
    return column.select(rows) if isinstance(column, Ragged) else column.gather(rows)


def gather(columns: Mapping[str, Column], rows: np.ndarray, cut: Mapping[str, Tensor]) -> dict[str, Column]:
    """Return every column with the rows at `rows`, those named in `cut` shortened to its lengths, int64 [n].

    Ragged columns of the same lengths share one index, which costs as much as a column of int64.
    """
    picked: dict[str, Column] = {}
    known: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    rows = rows if rows.flags.writeable else rows.copy()  # a plan's that came through Ray, which torch would warn of
    for name, column in columns.items():
        if isinstance(column, list):
            picked[name] = [column[row] for row in rows.tolist()]
            continue
        if isinstance(column, RemoteColumn):
            picked[name] = column.gather(rows, cut.get(name))
            continue
        device = column.values.device if isinstance(column, Ragged) else column.device
        index = torch.from_numpy(rows).to(device)
        if isinstance(column, Tensor):
            picked[name] = take(column, index)
            continue
        lengths = cut[name].to(device) if name in cut else column.lengths[index]
        picked[name] = _take(column, index, lengths, known)
    return picked


def _take(column: Ragged, rows: Tensor, lengths: Tensor, known: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> Ragged:
    """Return the first `lengths` tokens of the given rows; `known` remembers the token index of earlier columns."""
    if can_copy(column.values):
        return column.gather(rows, lengths)
    for source, target, wanted, tokens in known:
        if source.device == lengths.device and torch.equal(source, column.lengths) and torch.equal(target, lengths):
            return Ragged(take(column.values, tokens), wanted)
    tokens = spans(column.offsets[:-1][rows], lengths)
    known.append((column.lengths, lengths, lengths, tokens))
    return Ragged(take(column.values, tokens), lengths)


def concat(name: str, parts: Sequence[Column]) -> Column:
    """Return the rows of all parts of column `name`, one after the other.

    Raises:
        DataError: the parts are of different kinds, types, devices or shapes.
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


def place(parts: Sequence[Mapping[str, Column]], positions: Sequence[np.ndarray], num_rows: int) -> dict[str, Column]:
    """Return columns of `num_rows` rows, in which row i of part p is row `positions[p][i]`; others are zeros or None.

    Tokens on the CPU go from the parts straight to their place.

    Raises:
        DataError: a column is not in all parts, or not of one kind.
    """
    placed: dict[str, Column] = {}
    rest: list[str] = []
    check_same_names(parts)
    for name in parts[0]:
        columns = [part[name] for part in parts]
        remote = [column for column in columns if isinstance(column, RemoteColumn)]
        ragged = [column for column in columns if isinstance(column, Ragged) and can_copy(column.values)]
        if (
            len(ragged) == len(columns)
            and len({(column.values.dtype, column.values.shape[1:]) for column in ragged}) == 1
        ):
            placed[name] = _place_ragged(ragged, positions, num_rows)
        elif len(remote) == len(columns):
            placed[name] = RemoteColumn.place(remote, positions, num_rows)
        else:
            rest.append(name)
    joined = {name: concat(name, [part[name] for part in parts]) for name in rest}
    scattered = _scatter(joined, np.concatenate(positions), num_rows)
    return {name: placed[name] if name in placed else scattered[name] for name in parts[0]}


def _place_ragged(parts: Sequence[Ragged], positions: Sequence[np.ndarray], num_rows: int) -> Ragged:
    """Return the ragged column of `place`; rows that no part has are empty."""
    rows = torch.from_numpy(np.concatenate(positions))
    sizes = torch.cat([part.lengths for part in parts])
    starts = torch.cat([part.offsets[:-1] for part in parts])
    part_of_run = torch.repeat_interleave(torch.tensor([part.num_rows for part in parts]))
    lengths = torch.zeros(num_rows, dtype=torch.int64).index_copy(0, rows, sizes)
    values = new_values(parts[0].values, int(lengths.sum()))
    goals = (lengths.cumsum(0) - lengths)[rows]
    order = torch.argsort(rows)
    copy_from([part.values for part in parts], values, *(run[order] for run in (part_of_run, starts, goals, sizes)))
    return Ragged(values, lengths)


def _scatter(columns: Mapping[str, Column], positions: np.ndarray, num_rows: int) -> dict[str, Column]:
    """Return columns of `num_rows` rows whose row `positions[i]` is row i; the others are zeros, empty or None."""
    ordered = select(columns, np.argsort(positions, kind="stable"))
    if positions.size == num_rows:
        return ordered
    return {name: _spread(column, np.sort(positions), num_rows) for name, column in ordered.items()}


def _spread(column: Column, positions: np.ndarray, num_rows: int) -> Column:
    """Return a column in which row i of `column` stands at the ascending `positions[i]`."""
    if isinstance(column, list):
        placed: list = [None] * num_rows
        for position, item in zip(positions.tolist(), column, strict=True):
            placed[position] = item
        return placed
    index = torch.from_numpy(positions)
    if isinstance(column, Tensor):
        return put(column.new_zeros((num_rows, *column.shape[1:])), index.to(column.device), column)
    assert isinstance(column, Ragged), "columns that lie elsewhere are placed, not moved"
    lengths = column.lengths.new_zeros(num_rows).index_copy(0, index.to(column.lengths.device), column.lengths)
    return Ragged(column.values, lengths)


def join(batches: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Return the columns of all batches, their rows one after the other.

    Raises:
        DataError: a column is not in all of them, or not of one kind.
    """
    check_same_names(batches)
    return {name: concat(name, [batch[name] for batch in batches]) for name in batches[0]}


def check_same_names(batches: Sequence[Mapping[str, Column]]) -> None:
    """Raise a `DataError` that names a column which is not in all batches."""
    for place, batch in enumerate(batches):
        differing = sorted(set(batches[0]) ^ set(batch))
        if differing:
            raise DataError(f"column {differing[0]!r} is not in all batches; number 0 and {place} differ in it")


def fill(column: Column, positions: np.ndarray, planned: np.ndarray, counts: Tensor) -> Column:
    """Return `column` filled up with zeros to `counts` tokens (int64 [B]) if it is a column of the plan's tokens.

    It is one if the rows at `positions` are exactly as long as `planned` says.
    """
    lengths = lengths_of(column)
    if lengths is None or not np.array_equal(lengths.cpu().numpy()[positions], planned):
        return column
    assert isinstance(column, Ragged | RemoteColumn)
    return column.with_lengths(counts.to(lengths.device))


def as_sent(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return columns as they are pickled: tensors as out-of-band arrays (`rlpack.batch.serialization`).

    Raises:
        DataError: a column is on the autograd graph.
    """
    sent: dict[str, Any] = {}
    for name, column in columns.items():
        try:
            sent[name] = to_array(column) if isinstance(column, Tensor) else column
            if isinstance(column, Ragged) and column.values.requires_grad:
                to_array(column.values)
        except DataError as error:
            raise DataError(f"column {name!r}: {error}") from error
    return sent


def as_received(sent: Mapping[str, Any]) -> dict[str, Column]:
    """Return the columns that `as_sent` was given."""
    return {name: from_array(*column) if isinstance(column, tuple) else column for name, column in sent.items()}

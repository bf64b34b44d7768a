"""Take what grows with tokens out of a batch: what is left says where it is, and is all that the driver gets.

A ragged column grows with tokens, and so may a list, and a tensor [B, k] with k; tensors [B] have one number a row, and
the lists of names in `rlpack.batch.fields` short ones. These stay.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.columns import as_sent, select
from rlpack.batch.errors import DataError
from rlpack.batch.fields import FIELDS, Column
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import Part, Remote

Columns = dict[str, Any]


@dataclass(frozen=True)
class Outline:
    """A batch whose parts are still with whoever made them.

    Attributes:
        rows: the batch, its remote columns in parts 0, 1, …
        sizes: bytes of each part.
    """

    rows: BatchedDataDict
    sizes: list[int]

    def at(self, handles: Sequence[Part]) -> BatchedDataDict:
        """Return the batch once its parts are held under these handles."""
        known: dict[Part, Part] = dict(enumerate(handles))
        columns = {
            name: column.relocated(known) if isinstance(column, Remote) else column
            for name, column in self.rows.items()
        }
        return BatchedDataDict(columns, row_ids=self.rows.row_ids)


def outline(batch: BatchedDataDict) -> tuple[Outline, list[Columns]]:
    """Return what is left of a batch, and the parts that were taken out.

    Ragged columns and tensors [B, k, ...] are one, lists another, since unlike tensors they are not read in place.

    >>> import torch
    >>> rows = BatchedDataDict({"input_ids": Ragged.from_rows([[1, 2]], torch.int64), "uid": ["a"], "note": ["so"]})
    >>> found, parts = outline(rows)
    >>> found.rows["input_ids"], found.rows["uid"], [list(part) for part in parts]
    (Remote(int64, 1 rows in 1 parts), ['a'], [['input_ids'], ['note']])

    Raises:
        DataError: a list holds something that can't be pickled, a column is on the autograd graph, or lies elsewhere.
    """
    parts = _parts(batch)
    remote: dict[str, Column] = {
        name: Remote.whole(number, name, batch[name]) for number, part in enumerate(parts) for name in part
    }
    rows = BatchedDataDict({**dict(batch), **remote}, row_ids=batch.row_ids)
    return Outline(rows, [_size(part) for part in parts]), parts


def size_of(batch: BatchedDataDict) -> int:
    """Return the bytes of what `outline` takes out of a batch."""
    return sum(_size(part) for part in _parts(batch))


def _parts(batch: BatchedDataDict) -> list[Columns]:
    for name, column in batch.items():
        if isinstance(column, Remote):
            raise DataError(f"column {name!r} lies elsewhere already: {column}; it can't be put away again")
    tokens = {name: held for name, column in batch.items() if (held := _held(column)) is not None}
    names = {name for name, field in FIELDS.items() if field.is_name}
    lists = {name: column for name, column in batch.items() if isinstance(column, list) and name not in names}
    return [part for part in (tokens, lists) if part]


def _held(column: Any) -> Ragged | None:
    """Return as what a ragged column, or a tensor of several numbers a row, is put away; None for another column."""
    if isinstance(column, Tensor) and column.ndim > 1:
        return Ragged(column, torch.ones(len(column), dtype=torch.int64, device=column.device))
    return column if isinstance(column, Ragged) else None


def _size(part: Columns) -> int:
    """Return the bytes of a part in a store."""
    size = 0
    for name, column in part.items():
        if isinstance(column, Ragged):
            as_sent({name: column})
            size += column.values.numel() * column.values.element_size() + 8 * column.num_rows
            continue
        try:
            size += len(pickle.dumps(column, protocol=pickle.HIGHEST_PROTOCOL))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise DataError(f"column {name!r} can't be sent: {error}; give texts and numbers") from error
    return size


def cut(part: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> Columns:
    """Return the columns named in `rows`, with just these of their rows (int64 [n])."""
    return {name: select({name: part[name]}, index)[name] for name, index in rows.items()}

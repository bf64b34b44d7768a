"""Split batches into payloads for the object store and a small stub for the driver.

Columns whose rows can be arbitrarily large are offloaded: ragged columns, tensors [B, k, ...] and lists. Tensors [B]
and the lists of short names in `rlpack.batch.fields` stay in the stub.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.columns import select, to_picklable
from rlpack.batch.errors import DataError
from rlpack.batch.fields import FIELDS, Column
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import Handle, RemoteColumn

Payload = dict[str, Any]


@dataclass(frozen=True)
class OffloadedBatch:
    """The stub of an offloaded batch; `with_handles` completes it once the payloads are stored.

    Attributes:
        stub: the batch; its remote columns use the numbers of the payloads as handles.
        sizes: bytes of each payload.
    """

    stub: BatchedDataDict
    sizes: list[int]

    def with_handles(self, handles: Sequence[Handle]) -> BatchedDataDict:
        """Return the batch once its payloads are stored under these handles, one per payload."""
        stored: dict[Handle, Handle] = dict(enumerate(handles))
        columns = {
            name: column.with_handles(stored) if isinstance(column, RemoteColumn) else column
            for name, column in self.stub.items()
        }
        return BatchedDataDict(columns, row_ids=self.stub.row_ids)


def offload(batch: BatchedDataDict) -> tuple[OffloadedBatch, list[Payload]]:
    """Return the stub of a batch, and its payloads.

    There are at most two payloads: ragged columns and tensors [B, k, ...], which are read in place, and lists, which
    are unpickled.

    >>> import torch
    >>> rows = BatchedDataDict({"input_ids": Ragged.from_rows([[1, 2]], torch.int64), "uid": ["a"], "note": ["so"]})
    >>> offloaded, payloads = offload(rows)
    >>> offloaded.stub["input_ids"], offloaded.stub["uid"], [list(payload) for payload in payloads]
    (RemoteColumn(int64, 1 rows in 1 payloads), ['a'], [['input_ids'], ['note']])

    Raises:
        DataError: a list has an entry that can't be pickled, a column is on the autograd graph, or is remote already.
    """
    payloads = _payloads(batch)
    remote: dict[str, Column] = {
        name: RemoteColumn.whole(number, name, batch[name])
        for number, payload in enumerate(payloads)
        for name in payload
    }
    stub = BatchedDataDict({**dict(batch), **remote}, row_ids=batch.row_ids)
    return OffloadedBatch(stub, [_size(payload) for payload in payloads]), payloads


def offload_size(batch: BatchedDataDict) -> int:
    """Return the size of a batch's payloads in bytes."""
    return sum(_size(payload) for payload in _payloads(batch))


def select_rows(payload: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> Payload:
    """Return the columns named in `rows`, each with these rows only (int64 [n])."""
    return {name: select({name: payload[name]}, index)[name] for name, index in rows.items()}


def _payloads(batch: BatchedDataDict) -> list[Payload]:
    for name, column in batch.items():
        if isinstance(column, RemoteColumn):
            raise DataError(f"column {name!r} is remote already: {column}; it can't be offloaded again")
    tensors = {name: stored for name, column in batch.items() if (stored := _as_ragged(column)) is not None}
    short = {name for name, field in FIELDS.items() if field.is_name}
    lists = {name: column for name, column in batch.items() if isinstance(column, list) and name not in short}
    return [payload for payload in (tensors, lists) if payload]


def _as_ragged(column: Any) -> Ragged | None:
    """Return a ragged column, or a tensor [B, k, ...] as one; else None."""
    if isinstance(column, Tensor) and column.ndim > 1:
        return Ragged(column, torch.ones(len(column), dtype=torch.int64, device=column.device))
    return column if isinstance(column, Ragged) else None


def _size(payload: Payload) -> int:
    """Return the size of a payload in the store, in bytes."""
    size = 0
    for name, column in payload.items():
        if isinstance(column, Ragged):
            to_picklable({name: column})
            size += column.values.numel() * column.values.element_size() + 8 * column.num_rows
            continue
        try:
            size += len(pickle.dumps(column, protocol=pickle.HIGHEST_PROTOCOL))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise DataError(f"column {name!r} can't be pickled: {error}; use texts and numbers") from error
    return size

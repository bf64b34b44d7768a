"""Parts of batches in Ray's object store: their handles, how a rank reads them, and how they get to another node."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.remote import Handle, RemoteColumn

_GONE = "tokens and texts of this batch were freed; read them in the step, and on a rank in the call, that has them"


class StoredPart:
    """Columns in the object store, for as long as this handle lives and nobody frees it.

    Attributes:
        node: where it lies; None on a rank, which was only handed it.
        holder: the rank that can cut rows out of it for another node; None for what the driver put.
        maker: role and rank that put it there.
    """

    def __init__(
        self,
        ref: ray.ObjectRef,
        node: str | None = None,
        holder: Any = None,
        maker: tuple[str, int | None] | None = None,
        when_freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._ref: ray.ObjectRef | None = ref
        self._when_freed = when_freed
        self.node = node
        self.holder = holder
        self.maker = maker

    @property
    def is_held(self) -> bool:
        """Whether it was not freed yet."""
        return self._ref is not None

    @property
    def ref(self) -> ray.ObjectRef:
        """Return the reference.

        Raises:
            DataError: the part was freed.
        """
        if self._ref is None:
            raise DataError(_GONE)
        return self._ref

    def free(self) -> None:
        """Let the object go."""
        if self._ref is not None:
            self._ref = None
            self._when_freed()

    def __del__(self) -> None:
        self.free()

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredPart, (self.ref,)


class Reader:
    """Gets parts from the store, where they are read in place: each once, until the reader is closed."""

    def __init__(self, timeout_s: float | None = None) -> None:
        """Wait at most `timeout_s`; on a rank the driver's deadline of the call holds, and None leaves it to that."""
        self._timeout_s = timeout_s
        self._found: dict[Handle, Mapping[str, Any]] | None = {}

    def __call__(self, parts: Sequence[Handle]) -> list[Mapping[str, Any]]:
        """Return the columns of each part.

        Raises:
            DataError: the reader is closed: whoever was lent the batch kept it.
        """
        if self._found is None:
            raise DataError(_GONE)
        missing = [part for part in parts if isinstance(part, StoredPart) and part not in self._found]
        if missing:
            found = ray.get([part.ref for part in missing], timeout=self._timeout_s)
            self._found |= zip(missing, found, strict=True)
        return [self._found[part] for part in parts]

    def close(self) -> None:
        """Let go of all that was read."""
        self._found = None


def parts_of(batch: BatchedDataDict) -> list[StoredPart]:
    """Return the parts that remote columns of a batch lie in, each once; a batch with a reader has none to tell."""
    columns = [column for column in batch.values() if isinstance(column, RemoteColumn)]
    every = dict.fromkeys(part for column in columns for part in column.handles)
    return [part for part in every if isinstance(part, StoredPart)]


def localised(batch: BatchedDataDict, node: str | None) -> BatchedDataDict:
    """Return the batch as a rank on `node` is given it: parts on other nodes are cut down to its rows by their holders.

    So a rank's shard costs the network its own bytes; on a node of one's own, whole parts are read in place. Without a
    node all parts are cut. What the driver put has no holder and travels whole.
    """
    columns = {name: column for name, column in batch.items() if isinstance(column, RemoteColumn)}
    wanted: dict[StoredPart, dict[str, np.ndarray]] = {}
    for column in columns.values():
        for part, name, rows in zip(column.handles, column.names, column.rows_by_handle(), strict=True):
            if isinstance(part, StoredPart) and part.holder is not None and part.node != node:
                of_part = wanted.setdefault(part, {})
                of_part[name] = np.union1d(of_part.get(name, rows), rows)
    if not wanted:
        return batch
    cuts: dict[Handle, Handle] = {
        part: StoredPart(part.holder.cut.remote(part.ref, rows), maker=part.maker) for part, rows in wanted.items()
    }
    kept: dict[tuple[Handle, str], np.ndarray] = {
        (part, name): rows for part, of_part in wanted.items() for name, rows in of_part.items()
    }
    found = batch.copy()
    for name, column in columns.items():
        found[name] = column.reindexed(kept).with_handles({part: cuts.get(part, part) for part in column.handles})
    return found

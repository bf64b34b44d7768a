"""Handles of objects in Ray's store: how a rank reads them, and how rows of them get to another node."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import GetTimeoutError

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.offload import select_rows
from rlpack.batch.remote import Handle, RemoteColumn
from rlpack.distributed.failures import DEATHS

logger = logging.getLogger(__name__)

END_OF_CALL = "at the end of the call that received them"
# A wait for objects is restarted after this time, in seconds; each further wait is twice as long as the last one.
_ASK_AGAIN_S = 20.0
# Timeout for reading references back that this process has just stored, which takes no time.
_RECEIVE_S = 60.0


class RowSource(NamedTuple):
    """The rank on an object's node that copies rows for other nodes.

    Attributes:
        actor: returns its actor, which is another one after a restart.
        copy: given a reference to an object, and rows by column, returns a reference to a copy of these rows; None if
            the rank runs a call of another thread, as engines do that generate the next batch: the copy would wait.
    """

    actor: Callable[[], Any]
    copy: Callable[[ray.ObjectRef, dict[str, np.ndarray]], ray.ObjectRef | None]


class ObjectHandle:
    """Columns in the object store, until the handle is freed or no longer referenced.

    Attributes:
        node: where the object is; None on a rank, which only received the handle.
        source: the rank that copies rows for other nodes; None for objects of the driver.
        producer: role and rank that stored it.
        whole: of a copy of some rows: reference to the object that they are copied from, and the rows by column (int64
            [n]). The object outlives the rank that copies. None for other handles.
    """

    def __init__(
        self,
        ref: ray.ObjectRef,
        node: str | None = None,
        source: RowSource | None = None,
        producer: tuple[str, int | None] | None = None,
        when_freed: Callable[[], None] = lambda: None,
        whole: tuple[ray.ObjectRef, dict[str, np.ndarray]] | None = None,
    ) -> None:
        self._ref: ray.ObjectRef | None = ref
        self._when_freed = when_freed
        self._released = ""
        self.node = node
        self.source = source
        self.producer = producer
        self.whole = whole

    @property
    def is_readable(self) -> bool:
        """Whether the object has not been freed yet."""
        return self._ref is not None

    @property
    def ref(self) -> ray.ObjectRef:
        """Return the reference.

        Raises:
            DataError: the object was freed; names who released it.
        """
        if self._ref is None:
            raise released_error(self._released)
        return self._ref

    def free(self, released: str) -> None:
        """Drop the reference to the object; `released` says when, for the error of a later read."""
        if self._ref is not None:
            self._ref, self.whole, self._released = None, None, released
            self._when_freed()

    def __del__(self) -> None:
        self.free("when they were no longer referenced")

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.ref, self.whole)


def _received(ref: ray.ObjectRef, whole: tuple[ray.ObjectRef, dict[str, np.ndarray]] | None) -> ObjectHandle:
    """Return a handle as a rank receives it."""
    return ObjectHandle(ref, whole=whole)


def released_error(released: str) -> DataError:
    """Return the error of reading an object that was released."""
    in_call = released == END_OF_CALL
    remedy = "read them in that call" if in_call else "read them earlier, or hold them with another lease"
    return DataError(f"tokens and texts of this batch were released {released}; {remedy}")


class ObjectReader:
    """Gets objects from the store, each once, and reads them in place."""

    def __init__(self, timeout_s: float | None = None) -> None:
        """Wait at most `timeout_s`.

        On a rank, None leaves it to the driver's deadline for the call.
        """
        self._timeout_s = timeout_s
        self._columns: dict[Handle, Mapping[str, Any]] | None = {}

    def __call__(self, handles: Sequence[Handle]) -> list[Mapping[str, Any]]:
        """Return the columns of each object.

        Raises:
            DataError: the reader is closed: a role kept a batch beyond its call.
        """
        if self._columns is None:
            raise released_error(END_OF_CALL)
        missing = [one for one in handles if isinstance(one, ObjectHandle) and one not in self._columns]
        if missing:
            self._columns |= zip(missing, self._read(missing), strict=True)
        return [self._columns[handle] for handle in handles]

    def _read(self, handles: Sequence[ObjectHandle]) -> list[Mapping[str, Any]]:
        try:
            return get_objects([handle.ref for handle in handles], self._timeout_s)
        except DEATHS:  # of a rank that was to copy rows
            return [self._read_one(handle) for handle in handles]

    def _read_one(self, handle: ObjectHandle) -> Mapping[str, Any]:
        """Return the columns of an object; if the rank that was to copy its rows died, from the whole object."""
        try:
            return get_objects([handle.ref], self._timeout_s)[0]
        except DEATHS as error:
            if handle.whole is None:
                raise
            logger.warning(
                "a process that was to copy rows has ended (%s); the whole object is read", type(error).__name__
            )
            ref, rows = handle.whole
            return select_rows(get_objects([ref], self._timeout_s)[0], rows)

    def close(self) -> None:
        """Drop all columns that were read."""
        self._columns = None


def get_objects(refs: Sequence[ray.ObjectRef], timeout_s: float | None) -> list[Any]:
    """Return objects; wait at most `timeout_s`, None for no limit.

    Ray 2.60 may leave a process waiting for an object that exists (see `RankActor`). A long wait is therefore abandoned
    and restarted, which asks the object's owner again. Intervals grow, so that a long transfer completes.

    Raises:
        GetTimeoutError: an object did not arrive in time.
    """
    began, interval_s = time.monotonic(), _ASK_AGAIN_S
    while True:
        left = float("inf") if timeout_s is None else timeout_s - (time.monotonic() - began)
        try:
            return ray.get(list(refs), timeout=max(0.0, min(interval_s, left)))
        except GetTimeoutError:
            if left <= interval_s:
                raise
        logger.warning("objects are not there after %.0f s; asking for them again", time.monotonic() - began)
        # Receiving a reference asks its owner. Unlike a pickled one, it doesn't keep the object forever.
        refs = ray.get(ray.put(list(refs)), timeout=_RECEIVE_S)
        interval_s *= 2


def handles_of(batch: BatchedDataDict) -> list[ObjectHandle]:
    """Return the handles of a batch's remote columns, each once.

    A batch with a reader has none.
    """
    columns = [column for column in batch.values() if isinstance(column, RemoteColumn)]
    handles = dict.fromkeys(handle for column in columns for handle in column.handles)
    return [handle for handle in handles if isinstance(handle, ObjectHandle)]


def for_node(batch: BatchedDataDict, node: str | None) -> BatchedDataDict:
    """Return the batch as a rank on `node` receives it.

    Objects on that node are read in place. Of objects on other nodes, the handle's `source` copies the rows that the
    shard has, so that only these travel; if it is busy or dies, the whole object does. If `node` is None, every
    object counts as remote. Objects of the driver have no `source` and travel whole.
    """
    columns = {name: column for name, column in batch.items() if isinstance(column, RemoteColumn)}
    rows_by_handle: dict[ObjectHandle, dict[str, np.ndarray]] = {}
    for column in columns.values():
        for handle, name, rows in zip(column.handles, column.names, column.rows_by_handle(), strict=True):
            if isinstance(handle, ObjectHandle) and handle.source is not None and handle.node != node:
                by_name = rows_by_handle.setdefault(handle, {})
                by_name[name] = np.union1d(by_name.get(name, rows), rows)
    cuts: dict[Handle, Handle] = {}
    rows_left: dict[tuple[Handle, str], np.ndarray] = {}
    for handle, by_name in rows_by_handle.items():
        assert handle.source is not None
        if (copy := handle.source.copy(handle.ref, by_name)) is not None:
            cuts[handle] = ObjectHandle(copy, producer=handle.producer, whole=(handle.ref, by_name))
            rows_left |= {(handle, name): rows for name, rows in by_name.items()}
    if not cuts:
        return batch
    local = batch.copy()
    for name, column in columns.items():
        handles = {handle: cuts.get(handle, handle) for handle in column.handles}
        local[name] = column.reindexed(rows_left).with_handles(handles)
    return local

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
from rlpack.batch.remote import Handle, RemoteColumn, rows_by_place
from rlpack.distributed.failures import DEATHS

logger = logging.getLogger(__name__)

END_OF_CALL = "at the end of the call that received them"
# A wait for objects is restarted after this time, in seconds; each further wait is twice as long as the last one.
_ASK_AGAIN_S = 20.0
# Timeout for reading references back that this process has just stored, which takes no time.
_RECEIVE_S = 60.0
# Objects per call that copies rows. It bounds the size of one copy, and small objects travel with the call.
_OBJECTS_PER_COPY = 64

RowsByName = dict[str, np.ndarray]


class RowSource(NamedTuple):
    """The rank on an object's node that copies rows for other nodes.

    Attributes:
        actor: returns its actor, which is another one after a restart.
        copy: given references to objects, and the rows of each by column, returns a reference to a list of copies of
            these rows, one per object; None if the rank runs a call of another thread, as engines do that generate the
            next batch: the copy would wait.
    """

    actor: Callable[[], Any]
    copy: Callable[[Sequence[ray.ObjectRef], Sequence[RowsByName]], ray.ObjectRef | None]


class RowCopy(NamedTuple):
    """Which copy of rows a handle stands for.

    Attributes:
        position: of the copy in the list that the handle's reference stands for.
        whole: reference to the object that the rows are copied from; it outlives the rank that copies.
        rows: these rows by column, ascending int64 [n].
    """

    position: int
    whole: ray.ObjectRef
    rows: RowsByName


class ObjectHandle:
    """Columns in the object store, until the handle is freed or no longer referenced.

    Attributes:
        node: where the object is; None on a rank, which only received the handle.
        source: the rank that copies rows for other nodes, the same for all objects of a rank; None for objects of the
            driver.
        producer: role and rank that stored it.
        row_copy: set if the handle stands for a copy of some rows of an object.
    """

    def __init__(
        self,
        ref: ray.ObjectRef,
        node: str | None = None,
        source: RowSource | None = None,
        producer: tuple[str, int | None] | None = None,
        when_freed: Callable[[], None] = lambda: None,
        row_copy: RowCopy | None = None,
    ) -> None:
        self._ref: ray.ObjectRef | None = ref
        self._when_freed = when_freed
        self._released = ""
        self.node = node
        self.source = source
        self.producer = producer
        self.row_copy = row_copy

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
            self._ref, self.row_copy, self._released = None, None, released
            self._when_freed()

    def __del__(self) -> None:
        self.free("when they were no longer referenced")

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.ref, self.row_copy)


def _received(ref: ray.ObjectRef, row_copy: RowCopy | None) -> ObjectHandle:
    """Return a handle as a rank receives it."""
    return ObjectHandle(ref, row_copy=row_copy)


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
        # None for a list of copies that was lost with the rank that was to make them.
        self._objects: dict[ray.ObjectRef, Any] = {}
        self._is_closed = False

    def __call__(self, handles: Sequence[Handle]) -> list[Mapping[str, Any]]:
        """Return the columns of each object.

        Raises:
            DataError: the reader is closed: a role kept a batch beyond its call.
        """
        if self._is_closed:
            raise released_error(END_OF_CALL)
        stored = [handle for handle in handles if isinstance(handle, ObjectHandle)]
        assert len(stored) == len(handles), "a payload outside the object store"
        try:
            self._read([handle.ref for handle in stored])
        except DEATHS:  # of a rank that was to copy rows
            for handle in stored:
                self._read_or_note_death(handle)
        return [self._columns(handle) for handle in stored]

    def _read(self, refs: Sequence[ray.ObjectRef]) -> None:
        """Add those of the objects that are missing."""
        if missing := list(dict.fromkeys(ref for ref in refs if ref not in self._objects)):
            self._objects |= zip(missing, get_objects(missing, self._timeout_s), strict=True)

    def _read_or_note_death(self, handle: ObjectHandle) -> None:
        """Add the object of a handle; None if the rank that was to copy its rows died."""
        try:
            self._read([handle.ref])
        except DEATHS as error:
            if handle.row_copy is None:
                raise
            logger.warning(
                "a process that was to copy rows has ended (%s); whole objects are read", type(error).__name__
            )
            self._objects[handle.ref] = None

    def _columns(self, handle: ObjectHandle) -> Mapping[str, Any]:
        """Return the columns that a handle stands for; if their copy is lost, from the whole object."""
        stored, row_copy = self._objects[handle.ref], handle.row_copy
        if row_copy is None:
            return stored
        if stored is not None:
            return stored[row_copy.position]
        self._read([row_copy.whole])
        return select_rows(self._objects[row_copy.whole], row_copy.rows)

    def close(self) -> None:
        """Drop all objects that were read."""
        self._is_closed = True
        self._objects.clear()


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
    handles = dict.fromkeys(handle for column in _remote_columns(batch).values() for handle in column.handles)
    return [handle for handle in handles if isinstance(handle, ObjectHandle)]


def for_node(batch: BatchedDataDict, node: str | None) -> BatchedDataDict:
    """Return a batch as a rank on `node` receives it; see `batches_for_node`."""
    return batches_for_node([batch], node)[0]


def batches_for_node(batches: Sequence[BatchedDataDict], node: str | None) -> list[BatchedDataDict]:
    """Return batches as ranks on `node` receive them.

    Objects on that node are read in place. Of objects on other nodes, their `source` copies the rows that any of the
    batches has, so that only these travel, once for the whole node. If it is busy or dies, whole objects travel. If
    `node` is None, every object counts as remote. Objects of the driver have no `source` and travel whole.
    """
    rows = _rows_to_copy(batches, node)
    copies = _start_copies(rows)
    if not copies:
        return list(batches)
    copied: dict[tuple[Handle, str], np.ndarray] = {
        (handle, name): index for handle, by_name in rows.items() if handle in copies for name, index in by_name.items()
    }
    return [_with_copies(batch, copies, copied) for batch in batches]


def _rows_to_copy(batches: Sequence[BatchedDataDict], node: str | None) -> dict[ObjectHandle, RowsByName]:
    """Return the rows that the batches have of each object that isn't on `node` and has a source."""
    columns = [column for batch in batches for column in _remote_columns(batch).values()]
    rows_by_handle: dict[ObjectHandle, RowsByName] = {}
    for (handle, name), rows in rows_by_place(columns).items():
        if isinstance(handle, ObjectHandle) and handle.source is not None and handle.node != node:
            rows_by_handle.setdefault(handle, {})[name] = rows
    return rows_by_handle


def _start_copies(rows: Mapping[ObjectHandle, RowsByName]) -> dict[Handle, ObjectHandle]:
    """Let each source copy the rows of its objects; return the handle of each copy, none for sources that are busy."""
    of_source: dict[RowSource, list[ObjectHandle]] = {}
    for handle in rows:
        assert handle.source is not None
        of_source.setdefault(handle.source, []).append(handle)
    copies: dict[Handle, ObjectHandle] = {}
    for source, handles in of_source.items():
        for first in range(0, len(handles), _OBJECTS_PER_COPY):
            some = handles[first : first + _OBJECTS_PER_COPY]
            copy = source.copy([handle.ref for handle in some], [rows[handle] for handle in some])
            if copy is None:
                continue
            for position, handle in enumerate(some):
                row_copy = RowCopy(position, handle.ref, rows[handle])
                copies[handle] = ObjectHandle(copy, producer=handle.producer, row_copy=row_copy)
    return copies


def _with_copies(
    batch: BatchedDataDict, copies: Mapping[Handle, ObjectHandle], copied: Mapping[tuple[Handle, str], np.ndarray]
) -> BatchedDataDict:
    """Return the batch with its rows read from copies; `copied` has the rows of each object and column."""
    local = batch.copy()
    for name, column in _remote_columns(batch).items():
        handles: dict[Handle, Handle] = {handle: copies.get(handle, handle) for handle in column.handles}
        local[name] = column.reindexed(copied).with_handles(handles)
    return local


def _remote_columns(batch: BatchedDataDict) -> dict[str, RemoteColumn]:
    """Return the columns of a batch that are in the store; a batch with a reader has none."""
    return {name: column for name, column in batch.items() if isinstance(column, RemoteColumn)}

"""StoreLease: keeps payloads in Ray's object store alive (`rlpack.distributed.ray_store`) until it is released."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from types import TracebackType
from typing import Protocol, Self, TypeVar
from weakref import WeakSet

from rlpack.batch.batch import BatchedDataDict
from rlpack.distributed.object_handles import ObjectHandle, handles_of

R = TypeVar("R")


class LeasedStore(Protocol):
    """The store, as its leases see it."""

    def waiting(self, under: "StoreLease | None" = None) -> AbstractContextManager[None]:
        """Declare that, inside the block, this thread waits for others that store under a lease."""
        ...

    def hold(self, lease: "StoreLease", handles: list[ObjectHandle]) -> None:
        """Hold payloads under one more lease."""
        ...

    def release(self, lease: "StoreLease", handles: list[ObjectHandle]) -> None:
        """Free the payloads of a lease that no other lease holds."""
        ...


class StoreLease:
    """Keeps payloads alive until it is released.

    As a context manager, a lease holds every payload stored inside the `with` block.

    A payload may be held by several leases, and is freed with the last. `with store.lease("step 7") as lease:` makes
    the lease the thread's current one, under which results of calls are stored, and releases it at the end.

    Attributes:
        name: for the error of reading a payload after its release.
        opener: the thread that opened it, which also releases it.
        threads: the threads that store under it.
        handles: the payloads that it holds.
        held_bytes: bytes that it holds or that are reserved under it; 0 once it is released.
        peak_bytes: the most that `held_bytes` was.
    """

    def __init__(self, store: "LeasedStore", name: str) -> None:
        """Open a lease; it holds nothing yet."""
        self.name = name
        self.held_bytes = self.peak_bytes = 0
        self._store = store
        self.opener = threading.current_thread()
        self.threads = {self.opener}  # not their idents, which later threads get again
        self.handles: WeakSet[ObjectHandle] = WeakSet()
        self.is_released = False

    def __enter__(self) -> Self:
        assert not self.is_released, f"the lease of {self.name} was released"
        self.threads.add(threading.current_thread())
        _CURRENT.set((*_CURRENT.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def run(self, function: Callable[[], R]) -> R:
        """Call a function, return its result, and hold the payloads that it stores until the lease is released.

        The function may run in a different thread from the one that opened the lease and releases it.
        """

        def run_inside() -> R:
            self.__enter__()
            return function()

        return copy_context().run(run_inside)

    def awaited(self) -> AbstractContextManager[None]:
        """Declare that, inside the block, this thread waits for others that store under this lease.

        See `RayStore.waiting`.
        """
        return self._store.waiting(self)

    def hold(self, batch: BatchedDataDict) -> None:
        """Also hold a batch's payloads under this lease, whatever lease they were stored under.

        Raises:
            DataError: one was released already.
        """
        self._store.hold(self, handles_of(batch))

    def release(self) -> None:
        """Release all payloads, freeing those that no other lease holds; releasing twice has no effect.

        The previous lease becomes current again. A loop abandoned by an exception may release its leases late, so
        released leases are skipped.
        """
        self.is_released = True
        self._store.release(self, list(self.handles))
        self.handles.clear()
        self.held_bytes = 0
        leases = _CURRENT.get()
        while leases and leases[-1].is_released:
            leases = leases[:-1]
        _CURRENT.set(leases)

    def count(self, size: int) -> None:
        """Count bytes that are stored or reserved under the lease, or freed if negative."""
        if self.is_released:
            return
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


# The leases whose blocks a thread is in, from the outermost.
_CURRENT: ContextVar[tuple[StoreLease, ...]] = ContextVar("rlpack_leases", default=())


def current_lease() -> StoreLease | None:
    """Return the lease under which this thread stores payloads."""
    return next(iter(_CURRENT.get()[::-1]), None)


def current_leases() -> tuple[StoreLease, ...]:
    """Return the leases whose blocks this thread is in, from the outermost."""
    return _CURRENT.get()

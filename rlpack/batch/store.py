"""The store of a run's payloads (tokens and texts of its batches), as recipes see it."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol, Self, TypeVar

from rlpack.batch.batch import BatchedDataDict

R = TypeVar("R")


class Lease(Protocol):
    """Keeps payloads alive until it is released.

    As a context manager, a lease holds every payload stored inside the `with` block.

    Attributes:
        held_bytes: bytes that it holds; 0 once it is released.
        peak_bytes: the most that `held_bytes` was.
    """

    held_bytes: int
    peak_bytes: int

    def __enter__(self) -> Self:
        """Make this the current lease: it holds all payloads that are stored from now on."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Release the lease."""
        ...

    def run(self, function: Callable[[], R]) -> R:
        """Call a function, return its result, and hold the payloads that it stores until the lease is released."""
        ...

    def awaited(self) -> AbstractContextManager[None]:
        """Declare that, inside the block, this thread waits for payloads that others store under this lease."""
        ...

    def hold(self, batch: BatchedDataDict) -> None:
        """Hold the payloads of a batch that were stored under another lease, until this one is released."""
        ...

    def release(self) -> None:
        """Release all payloads, freeing those that no other lease holds; releasing twice has no effect."""
        ...


class Store(Protocol):
    """A store of the payloads of a run's batches."""

    @property
    def budget(self) -> float:
        """Return the maximum number of bytes that may be stored at once."""
        ...

    def spare(self, node: str) -> float:
        """Return the number of bytes on a node that are available to payloads other than batches."""
        ...

    def room(self, nodes: Iterable[str]) -> float:
        """Return the bytes that leases can hold at once if they are spread evenly over ranks on these nodes."""
        ...

    def lease(self, name: str) -> Lease:
        """Open a lease; `name` completes the sentence "released at the end of …"."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Declare that, inside the block, this thread waits for all others and releases no lease."""
        ...

    def offload_limit(self) -> float:
        """Return the maximum number of bytes of this process's own batches that may be stored at once."""
        ...

    def offload(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch with its payloads stored under the current lease."""
        ...

    def offload_permanently(self, batch: BatchedDataDict) -> BatchedDataDict | None:
        """Return the batch with its payloads stored under no lease; None if there is no room for them."""
        ...

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch with all of its columns in this process."""
        ...

    def pop_peak_bytes(self) -> int:
        """Return the peak number of bytes held by leases since the last call."""
        ...


class LocalLease:
    """A lease on payloads in this process, which live as long as they are referenced."""

    held_bytes = peak_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, function: Callable[[], R]) -> R:
        """Return the result of a function."""
        return function()

    def awaited(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def hold(self, batch: BatchedDataDict) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


class LocalStore:
    """A store that offloads nothing: batches stay whole, in this process."""

    budget = math.inf

    def spare(self, node: str) -> float:
        """Return infinity: there is no limit."""
        return math.inf

    def room(self, nodes: Iterable[str]) -> float:
        """Return infinity: there is no limit."""
        return math.inf

    def lease(self, name: str) -> Lease:
        """Return a lease that does nothing."""
        return LocalLease()

    def waiting(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def offload_limit(self) -> float:
        """Return infinity: there is no limit."""
        return math.inf

    def offload(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch itself."""
        return batch

    def offload_permanently(self, batch: BatchedDataDict) -> BatchedDataDict | None:
        """Return the batch itself."""
        return batch

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch itself."""
        return batch

    def pop_peak_bytes(self) -> int:
        """Return 0."""
        return 0

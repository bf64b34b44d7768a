"""The store of a run's payloads (tokens and texts of its batches), as recipes see it."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from rlpack.batch.batch import BatchedDataDict


class Store(Protocol):
    """A store of the payloads of a run's batches."""

    @property
    def budget(self) -> float:
        """Return the most bytes that may be stored at once."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """Return a context whose exit frees everything offloaded inside."""
        ...

    def offload(self, batch: BatchedDataDict, *, permanent: bool = False) -> BatchedDataDict:
        """Return the batch with its payloads stored, until the current step ends or permanently."""
        ...

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch with all of its columns in this process."""
        ...

    def pop_peak_bytes(self) -> int:
        """Return the most bytes that steps held at once since the last call."""
        ...


class LocalStore:
    """A store that offloads nothing: batches stay whole, in this process."""

    budget = math.inf

    def step(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def offload(self, batch: BatchedDataDict, *, permanent: bool = False) -> BatchedDataDict:
        """Return the batch itself."""
        return batch

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch itself."""
        return batch

    def pop_peak_bytes(self) -> int:
        """Return 0."""
        return 0

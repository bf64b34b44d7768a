"""Where the tokens and texts of a run's batches are held, as recipes see it."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from rlpack.batch.batch import BatchedDataDict


class Store(Protocol):
    """Where the parts of a run's batches are held."""

    @property
    def budget(self) -> float:
        """Return the most bytes that may be held at once."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """Return a context at whose end all goes that was put away in it."""
        ...

    def put(self, batch: BatchedDataDict, *, for_good: bool = False) -> BatchedDataDict:
        """Return the batch with what grows with tokens put away, for the step under way or for good."""
        ...

    def take(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch with all of its columns here."""
        ...

    def take_peak(self) -> int:
        """Return the most bytes that steps held at once since it was last asked."""
        ...


class LocalStore:
    """A store in which nothing goes anywhere: batches stay whole, in this process."""

    budget = math.inf

    def step(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def put(self, batch: BatchedDataDict, *, for_good: bool = False) -> BatchedDataDict:
        """Return the batch itself."""
        return batch

    def take(self, batch: BatchedDataDict) -> BatchedDataDict:
        """Return the batch itself."""
        return batch

    def take_peak(self) -> int:
        """Return 0."""
        return 0

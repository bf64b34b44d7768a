"""The interface of the queue of batches that are drawn ahead (`rlpack.recipes.driver.ahead`), as a session needs it."""

from pathlib import Path
from typing import Protocol


class Ahead(Protocol):
    """The batches that are drawn ahead of their steps."""

    def holds_evaluation(self) -> bool:
        """Return whether the object store has room for an evaluation while the next step trains."""
        ...

    def save(self, folder: Path) -> None:
        """Write the batches that no step has trained on yet into a checkpoint."""
        ...

    def raise_failure(self) -> None:
        """Raise the error, if any, that ends the run after the last committed step."""
        ...

    def end(self) -> None:
        """Begin no more batches; called as the run ends."""
        ...

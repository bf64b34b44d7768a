"""What a session needs of the queue of batches that are drawn ahead (`rlpack.recipes.driver.ahead`)."""

from pathlib import Path
from typing import Protocol


class Ahead(Protocol):
    """The batches that are drawn ahead of their steps."""

    def save(self, folder: Path) -> None:
        """Write the batches that no step has trained on yet into a checkpoint."""
        ...

    def raise_failure(self) -> None:
        """Raise what ends the run after the step that was committed last, if anything does."""
        ...

    def end(self) -> None:
        """Begin no more batches; called as the run ends."""
        ...

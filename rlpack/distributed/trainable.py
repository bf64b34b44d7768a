"""The interface of trained roles, through which a session saves, resumes and exports them.

A recipe's spec names the roles it trains; each must derive from `Trainable`. Calls of such a role that declare
`mini_batches` are split into optimizer steps, and its part of a checkpoint is in a folder with its name.
"""

from abc import ABC, abstractmethod
from typing import Any

from rlpack.distributed.dispatch import broadcast, dispatch_of, is_dispatched


class Trainable(ABC):
    """A role with weights and an optimizer. Every rank calls each of these methods: they are collectives."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Check that the class's own versions of the methods run on every rank.

        Raises:
            TypeError: one of them is not decorated with `@broadcast`.
        """
        super().__init_subclass__(**arguments)
        for name in ("save", "start_save", "save_is_done", "finish_save", "load", "export_model", "export_reference"):
            method = getattr(cls, name)
            if not is_dispatched(method) or dispatch_of(method).kind != "broadcast":
                raise TypeError(
                    f"{cls.__qualname__}.{name} is not decorated with @broadcast; every rank has to call it"
                )

    @broadcast
    @abstractmethod
    def save(self, folder: str) -> None:
        """Write this rank's part of weights and optimizer state into `folder`.

        Args:
            folder: an existing, empty folder, which all ranks share: each rank needs file names that no other uses.
        """

    @broadcast
    def start_save(self, folder: str, timeout_s: float) -> None:
        """Start to write this rank's part of the state into `folder`; by default call `save`.

        Training may change the state as soon as this returns. `finish_save` follows before the next save.

        Args:
            folder: see `save`.
            timeout_s: timeout of communication between ranks while they write, in seconds.
        """
        self.save(folder)

    @broadcast
    def save_is_done(self) -> bool:
        """Return whether `finish_save` would return or raise without waiting."""
        return True

    @broadcast
    def finish_save(self, timeout_s: float) -> None:
        """Wait until the state is written; raise if that fails or takes over `timeout_s` seconds."""
        return

    @broadcast
    @abstractmethod
    def load(self, folder: str) -> None:
        """Restore weights and optimizer state from `folder`, which any number of ranks wrote."""

    @broadcast
    @abstractmethod
    def export_model(self, folder: str) -> None:
        """Write the model as a Hugging Face folder (config, safetensors); each rank may write files of it."""

    @broadcast
    def export_reference(self, folder: str) -> None:
        """Write the model as a folder that the reference role loads; by default the one that `export_model` writes."""
        self.export_model(folder)

"""`Ranks`: what a `WorkerGroup` needs from the processes behind it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlpack.distributed.calls import Call, Pending, Relay
from rlpack.distributed.usage import Usage


class Ranks(Protocol):
    """The processes behind a group; `RayRanks` is the real one.

    Attributes:
        is_restartable: whether they are started again after a death or a hang.
    """

    is_restartable: bool

    @property
    def num_ranks(self) -> int:
        """Return the number of processes."""
        ...

    @property
    def num_starts(self) -> int:
        """Return how many times the processes were started: once, and again after each restart."""
        ...

    @property
    def nodes(self) -> list[str]:
        """Return the node of each process."""
        ...

    def after_restart(self, key: Any, function: Callable[[], None]) -> None:
        """Call a function after each restart of the processes, instead of an earlier one with this key.

        It is called before calls are repeated, and may call the roles.
        """
        ...

    def submit(self, call: Call) -> Pending[list[Any]]:
        """Start a call on the ranks that it names; results are in the order of its output ranks."""
        ...

    def wait_any(self, pending: Sequence[Pending[Any]], timeout_s: float) -> list[int]:
        """Return which calls have answered, by their positions; [] if none has within `timeout_s` seconds."""
        ...

    def discard_submitted(self) -> list[str]:
        """Drop the results that have not been requested, and return the names of their calls."""
        ...

    def relay(self, relays: Sequence[Relay], target: Any, kept: list[Any] | None = None) -> list[Any]:
        """Pass values to all ranks of `target`, and keep them for `load_again`, if asked; return the last results."""
        ...

    def load_again(self, values: Sequence[Any], relays: Sequence[Relay]) -> list[Any]:
        """Load values that an earlier `relay` has kept; return the last results."""
        ...

    def pop_usage(self, role: str) -> dict[str, Usage]:
        """Return what the foreground calls of a role took since the last request, by method."""
        ...

    def apply(self, function: Callable[..., Any], *args: Any) -> Pending[list[Any]]:
        """Start a function on every rank."""
        ...

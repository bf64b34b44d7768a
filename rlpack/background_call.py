"""A call in a thread, for calls that may never return: the caller decides how long to wait."""

from collections.abc import Callable
from concurrent import futures
from threading import Thread
from typing import Generic, TypeVar

R = TypeVar("R")


class BackgroundCall(Generic[R]):
    """A call of a function in a daemon thread, which starts at once.

    >>> call = BackgroundCall(lambda: 6 * 7, name="product")
    >>> call.wait(timeout_s=10.0), call.outcome()
    (True, 42)
    """

    def __init__(self, function: Callable[[], R], *, name: str) -> None:
        """Start the thread."""
        self._future: futures.Future[R] = futures.Future()
        Thread(target=self._run, args=(function,), name=name, daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the call to end; return whether it has. The call itself may use this, too."""
        futures.wait([self._future], timeout=timeout_s)
        return self._future.done()

    def outcome(self) -> R:
        """Return what the function returned, or raise what it raised; use this only after the call has ended."""
        return self._future.result(timeout=0.0)

    def _run(self, function: Callable[[], R]) -> None:
        try:
            self._future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - `outcome` raises it
            self._future.set_exception(error)

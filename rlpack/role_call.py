"""The start time of the role call that the current thread runs, for deadlines within the call.

>>> with role_call():
...     began = call_began()
>>> began <= time.monotonic(), call_began()
(True, None)
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    began: float | None = None


_THREAD = _Thread()


@contextmanager
def role_call() -> Iterator[None]:
    """Mark the block as a role call that begins now."""
    _THREAD.began = time.monotonic()
    try:
        yield
    finally:
        _THREAD.began = None


def call_began() -> float | None:
    """Return the `time.monotonic()` time at which the thread's call began; None outside of a call."""
    return _THREAD.began


def restart_call_clock() -> None:
    """Restart the clock of the thread's call, so that the rest of it gets the full time."""
    if _THREAD.began is not None:
        _THREAD.began = time.monotonic()

"""When the call of a role began that this thread runs, for deadlines of what it does.

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
    """Note that a call of a role begins, and ends with the block."""
    _THREAD.began = time.monotonic()
    try:
        yield
    finally:
        _THREAD.began = None


def call_began() -> float | None:
    """Return `time.monotonic()` at the beginning of the thread's call; None outside of one."""
    return _THREAD.began


def restart_call_clock() -> None:
    """Let what follows in the thread's call have as much time as the whole call."""
    if _THREAD.began is not None:
        _THREAD.began = time.monotonic()

"""Termination of the `rlpack` process: by SIGTERM, and by a closed standard output."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Exit code of a process that SIGPIPE ends, as `cat` in `cat | head`: 128 + its number.
BROKEN_PIPE = 141


@contextmanager
def sigterm_as_keyboard_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM inside the block, as Ctrl-C does; a started run handles both itself.

    A second SIGTERM is ignored: `timeout` sends one to the process and one to its group.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def exit_quietly_on_broken_pipe() -> Iterator[None]:
    """Exit with `BROKEN_PIPE` and no traceback if standard output is closed, as by `| head`.

    Raises:
        SystemExit: standard output was closed.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports the error again at exit
        raise SystemExit(BROKEN_PIPE) from None

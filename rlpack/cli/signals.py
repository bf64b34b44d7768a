"""How the `rlpack` process ends when it is told to, and when nobody reads what it writes."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# What a shell reports of `cat` in `cat | head`: 128 and the number of SIGPIPE.
NOBODY_READS = 141


@contextmanager
def sigterm_like_ctrl_c() -> Iterator[None]:
    """Have SIGTERM raise KeyboardInterrupt inside, as Ctrl-C does; a run takes both over once it has begun.

    A second one, as `timeout` sends it to the process and to its group, must not cut the farewell short.
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
def quiet_when_nobody_reads() -> Iterator[None]:
    """Leave with `NOBODY_READS` and no traceback when standard output is closed, as by `| head`.

    Raises:
        SystemExit: it was closed.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more while it ends
        raise SystemExit(NOBODY_READS) from None

"""Termination of the `rlpack` process: by SIGTERM, SIGHUP, and a closed standard output."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rlpack.observe.terminal import is_ignored_hangup, leave_closed_terminal
from rlpack.user_code import Interrupted

# Exit code of a process that SIGPIPE ends, as `cat` in `cat | head`: 128 + its number.
BROKEN_PIPE = 141


@contextmanager
def termination_as_keyboard_interrupt() -> Iterator[None]:
    """Raise `Interrupted` on Ctrl-C, SIGTERM and SIGHUP inside the block; a started run handles all of them.

    This distinguishes them from a KeyboardInterrupt that user code raises. A second SIGTERM or SIGHUP is ignored:
    `timeout` signals the process and its group, a closing terminal sends several. Under `nohup`, SIGHUP stays ignored,
    and SIGINT does in the background of a script. The only argument of the `Interrupted` is the signal's number.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for handled in () if number == signal.SIGINT else before.keys() - {signal.SIGINT}:
            signal.signal(handled, signal.SIG_IGN)
        if number == signal.SIGHUP:
            leave_closed_terminal()
        raise Interrupted(number)

    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP) if not is_ignored_hangup(number)
    }
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.default_int_handler
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)


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

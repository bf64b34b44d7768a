"""The terminal or pipes of the process, which may be closed during a run."""

import os
import signal

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


def leave_closed_terminal() -> None:
    """Redirect standard output and error to the null device if they are a closed terminal, where each write fails."""
    for descriptor in (STANDARD_OUTPUT, STANDARD_ERROR):
        try:
            os.write(descriptor, b"")
        except OSError:
            discard(descriptor)


def discard(descriptor: int) -> None:
    """Redirect a stream, such as one whose reader has ended, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def is_ignored_hangup(number: int) -> bool:
    """Return whether this is the signal of a closed terminal, and the process was started to ignore it (`nohup`)."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN

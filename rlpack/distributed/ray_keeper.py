"""Ends the remaining processes of a run's Ray: a script that outlives the driver, which may be killed at any moment.

Ray's daemons end with their driver. What they started may not: agents hang in a report to a daemon that is gone, and a
stopped rank notices nothing. Each daemon starts in a separate session (setsid), in which everything stays that it
starts, whatever title it takes. Once the driver has ended or has stopped Ray, this script deletes the token of the run,
waits a moment, and kills all processes of these sessions.

    python -I -S ray_keeper.py DRIVER_PID TOKEN_FOLDER        standard input: the id of a session on each line
"""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

_GRACE_S, _KILL_S, _POLL_S = 2.0, 10.0, 0.05
# Without pidfd_open, the end of the driver is noticed by the process's new parent.
_PARENT_S = 1.0


def main() -> None:
    """Wait for the end of the driver, or of its use of Ray, and clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    driver, token_folder = int(sys.argv[1]), sys.argv[2]
    sessions = _sessions_of(driver)
    shutil.rmtree(token_folder, ignore_errors=True)
    _end(sessions)


def _sessions_of(driver: int) -> dict[int, int]:
    """Return the sessions that the driver names until it ends or closes the pipe, with the start of their leaders."""
    sessions: dict[int, int] = {}
    ends = [0]
    with suppress(OSError, AttributeError):
        ends.append(os.pidfd_open(driver))
    text = b""
    while True:
        ready, _, _ = select.select(ends, [], [], _PARENT_S)
        chunk = os.read(0, 4096) if 0 in ready else b""
        text += chunk
        *lines, text = text.split(b"\n")
        for line in lines:
            stat = _stat(int(line))
            if stat is not None:
                sessions[int(line)] = stat[2]
        is_over = os.getppid() != driver or len(ready) > 0
        if is_over and not chunk:
            return sessions


def _end(sessions: dict[int, int]) -> None:
    """Wait for the processes of the sessions, and kill those that are left after the grace period."""
    began = time.monotonic()
    while time.monotonic() < began + _KILL_S:
        pids = list(_members(sessions))
        if not pids:
            return
        if time.monotonic() > began + _GRACE_S:
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _members(sessions: dict[int, int]) -> Iterator[int]:
    """Yield the processes of the sessions, except those of a session whose id belongs to another process by now."""
    stats = {int(name): stat for name in os.listdir("/proc") if name.isdigit() and (stat := _stat(int(name)))}
    for pid, (state, session, start) in stats.items():
        leader = stats.get(session)
        is_reused = leader is not None and leader[2] != sessions.get(session)
        if session in sessions and not is_reused and start >= sessions[session] and state != "Z":
            yield pid


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return state, session and start (in clock ticks since boot) of a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[3]), int(fields[19])


if __name__ == "__main__":
    main()

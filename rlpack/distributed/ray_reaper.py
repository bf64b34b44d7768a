"""Ends the remaining processes of a run's Ray: a script that outlives the driver, which may be killed at any moment.

Ray's daemons end with their driver. What they started may not: agents hang in a report to a daemon that is gone, and a
stopped rank notices nothing. Each daemon starts in a separate session (setsid). All processes that it starts stay in
this session, whatever titles they take. Once the driver has ended or has stopped Ray, this script deletes the token of
the run, waits a moment, and kills all processes of these sessions.

Ray ends a driver without a message if the object store, a part of the raylet, ends while the driver uses it. This
script finds that in the log that Ray keeps of the driver, and reports it on standard error and in the run's log.

While Ray starts, it waits for its first workers with Python's lock held. If they end before they have registered, it
waits for ever, and no thread of the driver can run. This script therefore also reports a start that is overdue and ends
the daemons, upon which Ray ends the driver.

    python -I -S ray_reaper.py DRIVER_PID TOKEN_FOLDER

Lines of standard input are ids of sessions, `ray_logs FOLDER`, `run_log FILE`, `start_by SECONDS ERROR` and `started`.
"""

import glob
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

_GRACE_S, _KILL_S, _POLL_S = 2.0, 10.0, 0.05
# Without pidfd_open, the end of the driver is noticed by the process's new parent.
_PARENT_S = 1.0
# What Ray logs before it ends a process, and where it is looked for, in bytes from the end.
_ENDED_BY_RAY, _TAIL = b"Terminate the process", 4096


def main() -> None:
    """Wait for the end of the driver, or of its use of Ray, and clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    driver, token_folder = int(sys.argv[1]), sys.argv[2]
    sessions, places = _told_by(driver)
    with suppress(OSError):
        _report(driver, places)
    os.close(2)  # a reader of the driver's errors doesn't wait for this script
    shutil.rmtree(token_folder, ignore_errors=True)
    _end(sessions)


def _told_by(driver: int) -> tuple[dict[int, int], dict[str, str]]:
    """Read what the driver sends until it ends or closes the pipe.

    Returns:
        The start of the leader of each session, and the places of logs by name.
    """
    sessions: dict[int, int] = {}
    places: dict[str, str] = {}
    deadline, error = float("inf"), ""
    ends = [0]
    with suppress(OSError, AttributeError):
        ends.append(os.pidfd_open(driver))
    text = b""
    while True:
        ready, _, _ = select.select(ends, [], [], max(0.0, min(_PARENT_S, deadline - time.monotonic())))
        chunk = os.read(0, 4096) if 0 in ready else b""
        text += chunk
        *lines, text = text.split(b"\n")
        for line in lines:
            name, _, place = os.fsdecode(line).partition(" ")
            if name == "start_by":
                seconds, _, error = place.partition(" ")
                deadline = time.monotonic() + float(seconds)
            elif name == "started":
                deadline = float("inf")
            elif place:
                places[name] = place
            elif (stat := _stat(int(name))) is not None:
                sessions[int(name)] = stat[2]
        if time.monotonic() > deadline:
            deadline = float("inf")
            os.write(2, os.fsencode(f"rlpack train: {error}\n"))
            _kill(_members(sessions))
        is_over = os.getppid() != driver or len(ready) > 0
        if is_over and not chunk:
            return sessions, places


def _report(driver: int, places: dict[str, str]) -> None:
    """Report that Ray ended the driver, if its log says so."""
    logs = places.get("ray_logs")
    for path in glob.glob(f"{glob.escape(logs)}/python-core-driver-*_{driver}.log") if logs else []:
        with open(path, "rb") as log:
            log.seek(max(0, os.path.getsize(path) - _TAIL))
            if _ENDED_BY_RAY not in log.read():
                continue
        text = (
            f"Ray ended the driver (process {driver}), because the raylet, which holds the object store, ended during "
            f"the run; {logs} and the kernel's log may say why (out of memory, another program); run the same "
            "command with its run_dir and resume=auto to continue"
        )
        os.write(2, os.fsencode(f"rlpack train: {text}\n"))
        if "run_log" in places:
            now = time.time()
            clock = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now % 1 * 1000):03d}"
            with open(places["run_log"], "a", encoding="utf-8") as run_log:
                run_log.write(f"{clock} driver ERROR rlpack: {text}\n")


def _end(sessions: dict[int, int]) -> None:
    """Wait for the processes of the sessions, and kill those that are left after the grace period."""
    began = time.monotonic()
    while time.monotonic() < began + _KILL_S:
        pids = list(_members(sessions))
        if not pids:
            return
        if time.monotonic() > began + _GRACE_S:
            _kill(pids)
        time.sleep(_POLL_S)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


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

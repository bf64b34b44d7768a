"""The supervisor: the process between the pool and the workers that run reward functions.

The supervisor forks workers from itself, which is cheap since it has loaded nothing. It kills workers with all their
descendants. Once the pool's process is gone, for whatever reason, it kills all workers and exits. As a subreaper it
becomes the parent of every orphan below it, so a process that leaves its group or loses its parent can't escape. The
supervisor runs no user code.

    pool ──control──► supervisor ──fork──► worker: functions      each with its own session and scratch directory
      ▲──────────────channel, output──────────┘

Commands from the pool: `S` (start; channel and output are passed as descriptors) or `K` (kill), and the worker's
number. Reports to the pool: `H` (the supervisor is running), `E` (exited) with number and exit status (negated signal).
"""

import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlpack.rewards.pool import pool_worker, sandbox
from rlpack.rewards.pool import protocol as wire
from rlpack.rewards.pool.limits import Limits
from rlpack.rewards.pool.remove_tree import remove_tree
from rlpack.rewards.pool.scratch_usage import scratch_bytes

COMMAND = struct.Struct("!cI")
REPORT = struct.Struct("!cIi")

# Polling intervals in seconds: to enforce a limit on processes, and otherwise to notice orphans.
_WATCH_S, _IDLE_S = 0.02, 0.25
_KILL_TIMEOUT_S = 5.0
# The kernel ends a killed process within about this time.
_REAP_S = 0.001
_NO_WORKER = (1 << 32) - 1


@dataclass
class Supervisor:
    """Starts, watches and kills workers at the pool's command.

    Attributes:
        control: socket to the pool.
        scratch: parent of the workers' scratch directories.
        limits: resource limits of each worker.
        serve: the function that a worker runs, given its channel and its scratch directory.
        pids: process ids of the running workers, by worker number.
        cleaners: processes that delete the directories of workers that exited.
        next_count: when the disk usage of workers is measured next, in `time.monotonic()` seconds.
        wakers: sockets by which a signal wakes the supervisor; workers close them.
    """

    control: socket.socket
    scratch: Path
    limits: Limits
    serve: Callable[[socket.socket, Path], None]
    pids: dict[int, int] = field(default_factory=dict)
    cleaners: set[int] = field(default_factory=set)
    next_count: float = 0.0
    wakers: tuple[socket.socket, ...] = ()

    def run(self) -> None:
        """Execute the pool's commands until the pool is gone."""
        owner = os.getppid()
        wake, waker = self.wakers = socket.socketpair()
        for end in self.wakers:
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # `select.select` fails for descriptors from 1024 on, and the control socket keeps its number from the pool's
        # process.
        selector = selectors.PollSelector()
        for end in (self.control, wake):
            selector.register(end, selectors.EVENT_READ)
        self.report(b"H", _NO_WORKER, 0)
        while os.getppid() == owner:
            ready = [key.fileobj for key, _ in selector.select(_WATCH_S if self.limits.processes else _IDLE_S)]
            if wake in ready:
                wake.recv(4096)
            if self.control in ready and not self._execute_command():
                break
            self._enforce_process_limit()
            self._enforce_scratch_limit()
            self._reap()
        self.end()

    def end(self) -> None:
        """Kill every worker and remove their files."""
        signal.set_wakeup_fd(-1)
        for pid in self.pids.values():
            _kill_group(pid)
        self._kill_children(lambda pid: True)
        remove_tree(self.scratch)

    def report(self, kind: bytes, number: int, status: int) -> None:
        """Send a report; the main loop notices if the pool is gone."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.control.sendall(REPORT.pack(kind, number, status))

    def _execute_command(self) -> bool:
        """Execute one command; return False if the pool is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, COMMAND.size, 2)
        except ConnectionResetError:
            return False
        if len(data) < COMMAND.size:
            return False
        kind, number = COMMAND.unpack(data)
        if kind == b"S":
            self._start(number, *descriptors)
        elif number in self.pids:
            _kill_group(self.pids[number])
        return True

    def _start(self, number: int, channel: int, output: int) -> None:
        folder = self.scratch / str(number)
        folder.mkdir()
        pid = os.fork()
        if pid == 0:
            self._run_worker(folder, channel, output)
        os.close(channel)
        os.close(output)
        self.pids[number] = pid

    def _run_worker(self, folder: Path, channel: int, output: int) -> None:
        """Turn this forked process into a worker; never returns."""
        status = 1
        try:
            self._leave_supervisor(folder, output)
            self.serve(socket.socket(fileno=channel), folder)
            status = 0
        except BaseException as error:  # noqa: BLE001 - the top level of a process; the pool reads its output
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _leave_supervisor(self, folder: Path, output: int) -> None:
        """Leave the supervisor's session, signals and descriptors, and move to the scratch directory."""
        os.setsid()
        sandbox.die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self.control, *self.wakers):
            end.close()
        no_input = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((no_input, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        for name in ("HOME", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME"):
            os.environ[name] = str(folder)
        os.chdir(folder)

    def _enforce_process_limit(self) -> None:
        """Kill workers with too many descendants, and orphans."""
        for pid in list(self.pids.values()):
            if len(list(_descendants(pid, self.limits.processes + 1))) > self.limits.processes:
                _kill_group(pid)
        self._kill_children(self._is_orphan)

    def _enforce_scratch_limit(self) -> None:
        """Kill workers that have written too much, every quarter of a second or, if counting takes long, less often."""
        start = time.monotonic()
        if start < self.next_count:
            return
        for number, pid in list(self.pids.items()):
            pids, limit = [pid, *_descendants(pid, self.limits.processes)], self.limits.scratch_bytes
            if scratch_bytes(self.scratch / str(number), pids, limit, self.limits.file_bytes) > limit:
                _kill_group(pid)
        now = time.monotonic()
        self.next_count = now + max(_IDLE_S, 4 * (now - start))

    def _is_orphan(self, pid: int) -> bool:
        return pid not in self.pids.values() and pid not in self.cleaners

    def _reap(self) -> None:
        """Reap exited processes; kill the descendants of exited workers."""
        while (pid := _exited_child()) is not None:
            number = next((number for number, worker in self.pids.items() if worker == pid), None)
            if number is not None:  # the group's id can't be reused before the worker is waited for
                _kill_group(pid)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self.cleaners.discard(pid)
            if number is not None:
                del self.pids[number]
                self._kill_children(self._is_orphan)
                self.report(b"E", number, status)
                self._remove_in_background(self.scratch / str(number))

    def _remove_in_background(self, folder: Path) -> None:
        """Delete a directory in another process; it may hold many files."""
        pid = os.fork()
        if pid == 0:
            remove_tree(folder)
            os._exit(0)
        self.cleaners.add(pid)

    def _kill_children(self, should_kill: Callable[[int], bool]) -> None:
        """Kill matching children, and the orphans this leaves, until none remain."""
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while time.monotonic() < deadline:
            pids = [pid for pid in _child_pids(os.getpid()) if should_kill(pid)]
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                self.cleaners.discard(pid)
            if not pids:
                return
            time.sleep(_REAP_S)


def _kill_group(pid: int) -> None:
    """Kill a worker and its process group, if it leads one yet."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _exited_child() -> int | None:
    """Return the pid of a child that has exited and isn't reaped yet."""
    with suppress(ChildProcessError):
        child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return child.si_pid if child else None
    return None


def _child_pids(pid: int) -> Iterator[int]:
    """Yield the direct children of a process."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())


def _descendants(pid: int, limit: int) -> Iterator[int]:
    """Yield at most `limit` descendants of a process."""
    parents = [pid]
    while parents and limit > 0:
        for child in _child_pids(parents.pop()):
            yield child
            limit -= 1
            parents.append(child)


def main() -> None:
    """Run the supervisor on the socket whose descriptor is the first argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = wire.receive(control)
    if settings is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C
    sandbox.adopt_orphans()
    limits = Limits(**settings["limits"])
    hidden = [Path(path) for path in settings["hidden"]]

    def serve(channel: socket.socket, folder: Path) -> None:
        limits.apply()
        sandbox.confine(folder, strict=settings["strict"], processes=limits.processes > 0, hidden=hidden)
        pool_worker.serve(channel, settings["functions"])

    Supervisor(control, Path(settings["scratch"]), limits, serve).run()


if __name__ == "__main__":
    main()

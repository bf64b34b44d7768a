"""The process between the pool and the processes that run reward functions.

It starts them (by a fork of itself, which has nothing in it), ends them with all that they started, and ends itself
when the pool's process is gone, however that went. It is the parent of every orphan below it, so a process that leaves
its group or loses its parent doesn't get away. It runs no user's code.

    pool ──control──► keeper ──fork──► child: functions      one session each, one scratch directory each
      ▲──────────────channel, output─────┘

Control, from the pool: `S` (start; channel and output come along as descriptors) or `K` (kill), and the child's number;
from the keeper: `H` (it runs), `E` (ended) with number and exit status (minus the signal).
"""

import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlpack.rewards.pool import pool_worker as child
from rlpack.rewards.pool import protocol as wire
from rlpack.rewards.pool import sandbox
from rlpack.rewards.pool.limits import Limits

COMMAND = struct.Struct("!cI")
REPORT = struct.Struct("!cIi")

# How long it takes at most to see that a child has too many processes, and an orphan that nobody waits for.
_WATCH_S, _IDLE_S = 0.02, 0.25
_HUNT_S = 5.0
_NOBODY = 1 << 32


@dataclass
class Keeper:
    """The children that run, by number, and those that clean up after others.

    Attributes:
        control: to the pool.
        scratch: directory of all children.
        limits: of each child.
        serve: what a child does, given its channel and its scratch directory.
        wakers: by which a signal wakes the keeper; no child keeps them.
    """

    control: socket.socket
    scratch: Path
    limits: Limits
    serve: Callable[[socket.socket, Path], None]
    pids: dict[int, int] = field(default_factory=dict)
    cleaners: set[int] = field(default_factory=set)
    wakers: tuple[socket.socket, ...] = ()

    def run(self) -> None:
        """Obey the pool until it is gone."""
        owner = os.getppid()
        wake, waker = self.wakers = socket.socketpair()
        for end in self.wakers:
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.report(b"H", _NOBODY - 1, 0)
        while os.getppid() == owner:
            wait_s = _WATCH_S if self.limits.processes else _IDLE_S
            ready, _, _ = select.select([self.control, wake], [], [], wait_s)
            if wake in ready:
                wake.recv(4096)
            if self.control in ready and not self._obey():
                break
            self._watch()
            self._reap()
        self.end()

    def end(self) -> None:
        """End every child and remove their directory."""
        signal.set_wakeup_fd(-1)
        for pid in self.pids.values():
            _kill_group(pid)
        self._hunt(lambda pid: True)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def report(self, kind: bytes, number: int, status: int) -> None:
        """Tell the pool; a pool that is gone is noticed by the loop."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.control.sendall(REPORT.pack(kind, number, status))

    def _obey(self) -> bool:
        """Carry out one command; False when the pool is gone."""
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
        place = self.scratch / str(number)
        place.mkdir()
        pid = os.fork()
        if pid == 0:
            self._become(place, channel, output)
        os.close(channel)
        os.close(output)
        self.pids[number] = pid

    def _become(self, place: Path, channel: int, output: int) -> None:
        """Be a child: leave the keeper's session and descriptors, and never come back from here."""
        status = 1
        try:
            os.setsid()
            sandbox.die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self.control, *self.wakers):
                end.close()
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            for name in ("HOME", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME"):
                os.environ[name] = str(place)
            os.chdir(place)
            self.serve(socket.socket(fileno=channel), place)
            status = 0
        except BaseException as error:  # noqa: BLE001 - the edge of a process: the pool reads what is written here
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _watch(self) -> None:
        """End children that have more processes than they may, and processes that lost their parent."""
        for pid in list(self.pids.values()):
            if len(list(_below(pid, self.limits.processes + 1))) > self.limits.processes:
                _kill_group(pid)
        self._hunt(self._is_stray)

    def _is_stray(self, pid: int) -> bool:
        return pid not in self.pids.values() and pid not in self.cleaners

    def _reap(self) -> None:
        """Take leave of whoever ended; with a child goes all that it started."""
        while (found := _ended()) is not None:
            number = next((number for number, pid in self.pids.items() if pid == found), None)
            if number is not None:  # its group's name is taken for as long as it is not waited for
                _kill_group(found)
            status = os.waitstatus_to_exitcode(os.waitpid(found, 0)[1])
            self.cleaners.discard(found)
            if number is not None:
                del self.pids[number]
                self._hunt(self._is_stray)
                self.report(b"E", number, status)
                self._clean(self.scratch / str(number))

    def _clean(self, place: Path) -> None:
        """Remove a child's directory beside all else: it may hold a million files."""
        pid = os.fork()
        if pid == 0:
            shutil.rmtree(place, ignore_errors=True)
            os._exit(0)
        self.cleaners.add(pid)

    def _hunt(self, wanted: Callable[[int], bool]) -> None:
        """Kill those right below that are `wanted`, and what they leave behind, until there are none."""
        deadline = time.monotonic() + _HUNT_S
        while time.monotonic() < deadline:
            found = [pid for pid in _children(os.getpid()) if wanted(pid)]
            for pid in found:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
                self.cleaners.discard(pid)
            if not found:
                return


def _kill_group(pid: int) -> None:
    """Kill a child and all of its group; before it leads one, itself alone."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def _ended() -> int | None:
    """Return a process below that has ended and isn't waited for yet."""
    with suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found.si_pid if found else None
    return None


def _children(pid: int) -> Iterator[int]:
    """Yield the processes that `pid` is the parent of."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())


def _below(pid: int, enough: int) -> Iterator[int]:
    """Yield at most `enough` of the processes that `pid` started, those that they started among them."""
    left = [pid]
    while left and enough > 0:
        for found in _children(left.pop()):
            yield found
            enough -= 1
            left.append(found)


def main() -> None:
    """Run the keeper on the socket whose descriptor is the first argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = wire.receive(control)
    if settings is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the pool's to answer
    sandbox.adopt_orphans()
    limits = Limits(**settings["limits"])

    def serve(channel: socket.socket, place: Path) -> None:
        limits.apply()
        sandbox.confine(place, strict=settings["strict"], processes=limits.processes > 0)
        child.serve(channel, settings["functions"])

    Keeper(control, Path(settings["scratch"]), limits, serve).run()


if __name__ == "__main__":
    main()

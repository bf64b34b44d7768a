"""The pool's side of its processes: starts the supervisor and, through it, the workers, and reads all they send.

Only `poll` blocks, and at most for its timeout. Messages from workers are untrusted: a worker that sends an invalid
message is killed.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlpack.rewards.errors import PoolError
from rlpack.rewards.pool import protocol as wire
from rlpack.rewards.pool.call_queue import PoolSettings
from rlpack.rewards.pool.hidden_paths import hidden_paths
from rlpack.rewards.pool.limits import scrub_environment
from rlpack.rewards.pool.remove_tree import remove_tree
from rlpack.rewards.pool.supervisor import COMMAND, REPORT

_MAX_ANSWER_BYTES = 1 << 20
_TAIL_BYTES = 2000
_CHUNK_BYTES = 1 << 18
_CLOSE_TIMEOUT_S = 5.0


@dataclass
class WorkerHandle:
    """The pool's end of one worker process.

    Attributes:
        number: identifies the worker to the supervisor.
        channel: socket for messages.
        output: descriptor from which the worker's standard output and error are read.
        is_ready: whether its functions are loaded.
        is_dying: whether it was killed or has exited.
        tail: the last bytes of its output.
        frames: reassembles its messages from the channel's bytes.
        outgoing: bytes that wait to be sent.
    """

    number: int
    channel: socket.socket
    output: int
    is_ready: bool = False
    is_dying: bool = False
    tail: bytes = b""
    frames: wire.FrameReader = field(default_factory=lambda: wire.FrameReader(_MAX_ANSWER_BYTES))
    outgoing: bytearray = field(default_factory=bytearray)

    @property
    def output_tail(self) -> str:
        """Return the end of the worker's output as printable text."""
        return printable(self.tail.decode(errors="replace"))


@dataclass(frozen=True)
class Event:
    """An event of a worker: a `message`, `invalid` bytes, or `exited`."""

    kind: Literal["message", "invalid", "exited"]
    worker: WorkerHandle
    message: wire.WireMessage = field(default_factory=dict)
    text: str = ""


class Processes:
    """The supervisor and the worker processes of one pool."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], settings: PoolSettings) -> None:
        """Start the supervisor without waiting for it."""
        self.workers: dict[int, WorkerHandle] = {}
        self.output_bytes = 0
        self._last_output = ""  # of the worker that exited last and had written something
        self._next_number = 0
        self._selector = selectors.DefaultSelector()
        scratch = Path(tempfile.mkdtemp(prefix="rlpack-rewards-"))
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "rlpack.rewards.pool.supervisor", str(theirs.fileno())]
            supervisor = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=scrub_environment(os.environ, scratch, settings.env_vars),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._supervisor = supervisor
        self.close = weakref.finalize(self, _close, supervisor, self._control, scratch, self.workers)
        message = {
            "limits": asdict(settings.limits),
            "strict": settings.strict,
            "functions": functions,
            "scratch": str(scratch),
            "hidden": [str(path) for path in hidden_paths(os.environ, settings.hidden)],
        }
        self._control.sendall(wire.pack(message))
        self._control.setblocking(False)
        self._reports = bytearray()
        self._selector.register(self._control, selectors.EVENT_READ, None)

    def output(self) -> str:
        """Return the end of the output of the running workers and of the last one that exited."""
        for worker in self.workers.values():
            self._read_output(worker)
        running = [worker.output_tail for worker in self.workers.values() if worker.tail]
        return " ".join(text for text in (self._last_output, *running) if text)

    def start(self) -> WorkerHandle:
        """Start a worker."""
        ours, theirs = socket.socketpair()
        output, worker_output = os.pipe()
        try:
            self._command(b"S", self._next_number, [theirs.fileno(), worker_output])
        finally:
            theirs.close()
            os.close(worker_output)
        for end in (ours.fileno(), output):
            os.set_blocking(end, False)
        worker = WorkerHandle(self._next_number, ours, output)
        self.workers[worker.number] = worker
        self._next_number += 1
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self._selector.register(output, selectors.EVENT_READ, worker)
        return worker

    def kill(self, worker: WorkerHandle) -> None:
        """Kill a worker and all its descendants; an `exited` event follows."""
        if not worker.is_dying:
            worker.is_dying = True
            self._command(b"K", worker.number, [])

    def send(self, worker: WorkerHandle, message: bytes) -> None:
        """Queue a packed message, which is sent as fast as the worker reads."""
        worker.outgoing += message
        self._selector.modify(worker.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait until something happens or the timeout, and return the events.

        Raises:
            PoolError: the supervisor is gone.
        """
        events: list[Event] = []
        for key, mask in self._selector.select(max(0.0, timeout_s)):
            worker: WorkerHandle | None = key.data
            if worker is None:
                events += self._read_reports()
            elif worker.number not in self.workers:  # its exit was handled earlier in this loop
                continue
            elif key.fd == worker.output:
                self._read_output(worker)
            else:
                if mask & selectors.EVENT_WRITE:
                    self._write(worker)
                if mask & selectors.EVENT_READ:
                    events += self._read_channel(worker)
        return events

    def _command(self, kind: bytes, number: int, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._control, [COMMAND.pack(kind, number)], descriptors)
        except OSError as error:
            raise self._supervisor_error() from error

    def _read_reports(self) -> list[Event]:
        """Read the supervisor's reports."""
        try:
            data = self._control.recv(4096)
        except ConnectionResetError:
            data = b""
        if not data:
            raise self._supervisor_error()
        self._reports += data
        events: list[Event] = []
        while len(self._reports) >= REPORT.size:
            kind, number, status = REPORT.unpack_from(self._reports)
            del self._reports[: REPORT.size]
            if kind == b"E":
                events += self._remove(self.workers[number], status)
        return events

    def _supervisor_error(self) -> PoolError:
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(1.0)
        code = self._supervisor.returncode
        return PoolError(
            f"the supervisor of the reward processes exited (status {code}); its error output is in the rank's log"
        )

    def _remove(self, worker: WorkerHandle, status: int) -> list[Event]:
        """Read the last messages of a worker that exited, and close its descriptors."""
        last = self._read_channel(worker, exited=True)
        self._read_output(worker)
        for end in (worker.channel, worker.output):
            with suppress(KeyError):
                self._selector.unregister(end)
        self._last_output = worker.output_tail or self._last_output
        del self.workers[worker.number]
        worker.is_dying = True
        _close_descriptors(worker)
        messages = [event for event in last if event.kind == "message"]
        return [*messages, Event("exited", worker, text=_describe_exit(status))]

    def _read_channel(self, worker: WorkerHandle, *, exited: bool = False) -> list[Event]:
        closed = False
        while not closed:
            try:
                data = worker.channel.recv(_CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionResetError:
                data = b""
            worker.frames.feed(data)
            closed = not data
        events: list[Event] = []
        try:
            events += [Event("message", worker, message) for message in worker.frames]
        except wire.WireError as error:
            events.append(Event("invalid", worker, text=str(error)))
        if closed and not exited:  # no further message can arrive
            self._selector.unregister(worker.channel)
            self.kill(worker)
        return events

    def _read_output(self, worker: WorkerHandle) -> None:
        """Count a worker's output, and store the end of it.

        Only a few chunks are read at a time, for fairness to the other workers.
        """
        for _ in range(8):
            try:
                data = os.read(worker.output, _CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                with suppress(KeyError):
                    self._selector.unregister(worker.output)
                return
            self.output_bytes += len(data)
            worker.tail = (worker.tail + data)[-_TAIL_BYTES:]

    def _write(self, worker: WorkerHandle) -> None:
        try:
            count = worker.channel.send(worker.outgoing[:_CHUNK_BYTES])
        except (BlockingIOError, InterruptedError):
            return
        except (BrokenPipeError, ConnectionResetError):
            count = len(worker.outgoing)
        del worker.outgoing[:count]
        if not worker.outgoing:
            self._selector.modify(worker.channel, selectors.EVENT_READ, worker)


def printable(text: str) -> str:
    """Return untrusted text as one line without control characters.

    >>> printable(f"a{chr(27)}[31m{chr(10)}b ")
    'a [31m b'
    """
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def _describe_exit(status: int) -> str:
    """Describe how a process ended, from its status or negated signal."""
    if status >= 0:
        return f"its process exited with status {status}"
    names = {number.value: number.name for number in signal.Signals}  # only the first and last real-time signals
    name = names.get(-status, f"signal {-status}")
    hint = {
        "SIGXCPU": " after using twice its deadline in CPU time",
        "SIGKILL": ", by itself, for too many processes, for too much data on disk, or for lack of memory",
    }.get(name, "")
    return f"its process was killed by {name}{hint}"


def _close_descriptors(worker: WorkerHandle) -> None:
    worker.channel.close()
    os.close(worker.output)


def _close(
    supervisor: subprocess.Popen[bytes], control: socket.socket, scratch: Path, workers: dict[int, WorkerHandle]
) -> None:
    """Close the control socket, so that the supervisor kills the workers and exits."""
    control.close()
    for worker in workers.values():
        _close_descriptors(worker)
    workers.clear()
    try:
        supervisor.wait(_CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait(_CLOSE_TIMEOUT_S)
    remove_tree(scratch)

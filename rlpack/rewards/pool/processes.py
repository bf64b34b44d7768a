"""The pool's side of its processes: starts the keeper and, through it, the children, and hears of everything they do.

Nothing here waits but `step`, and that for at most as long as it is told to. What a child says is not believed: a
message that is none ends it.
"""

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlpack.rewards.errors import PoolError
from rlpack.rewards.pool import protocol as wire
from rlpack.rewards.pool.limits import Limits, scrubbed
from rlpack.rewards.pool.supervisor import COMMAND, REPORT

_ANSWER_LIMIT = 1 << 20
_TAIL_BYTES = 2000
_PIECE = 1 << 18
_CLOSE_S = 5.0


@dataclass
class Child:
    """One process that runs functions.

    Attributes:
        number: its name for the keeper.
        channel: messages go over it.
        output: what it writes comes out here, a descriptor.
        is_ready: its functions are loaded.
        is_dying: it is to end, or has.
        tail: the end of what it wrote.
    """

    number: int
    channel: socket.socket
    output: int
    is_ready: bool = False
    is_dying: bool = False
    tail: bytes = b""
    reader: wire.Reader = field(default_factory=lambda: wire.Reader(_ANSWER_LIMIT))
    outgoing: bytearray = field(default_factory=bytearray)

    @property
    def said(self) -> str:
        """Return the last that it wrote, fit to be shown."""
        return printable(self.tail.decode(errors="replace"))


@dataclass(frozen=True)
class Event:
    """What happened to a child: a `message` of it came, it said what is `garbage`, or it `ended`."""

    kind: Literal["message", "garbage", "ended"]
    child: Child
    message: wire.Message = field(default_factory=dict)
    text: str = ""


class Processes:
    """The children that run; a new one is there as soon as `start` is called, and ready a little later."""

    def __init__(
        self,
        functions: Mapping[str, Mapping[str, Any]],
        limits: Limits,
        *,
        strict: bool = False,
        environment: Sequence[str] = (),
    ) -> None:
        """Start the keeper, and wait for nothing."""
        self.children: dict[int, Child] = {}
        self.output_bytes = 0
        self._next = 0
        self._selector = selectors.DefaultSelector()
        scratch = Path(tempfile.mkdtemp(prefix="rlpack-rewards-"))
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "rlpack.rewards.pool.supervisor", str(theirs.fileno())]
            keeper = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=scrubbed(os.environ, scratch, environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._keeper = keeper
        self.close = weakref.finalize(self, _close, keeper, self._control, scratch, self.children)
        settings = {"limits": asdict(limits), "strict": strict, "functions": functions, "scratch": str(scratch)}
        self._control.sendall(wire.pack(settings))
        self._control.setblocking(False)
        self._reports = bytearray()
        self._selector.register(self._control, selectors.EVENT_READ, None)

    def start(self) -> Child:
        """Start a child."""
        mine, theirs = socket.socketpair()
        output, written = os.pipe()
        try:
            self._command(b"S", self._next, [theirs.fileno(), written])
        finally:
            theirs.close()
            os.close(written)
        for end in (mine.fileno(), output):
            os.set_blocking(end, False)
        child = Child(self._next, mine, output)
        self.children[self._next] = child
        self._next += 1
        self._selector.register(mine, selectors.EVENT_READ, child)
        self._selector.register(output, selectors.EVENT_READ, child)
        return child

    def kill(self, child: Child) -> None:
        """End a child and all it started; an `ended` comes."""
        if not child.is_dying:
            child.is_dying = True
            self._command(b"K", child.number, [])

    def send(self, child: Child, message: bytes) -> None:
        """Give a packed message to a child, as fast as it reads."""
        child.outgoing += message
        self._selector.modify(child.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, child)

    def step(self, timeout_s: float) -> list[Event]:
        """Wait at most so long for something to happen, and return what did.

        Raises:
            PoolError: the keeper is gone.
        """
        events: list[Event] = []
        for key, mask in self._selector.select(max(0.0, timeout_s)):
            child: Child | None = key.data
            if child is None:
                events += self._hear_keeper()
            elif child.number not in self.children:  # it ended in this very step
                continue
            elif key.fd == child.output:
                self._hear_output(child)
            else:
                if mask & selectors.EVENT_WRITE:
                    self._write(child)
                if mask & selectors.EVENT_READ:
                    events += self._hear_channel(child)
        return events

    def _command(self, kind: bytes, number: int, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._control, [COMMAND.pack(kind, number)], descriptors)
        except OSError as error:
            raise PoolError(self._why_gone()) from error

    def _hear_keeper(self) -> list[Event]:
        try:
            data = self._control.recv(4096)
        except ConnectionResetError:
            data = b""
        if not data:
            raise PoolError(self._why_gone())
        self._reports += data
        events: list[Event] = []
        while len(self._reports) >= REPORT.size:
            kind, number, status = REPORT.unpack_from(self._reports)
            del self._reports[: REPORT.size]
            if kind == b"E":
                events += self._ended(self.children[number], status)
        return events

    def _why_gone(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._keeper.wait(1.0)
        code = self._keeper.returncode
        return f"the keeper of the reward processes ended (exit status {code}); its words are in the rank's log"

    def _ended(self, child: Child, status: int) -> list[Event]:
        """Take what a child said last, and let go of it."""
        said = self._hear_channel(child, last=True)
        self._hear_output(child)
        for end in (child.channel, child.output):
            with suppress(KeyError):
                self._selector.unregister(end)
        del self.children[child.number]
        child.is_dying = True
        _let_go(child)
        return [*(event for event in said if event.kind == "message"), Event("ended", child, text=_ending(status))]

    def _hear_channel(self, child: Child, *, last: bool = False) -> list[Event]:
        gone = False
        while not gone:
            try:
                data = child.channel.recv(_PIECE)
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionResetError:
                data = b""
            child.reader.feed(data)
            gone = not data
        found: list[Event] = []
        try:
            found += [Event("message", child, message) for message in child.reader]
        except wire.WireError as error:
            found.append(Event("garbage", child, text=str(error)))
        if gone and not last:  # it closed its end, so nothing more can come of it
            self._selector.unregister(child.channel)
            self.kill(child)
        return found

    def _hear_output(self, child: Child) -> None:
        """Count what a child writes and keep its end, a piece at a time so that others get their turn."""
        for _ in range(8):
            try:
                data = os.read(child.output, _PIECE)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                with suppress(KeyError):
                    self._selector.unregister(child.output)
                return
            self.output_bytes += len(data)
            child.tail = (child.tail + data)[-_TAIL_BYTES:]

    def _write(self, child: Child) -> None:
        try:
            sent = child.channel.send(child.outgoing[:_PIECE])
        except (BlockingIOError, InterruptedError):
            return
        except (BrokenPipeError, ConnectionResetError):
            sent = len(child.outgoing)
        del child.outgoing[:sent]
        if not child.outgoing:
            self._selector.modify(child.channel, selectors.EVENT_READ, child)


def printable(text: str) -> str:
    """Return a text of whatever origin as one line without control characters.

    >>> printable(f"a{chr(27)}[31m{chr(10)}b ")
    'a [31m b'
    """
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _ending(status: int) -> str:
    """Say how a process ended, from its exit status or minus the signal that ended it."""
    if status >= 0:
        return f"its process ended itself with exit status {status}"
    known = {one.value: one.name for one in signal.Signals}  # of the real-time ones only the first and the last
    name = known.get(-status, f"signal {-status}")
    hint = {
        "SIGXCPU": ", having used twice its deadline in CPU time",
        "SIGKILL": ", by itself, for too many processes, or for want of memory",
    }.get(name, "")
    return f"its process was ended by {name}{hint}"


def _let_go(child: Child) -> None:
    child.channel.close()
    os.close(child.output)


def _close(keeper: subprocess.Popen[bytes], control: socket.socket, scratch: Path, children: dict[int, Child]) -> None:
    """End everything: the keeper sees that its pool is gone, ends the children, and goes."""
    control.close()
    for child in children.values():
        _let_go(child)
    children.clear()
    try:
        keeper.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait(_CLOSE_S)
    shutil.rmtree(scratch, ignore_errors=True)

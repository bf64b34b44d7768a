"""Watches the Ray that this process uses, so that no wait for Ray outlasts it by more than seconds.

A driver whose GCS or raylet ended, is stopped, or can't be reached waits a minute or for ever in Ray's own code, which
then ends the process without a message. A thread therefore monitors both. The driver's waits check it and raise; a
driver that is stuck in Ray's code is ended.
"""

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlpack.distributed.errors import ClusterError, UnavailableError
from rlpack.run_log import current_log
from rlpack.user_code import exit_now

logger = logging.getLogger(__name__)

# Polling intervals for the daemons of a run's own Ray, and for those of a cluster, which are probed.
LOOK_S, _ASK_S = 0.25, 0.5
_ANSWER_S = 1.0
# A pause of the whole machine looks like one failure.
_LEAST_FAILURES = 4
# A driver that has not noticed by then that a daemon ended is stuck in Ray's code.
_STUCK_S = 5.0
_KILL_S = 2.0
_FAILED, _WRONG = 1, 2
# The beginning of each HTTP/2 connection: the client's preface and an empty SETTINGS frame, to which a server answers.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


def answers(address: str, timeout_s: float = _ANSWER_S) -> bool:
    """Return whether a process serves gRPC at `host:port`: one that is stopped accepts connections and says nothing.

    Whatever the server's authentication or encryption, it answers, or closes the connection.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
            try:
                connection.sendall(_HELLO)
                connection.recv(1)
            except ConnectionError:
                pass  # closed by the server
            return True
    except OSError:
        return False


class RayWatch:
    """A Ray that this process uses.

    On a cluster that others started, its GCS and this machine's raylet are asked whether they are there.
    """

    def __init__(self) -> None:
        self._logs = ""
        self._addresses: dict[str, str] = {}
        self._silence_s = 0.0
        self._answered: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._killers: list[Callable[[], None]] = []
        self._noticed, self._closed = threading.Event(), threading.Event()

    def start_asking(self, addresses: Mapping[str, str], silence_s: float, logs: str) -> None:
        """Ask daemons, by their names and addresses, until `stop_watching`.

        Args:
            addresses: the address of each daemon, as host:port.
            silence_s: the longest silence of a daemon.
            logs: the folder of their logs, for the error.
        """
        self._addresses, self._silence_s = dict(addresses), silence_s
        self._answered = dict.fromkeys(addresses, time.monotonic())
        self.start_watching(logs)

    def start_watching(self, logs: str) -> None:
        """Start the thread."""
        self._logs = logs
        threading.Thread(target=self._watch, name="ray-watch", daemon=True).start()

    def kill_with(self, kill: Callable[[], None]) -> None:
        """Call `kill`, which ends processes of the run without Ray's help, before a driver that is stuck is ended."""
        self._killers.append(kill)

    def log_to(self, path: Path) -> None:
        """Use the log of a run for what the driver can't log itself; a Ray that others started has none."""

    @property
    def logs(self) -> str:
        """Return the folder of Ray's logs."""
        return self._logs

    @property
    def silence_s(self) -> float:
        """Return the longest silence of a daemon that is asked; 0 if none is."""
        return self._silence_s

    def stop_watching(self) -> None:
        """Let the daemons end."""
        self._closed.set()
        self._noticed.set()

    def ended(self) -> ClusterError | None:
        """Return the error for a daemon that ended or has been silent for too long; None if all run."""
        for name, address in self._addresses.items():
            silence = time.monotonic() - self._answered[name]
            if silence >= self._silence_s and self._failures[name] >= _LEAST_FAILURES:
                text = f"Ray's {name} at {address} has not answered for {silence:.0f} s"
                return ClusterError(f"{text} (placement.ray_timeout_s={self._silence_s:g})", self._logs)
        return None

    def raise_if_ended(self) -> None:
        """Raise if a needed daemon ended.

        Raises:
            ClusterError: names the daemon, how it ended, and the folder of Ray's logs.
        """
        error = self.ended()
        if error is not None:
            self._noticed.set()
            raise error

    def is_stuck(self) -> bool:
        """Return whether a daemon that was asked to end is stopped for too long; poll it every `LOOK_S` seconds."""
        return False

    def kill(self) -> None:
        """Kill the processes of this run, as far as that works without Ray."""
        threads = [threading.Thread(target=kill, daemon=True) for kill in self._killers]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _KILL_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Forget the Ray, from which this process has disconnected."""
        self.stop_watching()

    def look(self) -> float:
        """Poll the daemons once; return the seconds until the next time."""
        for name, address in self._addresses.items():
            if answers(address):
                self._answered[name], self._failures[name] = time.monotonic(), 0
            else:
                self._failures[name] += 1
        return _ASK_S

    def _watch(self) -> None:
        """End a driver that does not notice that a daemon has ended, unless the daemon answers again."""
        since: float | None = None
        while not self._closed.is_set():
            pause, now = self.look(), time.monotonic()
            error = self.ended()
            if error is None:
                since = None
            elif since is None:
                since = now
            elif now - since >= _STUCK_S:
                end_process(error, self.kill)
            if self._noticed.wait(pause):
                return


def end_process(error: Exception, kill: Callable[[], None]) -> None:
    """Record an error, end the run's processes, and end this one, which is stuck in Ray's code."""
    log = current_log()
    if log is None:
        logger.critical("%s", error)
    else:
        log.record_failure(error)
    kill()
    if isinstance(error, UnavailableError):
        exit_now(os.EX_TEMPFAIL)
    exit_now(_WRONG if isinstance(error, ValueError) else _FAILED)


@contextmanager
def ended_at(deadline_s: float, error: Callable[[], Exception], kill: Callable[[], None]) -> Iterator[None]:
    """Call `kill` at the deadline, which should make the block fail; if it doesn't, end the process with `error`."""
    done = threading.Event()

    def wait() -> None:
        if done.wait(deadline_s):
            return
        late = error()
        kill()
        if not done.wait(_STUCK_S):
            end_process(late, kill)

    threading.Thread(target=wait, name="ray-start", daemon=True).start()
    try:
        yield
    finally:
        done.set()


_CURRENT: list[RayWatch] = []


def set_current(watch: RayWatch) -> None:
    """Make this the watch of the Ray that this process uses."""
    _CURRENT.append(watch)


def current() -> RayWatch | None:
    """Return the watch of the Ray that this process uses; None if it has not connected to Ray by `connect`."""
    return _CURRENT[-1] if _CURRENT else None


def ray_ended() -> bool:
    """Return whether the Ray of this process has ended, and so can't end its processes."""
    return bool(_CURRENT) and _CURRENT[-1].ended() is not None


def raise_if_ray_ended() -> None:
    """Raise if a daemon of the Ray that this process uses ended.

    Raises:
        ClusterError: names the daemon.
    """
    if _CURRENT:
        _CURRENT[-1].raise_if_ended()


def close_current() -> None:
    """Wait until all processes of its Ray that this process has started are gone."""
    while _CURRENT:
        _CURRENT.pop().close()

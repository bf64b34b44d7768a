"""Ray's daemons of this run: watched while it runs, and gone after it, whatever happens to the driver."""

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rlpack.distributed import ray_reaper
from rlpack.distributed.errors import ClusterError
from rlpack.distributed.ray_watch import LOOK_S, RayWatch
from rlpack.distributed.run_token import RunToken

logger = logging.getLogger(__name__)

# A run can't continue without these.
NEEDED = frozenset({"raylet", "gcs_server"})
_CLOSE_S = 5.0


class RayDaemons(RayWatch):
    """The daemons of one local Ray, and the script that ends the processes that they leave.

    Attributes:
        token: the token for requests to them.
    """

    def __init__(self, token: RunToken) -> None:
        """Start the script on Linux, where sessions identify the processes of each daemon."""
        super().__init__()
        self.token = token
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._watched: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: Counter[str] = Counter()  # consecutive polls that found it stopped
        self._held: list[socket.socket] = []
        self._reaper: subprocess.Popen[bytes] | None = None
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", ray_reaper.__file__, str(os.getpid()), str(token.folder)]
            self._reaper = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )

    def starting(self, popen: Callable[..., subprocess.Popen[bytes]]) -> Callable[..., subprocess.Popen[bytes]]:
        """Wrap Ray's function that starts a process, so that each process gets a separate session."""

        def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
            process = popen(command, start_new_session=True, **options)
            self._started.append((os.path.basename(command[0]), process))
            self._tell(str(process.pid))
            return process

        return start

    def hold(self, port: socket.socket) -> None:
        """Keep a socket bound until the daemons are closed."""
        self._held.append(port)

    def _tell(self, line: str) -> None:
        """Pass a line to the script."""
        if self._reaper is not None and self._reaper.stdin is not None:
            with suppress(OSError):
                self._reaper.stdin.write(os.fsencode(f"{line}\n"))
                self._reaper.stdin.flush()

    def end_start_after(self, seconds: float, error: Exception) -> None:
        """Have the script end the daemons, and report the error, unless `watch` is called within some seconds."""
        self._tell(f"start_by {seconds} {' '.join(str(error).split())}")

    def watch(self, logs: str, silence_s: float) -> None:
        """Watch the daemons of a Ray that has started, until `stop_watching`.

        Args:
            logs: the folder of their logs, for the error.
            silence_s: how long one may be stopped, as by SIGSTOP.
        """
        self._watched = {name: process for name, process in self._started if name in NEEDED}  # of the last attempt
        self._tell("started")
        self._tell(f"ray_logs {logs}")
        self._silence_s = silence_s
        self.start_watching(logs)
        atexit.register(self.stop_watching)  # before Ray's own handler, which stops the daemons

    def log_to(self, path: Path) -> None:
        """Have the script also append its reports to the run's log."""
        self._tell(f"run_log {path.absolute()}")

    def stop_watching(self) -> None:
        """Stop watching: the daemons may end from now on."""
        self._watched = {}
        super().stop_watching()

    def ended(self) -> ClusterError | None:
        """Return the error for a watched daemon that ended, or has been stopped for too long; None if all run."""
        for name, process in self._watched.items():
            if process.poll() is not None:
                return ClusterError(_how_it_ended(name, process), self._logs)
            if (seconds := self._stopped[name] * LOOK_S) >= self._silence_s:
                text = f"Ray's {name} (process {process.pid}) has been stopped (SIGSTOP) for {seconds:.0f} s"
                return ClusterError(f"{text} (placement.ray_timeout_s={self._silence_s:g})", self._logs)
        return None

    def look(self) -> float:
        """Count for how long daemons have been stopped; return the seconds until the next poll."""
        self._count_stopped(self._watched.items())
        return LOOK_S

    def is_stuck(self) -> bool:
        """Return whether a daemon that was asked to end is stopped for too long; poll it every `LOOK_S` seconds."""
        self._count_stopped(self._started)
        return max(self._stopped.values(), default=0) * LOOK_S >= self._silence_s

    def _count_stopped(self, daemons: Iterable[tuple[str, subprocess.Popen[bytes]]]) -> None:
        for name, process in list(daemons):
            self._stopped[name] = self._stopped[name] + 1 if _is_stopped(process.pid) else 0

    def kill(self) -> None:
        """Kill all daemons."""
        for _, process in self._started:
            process.kill()
        super().kill()

    def close(self) -> None:
        """Wait until no process of the stopped Ray is left; the script kills the rest."""
        self.stop_watching()
        atexit.unregister(self.stop_watching)
        self.token.remove()
        for port in self._held:
            port.close()
        if self._reaper is None or self._reaper.stdin is None:
            return
        with suppress(OSError):
            self._reaper.stdin.close()
        try:
            self._reaper.wait(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            logger.warning("some of Ray's processes have not ended; process %d keeps ending them", self._reaper.pid)


def _how_it_ended(name: str, process: subprocess.Popen[bytes]) -> str:
    code = process.returncode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"Ray's {name} (process {process.pid}) {how}"


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
    return False

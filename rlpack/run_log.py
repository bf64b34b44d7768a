"""`run.log`: what the driver and the ranks of a run log: time, process, level, text, and the tracebacks of failures.

Every process of the driver's node appends whole records to the same file, each with a single write, so records don't
mix. Ranks on another node write `run-<its address>.log`: on network file systems, writers on different machines
overwrite each other's records. What the driver logs before the run directory exists is kept in memory until then. The
console shows less (`rlpack.cli.quiet_console`).
"""

import logging
import os
import socket
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

_FORMAT = "%(asctime)s {} %(levelname)s %(name)s: %(message)s"
_MOST_EARLY_RECORDS = 1000
_PACKAGE = "rlpack"


class RunLog(logging.Handler):
    """A handler of the root logger that appends to the `run.log` of the run in progress.

    Attributes:
        path: the file; None until it is open.
        ray_logs: the folder of Ray's own logs, if a Ray is in use.
        has_steps: whether the run has taken a step: an error after that is not one of configuration or data alone.
    """

    def __init__(self, process: str, on_failure: Callable[[BaseException], None] | None = None) -> None:
        """Name the process that logs.

        Args:
            process: `driver`, or a pool and a rank.
            on_failure: called with each error that ends the run, as soon as it is known.
        """
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT.format(process)))
        self.path: Path | None = None
        self.ray_logs: str | None = None
        self.has_steps = False
        self._on_failure = on_failure
        self._failures: list[BaseException] = []
        self._early: deque[str] = deque(maxlen=_MOST_EARLY_RECORDS)
        self._descriptor: int | None = None

    def open(self, path: Path) -> None:
        """Append to the file from now on, starting with what was logged before.

        Raises:
            OSError: the file can't be written.
        """
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.path = path
        while self._early:
            self._write(self._early.popleft())

    def emit(self, record: logging.LogRecord) -> None:
        """Append a record; a log that can't be written doesn't fail the run."""
        with suppress(Exception):
            self._write(self.format(record) + "\n")

    def record(self, level: str, text: str, name: str = _PACKAGE) -> None:
        """Append a text that doesn't come from a logger."""
        self.handle(logging.makeLogRecord({"name": name, "levelname": level, "msg": "%s", "args": (text,)}))

    def record_failure(self, error: BaseException) -> None:
        """Append the traceback of an error that ends the run, and report the error; later calls do nothing."""
        if any(error is known for known in self._failures):
            return
        self._failures.append(error)
        self.record("ERROR", "".join(traceback.format_exception(error)).rstrip())
        if self._on_failure is not None:
            self._on_failure(error)

    def stop(self) -> None:
        """Close the file."""
        descriptor, self._descriptor, self.path = self._descriptor, None, None
        if descriptor is not None:
            os.close(descriptor)

    def places(self) -> str:
        """Describe where the logs are, for the end of an error message; empty if there are none."""
        named = [f"log: {self.path}"] if self.path is not None and self.path.exists() else []
        named += [] if self.ray_logs is None else [f"Ray's logs: {self.ray_logs}"]
        return "; ".join(named)

    def _write(self, text: str) -> None:
        """Append with a single system call, or keep the text until the file is open."""
        if self._descriptor is None:
            self._early.append(text)
        else:
            os.write(self._descriptor, text.encode("utf-8", "backslashreplace"))


@contextmanager
def attached_log(process: str, on_failure: Callable[[BaseException], None] | None = None) -> Iterator[RunLog]:
    """Collect what this process logs inside the block; the run opens the file."""
    log = RunLog(process, on_failure)
    detach = _attach(log)
    try:
        yield log
    finally:
        detach()
        log.stop()


def log_until_exit(process: str, path: Path) -> None:
    """Append what this process logs to a file, until it ends.

    Raises:
        OSError: the file can't be written.
    """
    log = RunLog(process)
    log.open(path)
    log.record("INFO", f"process {os.getpid()} on {socket.gethostname()}")
    logging.getLogger(_PACKAGE).setLevel(logging.INFO)  # the root logger of a rank passes warnings only
    _attach(log)


def log_of_node(path: Path, address: str) -> Path:
    """Return the log of the ranks on a node other than the driver's.

    >>> log_of_node(Path("run.log"), "10.0.0.2").name, log_of_node(Path("run.log"), "fd00::2").name
    ('run-10.0.0.2.log', 'run-fd00--2.log')
    """
    return path.with_name(f"{path.stem}-{address.replace(':', '-')}{path.suffix}")


def is_log_of_node(path: Path) -> bool:
    """Return whether a file's name has the form that `log_of_node` produces.

    >>> [is_log_of_node(Path(name)) for name in ("run-10.0.0.2.log", "run-fd00--2.log", "run-1.log", "run.log")]
    [True, True, False, False]
    """
    name = path.name
    if not (name.startswith("run-") and name.endswith(".log")):
        return False
    address = name.removeprefix("run-").removesuffix(".log")
    try:
        ip_address(address if "." in address else address.replace("-", ":"))
    except ValueError:
        return False
    return True


def current_log() -> RunLog | None:
    """Return the log that this process writes, None if it writes none."""
    return next((one for one in logging.getLogger().handlers if isinstance(one, RunLog)), None)


def _attach(log: RunLog) -> Callable[[], None]:
    """Also send all records and warnings to the log; return a function that undoes this."""
    root, last_resort, show = logging.getLogger(), logging.lastResort, warnings.showwarning
    # A root logger without handlers prints with this one.
    added = [log] if root.handlers or last_resort is None else [last_resort, log]

    def show_and_record(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any
    ) -> None:
        show(message, category, filename, lineno, *rest)
        log.record("WARNING", f"{filename}:{lineno}: {category.__name__}: {message}", name="py.warnings")

    def detach() -> None:
        if warnings.showwarning is show_and_record:
            warnings.showwarning = show
        for handler in added:
            root.removeHandler(handler)

    for handler in added:
        root.addHandler(handler)
    warnings.showwarning = show_and_record
    return detach

"""Spans: what each process of a run did, and when. `rlpack trace` turns them into a timeline.

    with span("optimizer"):
        ...

`record_values` adds numbers that change over time, such as the requests that an engine runs. Every process appends both
to its own file in the run directory, as JSON lines. Where no file is open, nothing is recorded. Spans of a thread nest.
A span costs a few microseconds, and its line is about 80 bytes. A file that reaches `MOST_BYTES` replaces the process's
older file, so a process keeps its newest spans in at most `2 * MOST_BYTES`.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

# The folder of a run's spans, in its directory.
FOLDER = "spans"
MOST_BYTES = 32 * 2**20
# Spans that a thread keeps before it writes them, while its outermost span is open.
_MOST_KEPT = 1000


class SpanFile:
    """The file that this process appends its spans to."""

    def __init__(self, folder: Path, process: str, most_bytes: int = MOST_BYTES) -> None:
        """Open a new file.

        Args:
            folder: created if missing; the run's directory, in which it is, has to exist. A node that doesn't share
                that directory would otherwise collect files that nobody reads.
            process: `driver`, or pool and rank.
            most_bytes: size at which the file is replaced.

        Raises:
            OSError: the file can't be written.
        """
        folder.mkdir(exist_ok=True)
        name = f"{process.replace('/', '-')}-{socket.gethostname()}-{os.getpid()}-{time.time_ns() // 1_000_000}"
        self.path = folder / f"{name}.jsonl"
        self._head = json.dumps({"process": process, "pid": os.getpid(), "host": socket.gethostname()}) + "\n"
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._open()

    def write(self, spans: list[tuple[str, int, int]]) -> None:
        """Append spans of the calling thread: name, begin in microseconds since the epoch, duration in microseconds.

        A file that can't be written doesn't fail the run.
        """
        thread = threading.current_thread().name
        self._append("".join(json.dumps([name, begin, duration, thread]) + "\n" for name, begin, duration in spans))

    def write_values(self, name: str, begin: int, duration: int, values: Mapping[str, float]) -> None:
        """Append values that held over a period; see `record_values`."""
        self._append(json.dumps([name, begin, duration, values]) + "\n")

    def _append(self, text: str) -> None:
        """Append whole lines; a file that is full replaces the older one."""
        with suppress(OSError), self._lock:
            self._size += os.write(self._descriptor, text.encode())
            if self._size >= self._most_bytes:
                self._close()
                self.path.replace(self.path.with_suffix(".old.jsonl"))
                self._open()

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError), self._lock:
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1  # later writes fail; others may reuse the number
        os.close(descriptor)

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = os.write(self._descriptor, self._head.encode())


class _Thread(threading.local):
    """The spans of one thread that are not written yet, and how deeply the current one is nested."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, int, int]] = []
        self.depth = 0


_thread = _Thread()
_file: SpanFile | None = None


@contextmanager
def span(name: str) -> Iterator[None]:
    """Record the time inside under a name."""
    if _file is None:
        yield
        return
    _thread.depth += 1
    wall, began = time.time_ns(), time.perf_counter_ns()
    try:
        yield
    finally:
        _thread.kept.append((name, wall // 1000, (time.perf_counter_ns() - began) // 1000))
        _thread.depth -= 1
        if _thread.depth == 0 or len(_thread.kept) >= _MOST_KEPT:
            kept, _thread.kept = _thread.kept, []
            if (file := _file) is not None:
                file.write(kept)


def record_values(name: str, begin_us: int, end_us: int, values: Mapping[str, float]) -> None:
    """Record numbers that held over a period.

    Args:
        name: name of the quantities.
        begin_us: start of the period, in microseconds since the epoch.
        end_us: end of the period, likewise.
        values: the numbers by name.
    """
    if (file := _file) is not None:
        file.write_values(name, begin_us, end_us - begin_us, values)


def record_until_exit(folder: Path, process: str) -> None:
    """Record the spans of this process until it ends; if the file can't be opened, warn and continue."""
    global _file
    try:
        _file = SpanFile(folder, process)
    except OSError as error:
        logger.warning("%s records no spans: %s", process, error)


@contextmanager
def recorded_spans(folder: Path, process: str) -> Iterator[None]:
    """Record the spans of this process inside the block; see `record_until_exit`."""
    global _file
    record_until_exit(folder, process)
    try:
        yield
    finally:
        file, _file = _file, None
        if file is not None:
            file.close()

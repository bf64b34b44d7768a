"""The lock of a run directory, so that only one process at a time writes to it.

    <run_dir>/run.lock    says which process holds the directory; that process holds an fcntl lock on the file

Invariants (tests/unit/observe/test_run_lock.py):

1. On one machine, two processes never hold the same directory. Neither do two machines, if their shared storage
   propagates fcntl locks. If it doesn't, a process shows by a heartbeat (the file's modification time) that it is
   alive, and one that finds the directory taken over stops before its next write.
2. A refused process has changed nothing in the directory.
3. A process that is killed leaves only the file, and the next process takes the directory over.

POSIX locks end when the process closes any descriptor of the file. The file is therefore opened once, and read through
that descriptor.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from rlpack.observe.errors import RunDirectoryError, RunTakenOverError
from rlpack.observe.run_dir import LOCK, check_run_dir, way_out
from rlpack.observe.text import visible
from rlpack.safe_files import parse_json

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
# A process on another machine that shows no heartbeat for this long is gone.
WATCH_S = 30.0
# A heartbeat this old needs no watching, whatever the difference between the machines' clocks.
LONG_GONE_S = 3600.0
_POLL_S = 0.5
_MOST_BYTES = 4096
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO}  # of opening a link, a directory, a socket


@dataclass(frozen=True)
class Owner:
    """The process that holds a run directory.

    Attributes:
        host: name of its machine.
        machine: identifies the machine until it restarts.
        pid: its process id.
        process_start: when the process started, in clock ticks since the machine did; distinguishes reused ids.
        since: when it took the directory, UTC.
        nonce: distinguishes the locks that one process takes.
        inode: number of the lock file itself; distinguishes a copy of it. None in records of earlier versions.
    """

    host: str
    machine: str
    pid: int
    process_start: int
    since: str
    nonce: str
    inode: int | None = None

    @classmethod
    def this_process(cls) -> Self:
        """Return the record of the calling process."""
        pid = os.getpid()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(socket.gethostname(), _machine(), pid, _process_start(pid) or 0, since, secrets.token_hex(8))

    @property
    def is_here(self) -> bool:
        """Whether the process is, or was, on this machine."""
        return self.machine == _machine()

    @property
    def is_running(self) -> bool:
        """Whether the process is visible on this machine."""
        return self.is_here and _process_start(self.pid) == self.process_start

    def __str__(self) -> str:
        """Return the owner in words."""
        return visible(f"process {self.pid} on {self.host}, since {self.since}")


class RunLock:
    """A lock that this process holds."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Take over the locked file: write this process into it, and start the heartbeat."""
        self._path = path
        self._descriptor = descriptor
        owner = replace(Owner.this_process(), inode=os.fstat(descriptor).st_ino)
        self._text = json.dumps(asdict(owner)).encode() + b"\n"
        self._released = threading.Event()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self._text, 0)
        os.fsync(descriptor)
        self._heartbeat = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._heartbeat.start()

    def check(self) -> None:
        """Raise if the directory is no longer this process's; called before writes.

        Raises:
            RunTakenOverError: another process has taken it over, or the file was deleted.
        """
        if not self._is_ours():
            raise RunTakenOverError(
                f"run_dir={self._path.parent} was taken over: {self._path.name} is deleted, or names another process; "
                "this run ends without writing to the directory"
            )

    def release(self) -> None:
        """Delete the file, unless it belongs to another process by now, and end the lock."""
        self._released.set()
        self._heartbeat.join(timeout=HEARTBEAT_S)
        if self._is_ours():
            with suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)

    def _is_ours(self) -> bool:
        try:
            return _is_same_file(self._path, self._descriptor) and _read(self._descriptor) == self._text
        except OSError:
            return False

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            try:
                os.utime(self._descriptor)
            except OSError as error:
                logger.debug("no heartbeat for %s: %s", self._path, error)


_held: dict[Path, RunLock] = {}  # the locks of this process


@contextmanager
def lock_run_dir(run_dir: Path, *, key: str = "run_dir") -> Iterator[RunLock]:
    """Hold the lock of a directory inside the block; nested blocks share the lock.

    The directory is created if it is missing, and deleted at the end if it was created here and is empty.

    Args:
        run_dir: the directory.
        key: the configuration key that names it, for messages.

    Raises:
        RunDirectoryError: another process holds the directory, or it can't be created or written.
    """
    run_dir = run_dir.resolve()
    if run_dir in _held:
        yield _held[run_dir]
        return
    missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        lock = _held[run_dir] = _acquire(run_dir, key)
        try:
            yield lock
        finally:
            lock.release()
            del _held[run_dir]
    finally:
        with suppress(OSError):  # the first that isn't empty
            for folder in missing:
                folder.rmdir()


def _acquire(run_dir: Path, key: str) -> RunLock:
    """Create the directory, and take the lock once any earlier owner is known to be gone."""
    path = run_dir / LOCK
    try:
        if not run_dir.is_dir():
            check_run_dir(run_dir, resume=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        while True:
            if (lock := _try(path, key)) is not None:
                return lock
    except OSError as error:
        raise RunDirectoryError(f"{key}={run_dir} can't be written ({error}); {way_out(error, key)}") from error


def _try(path: Path, key: str) -> RunLock | None:
    """Lock the file; None if its owner deleted it between opening and locking it."""
    descriptor = _open(path, key)
    try:
        is_locked = _lock(descriptor, path, key)
        if not _is_same_file(path, descriptor):
            os.close(descriptor)
            return None
        if text := _read(descriptor):
            owner = _parse(text)
            if is_locked and owner is not None and owner.inode not in {None, os.fstat(descriptor).st_ino}:
                logger.warning("%s was copied from another run directory, by which %s is not held", path, path.parent)
            else:
                _await_end(path, owner, is_locked, key)
        return RunLock(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _open(path: Path, key: str) -> int:
    """Open or create the file; writing to what a link leads to would destroy it.

    Raises:
        RunDirectoryError: it is a link, or not a regular file.
    """
    refused = RunDirectoryError(f"{path} is not a regular file, so {key}={path.parent} can't be locked; delete it")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise refused from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    return descriptor


def _lock(descriptor: int, path: Path, key: str) -> bool:
    """Take the fcntl lock; return false if the storage has none.

    Raises:
        RunDirectoryError: another process holds it.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EAGAIN}:
            raise _in_use(path, _parse(_read(descriptor)), key) from error
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s: the storage has no file locks (%s); only the heartbeat tells who is alive", path, error)
        return False


def _await_end(path: Path, owner: Owner | None, is_locked: bool, key: str) -> None:
    """Return once the process that left the file is known to be gone.

    For a process on this machine, the kernel tells; for one on another machine, the heartbeat does.

    Raises:
        RunDirectoryError: it is alive.
    """
    whose = f"{key}={path.parent} was left by {owner or 'another process'}"
    if owner is not None and owner.is_running:
        raise _in_use(path, owner, key)
    if not (is_locked and owner is not None and owner.is_here):
        last = path.stat().st_mtime_ns
        if time.time() - last / 1e9 < LONG_GONE_S:
            logger.warning("%s; watching it for %g s, in case that process is still alive", whose, WATCH_S)
        deadline = time.monotonic() + WATCH_S
        while time.monotonic() < deadline and time.time() - last / 1e9 < LONG_GONE_S:
            if path.stat().st_mtime_ns != last:
                raise _in_use(path, owner, key)
            time.sleep(_POLL_S)
    logger.warning("%s, which has ended without releasing it; taking it over", whose)


def _in_use(path: Path, owner: Owner | None, key: str) -> RunDirectoryError:
    """Return the error for a directory that is in use, with the fix."""
    elsewhere = "" if owner is not None and owner.is_here else f"; if that process is surely gone, delete {path}"
    return RunDirectoryError(
        f"{key}={path.parent} is in use by {owner or 'another process'}; wait until that run ends, stop it, or "
        f"choose another {key}{elsewhere}"
    )


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Return whether the path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, _MOST_BYTES, 0)


def _parse(text: bytes) -> Owner | None:
    """Return the owner, or None if the record is incomplete or has other values than are written."""
    try:
        owner = Owner(**parse_json(text))
    except (ValueError, TypeError):
        return None
    texts, numbers = (owner.host, owner.machine, owner.since, owner.nonce), (owner.pid, owner.process_start)
    is_whole = all(isinstance(value, str) for value in texts) and all(isinstance(value, int) for value in numbers)
    return owner if is_whole else None


def _machine() -> str:
    """Return an identifier of this machine that changes when it restarts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the machine did; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may contain anything
    state, start = fields[0], fields[19]
    return None if state in "ZX" else int(start)

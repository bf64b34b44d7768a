"""Landlock: the files that a process and its descendants can still reach, and which processes they can affect.

A domain can only grant access; it can't deny access to a file in a directory that it grants. To hide a file, everything
else is granted: the other entries of every directory above it, one by one. Entries that are created in these
directories later are therefore out of reach, too. A process in a domain can't read the memory, environment or
descriptors of a process outside it.

https://docs.kernel.org/userspace-api/landlock.html; the numbers are those of linux/landlock.h.
"""

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _MAKE_CHAR, _MAKE_BLOCK = 1 << 1, 1 << 2, 1 << 3, 1 << 6, 1 << 11
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_READS = _READ_FILE | _READ_DIR
# write, remove (2), make (7); refer and truncate were added later
_WRITES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13)) | _REFER | _TRUNCATE
_OF_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

ABI_REFER, ABI_TRUNCATE, ABI_SCOPES = 2, 3, 6

_ROOT, _SHARED_MEMORY = Path("/"), Path("/dev/shm")
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Entries of /proc that programs read, apart from their own process; the rest is other processes and kernel internals.
_PROC = ("cpuinfo", "devices", "filesystems", "loadavg", "meminfo", "stat", "sys", "uptime", "version", "vmstat")


class LandlockError(RuntimeError):
    """The domain can't be entered; the message says why."""


@dataclass(frozen=True)
class Reach:
    """The files that a process keeps access to.

    Attributes:
        scratch: its own directory, which it may always read and write.
        hidden: files and directories that it can't read, existing or not; None leaves reading unrestricted.
        shared_memory: whether it may read and write /dev/shm, where other processes' segments are.
    """

    scratch: Path
    hidden: Sequence[Path] | None
    shared_memory: bool = False


def abi_version() -> int:
    """Return the kernel's Landlock ABI version, 0 for none."""
    if sys.platform != "linux":
        return 0
    return max(0, _libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def restrict(reach: Reach, version: int) -> None:
    """Enter a domain in which only the files of `reach` can be opened.

    From version 6 on, the domain also refuses signals and connections by abstract sockets to processes outside it.

    Raises:
        LandlockError: the kernel refused.
    """
    supported = (_READS | _WRITES) & ~(0 if version >= ABI_REFER else _REFER)
    supported &= ~(0 if version >= ABI_TRUNCATE else _TRUNCATE)
    reads_are_free = reach.hidden is None or _is_restricted()
    handled = supported & ~(_READS if reads_are_free else 0)
    scoped = _SCOPE_SIGNALS | _SCOPE_ABSTRACT_SOCKETS if version >= ABI_SCOPES else 0
    attributes = struct.pack("=QQQ", handled, 0, scoped)
    size = 24 if version >= ABI_SCOPES else 8
    ruleset = _libc().syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    if ruleset < 0:
        raise LandlockError(f"Landlock refused the ruleset: {os.strerror(ctypes.get_errno())}")
    try:
        _Rules(ruleset, handled & ~(_MAKE_CHAR | _MAKE_BLOCK)).allow_all(reach)
        if _libc().syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0)) != 0:
            raise LandlockError(f"Landlock could not be enabled: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(ruleset)


class _Rules:
    """Adds the rules of one ruleset."""

    def __init__(self, ruleset: int, handled: int) -> None:
        """Add rules for the rights `handled` to the ruleset with this descriptor."""
        self._ruleset = ruleset
        self._handled = handled

    def allow_all(self, reach: Reach) -> None:
        """Permit the access that `reach` describes."""
        self.allow(reach.scratch, _READS | _WRITES)
        self.allow(Path(os.devnull), _OF_FILES)
        if reach.shared_memory:
            self.allow(_SHARED_MEMORY, _READS | _WRITES)
        if self._handled & _READS:
            self._allow_around(reach)

    def allow(self, path: Path, rights: int, *, keep_open: bool = False) -> None:
        """Permit `rights` for a path and all below it; do nothing if it is a link or is not there.

        Links are not followed: access through them is decided by where they lead.
        """
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            mode = os.fstat(descriptor).st_mode
            rights &= self._handled if stat.S_ISDIR(mode) else self._handled & _OF_FILES
            if rights and not stat.S_ISLNK(mode):
                rule = struct.pack("=Qi", rights, descriptor)
                arguments = ctypes.c_int(self._ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0)
                if _libc().syscall(_ADD, *arguments) != 0:
                    raise LandlockError(f"Landlock refused the rule for {path}: {os.strerror(ctypes.get_errno())}")
        finally:
            if not keep_open:
                os.close(descriptor)

    def _allow_around(self, reach: Reach) -> None:
        """Permit everything but the hidden paths, devices and other processes."""
        hidden = {_resolved(path) for path in reach.hidden or ()}
        above = {parent for path in hidden for parent in path.parents} | {_ROOT}
        closed = hidden | above | {Path("/dev"), Path("/proc")}
        for folder in above:
            if folder in hidden or any(parent in hidden for parent in folder.parents):
                continue
            with suppress(OSError):
                for name in os.listdir(folder):
                    if (path := folder / name) not in closed:
                        self.allow(path, _READS)
        for path in import_paths():
            if path in above:  # the import system lists its directories
                self.allow(path, _READ_DIR)
            else:  # it, or a directory above it, may be hidden or impossible to list
                self.allow(path, _READS)
        for name in _DEVICES:
            self.allow(Path("/dev") / name, _READS)
        for name in _PROC:
            self.allow(Path("/proc") / name, _READS)
        # The rule is attached to an inode, which the kernel keeps while the directory is open. The rule only permits
        # reading: by writing (oom_score_adj), this process could make the kernel kill others when memory runs out.
        self.allow(Path(f"/proc/{os.getpid()}"), _READS, keep_open=True)


def import_paths() -> Iterable[Path]:
    """Return the directories and archives that Python imports from."""
    return {_resolved(Path(path)) for path in (*sys.path, sys.prefix, sys.base_prefix) if path}


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return path.absolute()


def _is_restricted() -> bool:
    """Whether this process is in a domain that restricts reading, which applies to the new one, too."""
    try:
        os.listdir(_ROOT)
    except PermissionError:
        # If the directory's mode allows reading, Landlock has refused it; otherwise the mode has, and there is no
        # domain.
        return os.access(_ROOT, os.R_OK)
    return False


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

"""The disk usage of a worker: the files in its scratch directory, and those that it has deleted but keeps open.

User code controls the directory, so whatever can't be measured, such as an unreadable directory, is over the limit.
"""

import math
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# Each entry costs the file system an inode, whatever its size.
_ENTRY_BYTES, _BLOCK_BYTES = 4096, 512


def scratch_bytes(folder: Path, pids: Iterable[int], limit: float) -> float:
    """Return the bytes on disk of a directory and of its processes' deleted files; stop counting above `limit`.

    Args:
        folder: the scratch directory.
        pids: processes that may keep deleted files open.
        limit: in bytes; above it, the result may be less than the total.

    Returns:
        Bytes; infinity if a directory can't be read.
    """
    total = float(sum(_deleted_files(pids).values()))
    folders = [str(folder)]
    while folders and total <= limit:
        try:
            entries = os.scandir(folders.pop())
        except FileNotFoundError:
            continue
        except OSError:  # unreadable, or nested too deep
            return math.inf
        with entries:
            for entry in entries:
                total += _size(entry, folders)
                if total > limit:
                    break
    return total


def _size(entry: os.DirEntry[str], folders: list[str]) -> int:
    """Return the bytes of an entry; append it to `folders` if it is a directory."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:  # deleted since it was listed
        return 0
    if stat.S_ISDIR(status.st_mode):
        folders.append(entry.path)
    return _ENTRY_BYTES + _BLOCK_BYTES * status.st_blocks


def _deleted_files(pids: Iterable[int]) -> dict[tuple[int, int], int]:
    """Return the bytes of the open files without a name, by device and inode."""
    sizes = {}
    for path in (path for pid in pids for path in _descriptors(pid)):
        with suppress(OSError):  # closed
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                sizes[status.st_dev, status.st_ino] = _BLOCK_BYTES * status.st_blocks
    return sizes


def _descriptors(pid: int) -> list[str]:
    """Return the paths of a process's descriptors; none once it has exited."""
    try:
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []

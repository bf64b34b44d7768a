"""The disk usage of a worker: the files in its scratch directory, and deleted ones that it keeps open or mapped.

User code controls the directory, so whatever can't be measured, such as an unreadable directory, is over the limit.
"""

import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

# Each entry costs the file system an inode, whatever its size, and time to count.
_ENTRY_BYTES, _BLOCK_BYTES = 16_384, 512


def scratch_bytes(folder: Path, pids: Sequence[int], limit: float, largest_file: int) -> float:
    """Return the bytes on disk of a directory and of its processes' deleted files; stop counting above `limit`.

    Args:
        folder: the scratch directory.
        pids: processes that may keep deleted files open.
        limit: in bytes; above it, the result may be less than the total.
        largest_file: in bytes; a deleted file that is mapped but not open counts as much, since its size is unknown.

    Returns:
        Bytes; infinity if a directory can't be read.
    """
    deleted = _deleted_files(pids)
    mapped = {inode for pid in pids for inode in _mapped_files(pid, folder)} - {inode for _, inode in deleted}
    total = float(sum(deleted.values()) + largest_file * len(mapped))
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


def _deleted_files(pids: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return the bytes of the open files without a name, by device and inode."""
    sizes = {}
    for path in (path for pid in pids for path in _descriptors(pid)):
        with suppress(OSError):  # closed
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                sizes[status.st_dev, status.st_ino] = _BLOCK_BYTES * status.st_blocks
    return sizes


def _mapped_files(pid: int, folder: Path) -> Iterator[int]:
    """Yield the inodes of the files of a directory that a process has deleted and still maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # exited
        return
    for line in lines:
        *_, inode, path = line.split(maxsplit=5) if line.endswith("(deleted)") else ("0", "")
        if path.startswith(f"{folder}/"):
            yield int(inode)


def _descriptors(pid: int) -> list[str]:
    """Return the paths of a process's descriptors; none once it has exited."""
    try:
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []

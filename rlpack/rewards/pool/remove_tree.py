"""Delete a directory that user code filled, even if it is deeply nested or has long or unreadable paths."""

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class _Level:
    """A directory between the top and the current one.

    Attributes:
        identity: device and inode.
        folders: names of its directories that are left.
    """

    identity: tuple[int, int]
    folders: list[str]


def remove_tree(folder: Path) -> None:
    """Delete a directory and everything in it; leave what can't be deleted.

    It walks down and up through descriptors of directories, one at a time. No path gets too long for the kernel,
    and neither recursion nor open descriptors grow with the depth, as they do in `shutil.rmtree`.
    """
    try:
        current = os.open(folder, _OPEN_FOLDER)
    except OSError:
        return
    levels = [_Level(_identity(current), _empty(current))]
    try:
        while True:
            if levels[-1].folders:
                with suppress(OSError):
                    current = _enter(current, levels[-1].folders[-1])
                    levels.append(_Level(_identity(current), _empty(current)))
                    continue
                levels[-1].folders.pop()
                continue
            levels.pop()
            if not levels:
                break
            current = _replace(current, os.open("..", _OPEN_FOLDER, dir_fd=current))
            if _identity(current) != levels[-1].identity:  # somebody moved it
                return
            with suppress(OSError):
                os.rmdir(levels[-1].folders[-1], dir_fd=current)
            levels[-1].folders.pop()
    except OSError:  # the parent directory can't be opened
        return
    finally:
        os.close(current)
    with suppress(OSError):
        folder.rmdir()


def _enter(current: int, name: str) -> int:
    try:
        new = os.open(name, _OPEN_FOLDER, dir_fd=current)
    except PermissionError:
        os.chmod(name, stat.S_IRWXU, dir_fd=current)
        new = os.open(name, _OPEN_FOLDER, dir_fd=current)
    if os.fstat(new).st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.fchmod(new, stat.S_IRWXU)
    return _replace(current, new)


def _replace(current: int, new: int) -> int:
    os.close(current)
    return new


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _empty(folder: int) -> list[str]:
    """Delete the files of a directory, and return the names of its directories."""
    names: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
                continue
            with suppress(OSError):
                os.unlink(entry.name, dir_fd=folder)
    return names

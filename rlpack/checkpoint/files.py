"""Crash-safe file operations: hashes, flushes to disk, and deletion that only warns."""

import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rlpack.safe_files import open_regular
from rlpack.whole_files import flush

logger = logging.getLogger(__name__)

BLOCK = 1 << 20
_MOST_THREADS = 16

T = TypeVar("T")
R = TypeVar("R")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file as a hexadecimal string."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def side_by_side(function: Callable[[T], R], files: Iterable[T]) -> Iterator[R]:
    """Yield a function's result for each file, in order; several threads compute them.

    Hashing a block releases the GIL. Half of the cores are left to the ranks, which may be training.
    """
    threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(threads, thread_name_prefix="files") as pool:
        yield from pool.map(function, files)


def flush_tree(folder: Path) -> None:
    """Wait until a directory and everything in it is on disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush(Path(parent) / name)
        flush(Path(parent))


def regular_files(folder: Path) -> list[Path]:
    """Return every file in a directory and its subdirectories, sorted by name.

    Raises:
        OSError: it contains something other than directories and regular files (a link, a socket).
    """
    files: list[Path] = []
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            files.append(path)
        elif not stat.S_ISDIR(mode):
            raise OSError(f"{path} is not a regular file; a checkpoint may contain only regular files and directories")
    return files


def discard_folder(folder: Path) -> None:
    """Delete a directory that is no longer used; a failure only warns."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("could not delete %s (%s); it is no longer used and can be deleted by hand", folder, error)

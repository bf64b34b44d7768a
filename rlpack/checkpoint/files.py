"""File operations that a crash can't tear: hashes, flushes to the disk and replacement by rename."""

import hashlib
import logging
import os
import shutil
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

BLOCK = 1 << 20


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Wait until every file and directory below `folder`, and `folder` itself, is on the disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush(Path(parent) / name)
        flush(Path(parent))


def write_flushed(path: Path, text: str) -> None:
    """Write a text file, and wait until it and its directory's entry are on the disk."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    flush(path.parent)


def regular_files(folder: Path) -> list[Path]:
    """Return every file below `folder`, by name.

    Raises:
        OSError: something there is neither a directory nor a plain file (a link, a socket).
    """
    found: list[Path] = []
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            found.append(path)
        elif not stat.S_ISDIR(mode):
            raise OSError(f"{path} is not a plain file; a checkpoint holds plain files and directories only")
    return found


def remove_tree(folder: Path) -> None:
    """Delete a directory; a failure only warns, since nothing depends on its absence."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("could not delete %s (%s); it is not used any more and can be deleted by hand", folder, error)

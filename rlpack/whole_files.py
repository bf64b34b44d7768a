"""Write text files that a crash or a full disk leaves either old or new, never cut short or empty."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Write or replace a UTF-8 text file, given whole or in parts, and wait until it is on disk.

    It is written as `.<name>`, which a crash may leave and the next call overwrites, and then renamed.

    Raises:
        OSError: it can't be written; an earlier file is unchanged.
    """
    staging = path.with_name(f".{path.name}")
    try:
        with staging.open("w", encoding="utf-8") as stream:
            stream.writelines([text] if isinstance(text, str) else text)
            stream.flush()
            os.fsync(stream.fileno())
        staging.replace(path)
    except OSError:
        with suppress(OSError):
            staging.unlink()
        raise
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

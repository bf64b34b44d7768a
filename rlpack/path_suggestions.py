"""Suggest the intended path for one that doesn't exist, or say what is at a path of the wrong kind."""

import difflib
import os
from pathlib import Path

DATA_FILES = (".jsonl", ".parquet")


def suggest_path(path: Path, *, folders_only: bool = False) -> str:
    """Return a "did you mean" for the closest name of a data file or a folder in the same folder, or "".

    If the path exists, return what is there instead.

    Args:
        path: a path that doesn't exist, or is not the kind of file that is needed.
        folders_only: suggest no files.
    """
    if os.path.lexists(path):
        return f"; {path} is {kind_of(path)}"
    try:
        entries = list(path.parent.iterdir())
        names = [entry.name for entry in entries if entry.is_dir() or _is_data_file(entry) > folders_only]
    except OSError:
        return ""
    closest = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(closest[0])}?" if closest else ""


def _is_data_file(path: Path) -> bool:
    return path.suffix in DATA_FILES


def kind_of(path: Path) -> str:
    """Describe what is at a path.

    >>> kind_of(Path("/")), kind_of(Path("/dev/null"))
    ('a folder', 'no regular file')
    """
    if path.is_dir():
        return "a folder"
    if not path.exists():
        return "a link that leads nowhere"
    return "a file" if path.is_file() else "no regular file"

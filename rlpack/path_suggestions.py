"""Suggest the path that was meant instead of one that doesn't exist."""

import difflib
from pathlib import Path

DATA_FILES = (".jsonl", ".parquet")


def suggest_path(path: Path, *, folders_only: bool = False) -> str:
    """Return a "did you mean" for the closest name of a data file or a folder in the same folder, or "".

    Args:
        path: a path that doesn't exist.
        folders_only: suggest no files.
    """
    try:
        entries = list(path.parent.iterdir())
        names = [entry.name for entry in entries if entry.is_dir() or _is_data_file(entry) > folders_only]
    except OSError:
        return ""
    closest = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(closest[0])}?" if closest else ""


def _is_data_file(path: Path) -> bool:
    return path.suffix in DATA_FILES

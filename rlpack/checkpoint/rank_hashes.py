"""SHA-256 of files, computed by the ranks that wrote them, so that no process reads a whole model to publish it.

    <folder>/.hashes-<rank>.json    {"<file>": {"size": bytes, "sha256": digest}}; deleted when the folder is published

The process that publishes the folder hashes only the files that no rank has hashed. If it sees a file of a rank with
another size, or not at all, that is an error: its node sees the folder differently from the rank's node.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from rlpack.checkpoint.files import sha256_of, side_by_side
from rlpack.safe_files import read_object
from rlpack.whole_files import write_whole

_PATTERN = ".hashes-*.json"


def record_hashes(folder: Path, rank: int, files: Iterable[str]) -> None:
    """Hash files that this rank has just written into a folder, for the process that publishes it.

    Args:
        folder: the folder of the files.
        rank: this rank, of those that write into the folder.
        files: their names; without any, nothing is written.

    Raises:
        OSError: a file can't be read, or the hashes can't be written.
    """
    paths = [folder / name for name in files]
    if not paths:
        return
    entries = {
        path.name: {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, side_by_side(sha256_of, paths), strict=True)
    }
    write_whole(folder / _PATTERN.replace("*", str(rank)), json.dumps(entries))


def pop_hashes(root: Path) -> dict[Path, str]:
    """Return the hashes that ranks have recorded in a folder and its subfolders, and delete the records.

    Raises:
        OSError: a record can't be read, or a file is missing or has another size than its rank wrote.
    """
    hashes: dict[Path, str] = {}
    for record in sorted(root.rglob(_PATTERN)):
        try:
            entries = read_object(record)
        except ValueError as error:
            raise OSError(f"the hashes in {record} can't be read: {error}") from error
        for name, entry in entries.items():
            path = record.with_name(name)
            size = path.stat().st_size if path.is_file() else None
            if size != entry["size"]:
                found = "is missing here" if size is None else f"has {size:,} bytes here"
                raise OSError(
                    f"{path} {found}, but its rank wrote {entry['size']:,} bytes; use storage that all nodes share"
                )
            hashes[path] = entry["sha256"]
        record.unlink()
    return hashes

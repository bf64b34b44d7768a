"""Publish a folder under its final name once it is complete, with a marker that reveals later changes."""

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlpack.checkpoint.files import flush_tree, regular_files, sha256_of, side_by_side
from rlpack.checkpoint.rank_hashes import pop_hashes
from rlpack.whole_files import flush, write_whole

MANIFEST, MARKER = "manifest.json", "COMMITTED"


def publish_folder(
    staging: Path,
    target: Path,
    header: Mapping[str, Any],
    *,
    aside: Path,
    check: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """List a folder's files in a manifest, flush everything, rename the folder, and write the marker.

    The marker is the SHA-256 of the manifest.

    Args:
        staging: the complete folder, on the file system of `target`.
        target: its name from now on.
        header: entries of the manifest besides `files`, as JSON values.
        aside: the name that an earlier folder at `target` is moved to. If renaming `staging` fails, it is moved back.
        check: called once the folder is complete; nothing is renamed if it raises.

    Returns:
        The manifest.

    Raises:
        OSError: a file could not be written, or the folder renamed; or a file is not the one that its rank hashed.
    """
    hashes = pop_hashes(staging)
    paths = regular_files(staging)
    digests = side_by_side(lambda path: hashes.get(path) or sha256_of(path), paths)
    files = [
        {"name": path.relative_to(staging).as_posix(), "size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    ]
    manifest = {**header, "files": files}
    text = strict_json(manifest)
    (staging / MANIFEST).write_text(text, encoding="utf-8")
    flush_tree(staging)
    if check is not None:
        check()
    replaces = target.exists()
    if replaces:
        target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        if replaces:
            aside.rename(target)
        raise
    flush(target.parent)
    write_whole(target / MARKER, sha256(text.encode()).hexdigest() + "\n")
    return manifest


def strict_json(value: Mapping[str, Any]) -> str:
    """Return strict JSON; a value that JSON can't represent is a bug in the caller."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"

"""Whether a checkpoint is valid: its marker fits its manifest, and its files fit the manifest's sizes and hashes.

Only JSON is parsed here, and nothing else is opened except to hash it.
"""

import errno
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rlpack import __version__
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.files import sha256_of, side_by_side
from rlpack.checkpoint.publish import MANIFEST, MARKER
from rlpack.safe_files import read_object, read_text

# 2: the state identifies the prompts that the run started with. 3: it has the hashes of the reference's weights, and
# the manifest has the version of rlpack. 4: it may hold a batch that was drawn ahead. 5: it may hold
# several, drawn or not. Adding a field that readers need, to any of the files, requires a new format.
FORMAT = 5
STATE = "state.json"
_VERSION = re.compile(r"[\w.+ -]{1,60}", re.ASCII)
# Errors of a read that tell what is in the folder. All others say nothing about the file: they are those of a device, a
# file server, permissions or this process's limits. Errors without a number are those of `open_regular`.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, None}
# Pause before a read that failed with any other error is repeated, in seconds.
_PAUSE_S = 1.0


def is_marked(folder: Path) -> bool | None:
    """Return whether marker and manifest match, without reading the other files; None if they can't be read now."""
    try:
        return _marker_matches(folder)
    except OSError as error:
        return False if error.errno in _DAMAGE else None


def _marker_matches(folder: Path) -> bool:
    try:
        return read_text(folder / MARKER).strip() == sha256_of(folder / MANIFEST)
    except (FileNotFoundError, ValueError):
        return False


def fault_of(folder: Path, only: str | None = None) -> str | None:
    """Return why a checkpoint is invalid, or None; `only` limits the check to one file.

    Raises:
        CheckpointError: another version of rlpack wrote it, or it can't be read for a reason other than its content, so
            that an older one should not be taken for the newest.
    """
    for is_last in (False, True):
        try:
            return _damage(folder, only)
        except OSError as error:
            if error.errno in _DAMAGE:
                return str(error)
            if is_last:
                raise CheckpointError(
                    f"checkpoint {folder} can't be read: {error}; check the disk and the permissions and try again, or "
                    "rename the folder to resume from the checkpoint before it"
                ) from error
            time.sleep(_PAUSE_S)
    raise AssertionError("the second attempt returns or raises")


def is_file(path: Path) -> bool:
    """Return whether there is a regular file, or a link to one.

    Raises:
        OSError: that can't be told, for example because of an error of the file server. (From Python 3.14 on,
            `Path.is_file` would return False.)
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno in _DAMAGE:
            return False
        raise


def _damage(folder: Path, only: str | None) -> str | None:
    """Return what is wrong with a checkpoint's files; arguments and errors are those of `fault_of`, and OSError."""
    if not is_file(folder / MARKER):
        return f"it was never committed (no {MARKER})"
    if not _marker_matches(folder):
        return f"{MARKER} and {MANIFEST} don't match"
    try:
        manifest = read_object(folder / MANIFEST)
        _check_version(folder, manifest)
        return _manifest_fault(folder, manifest) or _files_fault(folder, manifest, only) or _state_fault(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} can't be read ({error!r})"


def _check_version(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that this version of rlpack can't be sure to read.

    Raises:
        CheckpointError: it has another format, or a newer version of rlpack wrote it.
    """
    written, version = manifest["format"], manifest.get("rlpack") or "an older version"
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        version = f"{version!a:.60}"
    if written != FORMAT or _release(version) > _release(__version__):
        raise CheckpointError(
            f"checkpoint {folder} was written by rlpack {version} in format {written!a:.60}; this is rlpack "
            f"{__version__}, which reads format {FORMAT} of versions up to its own; resume with the version that wrote "
            "it, or choose another run_dir"
        )


def _release(version: str) -> list[int]:
    """Return the first three numbers of a version.

    >>> _release("0.10.1") > _release("0.9.2")
    True
    """
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _manifest_fault(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return why a manifest doesn't belong to this directory, or None."""
    if f"step-{manifest['step']}" != folder.name:
        return f"it contains step {manifest['step']!a:.60}, which doesn't match its name"
    return None


def _files_fault(folder: Path, manifest: Mapping[str, Any], only: str | None) -> str | None:
    """Return what is wrong with the first damaged file, or None."""
    entries = {str(entry["name"]): entry for entry in manifest["files"]}
    if STATE not in entries:
        return f"{STATE} is missing from {MANIFEST}"
    faults = side_by_side(lambda name: _file_fault(folder, name, entries[name]), [only] if only else entries)
    return next((fault for fault in faults if fault), None)


def _state_fault(folder: Path) -> str | None:
    """Return why the state can't be used although its hash matches, or None."""
    try:
        state = read_object(folder / STATE)
    except ValueError as error:
        return f"{STATE} can't be read ({error})"
    step = state.get("step")
    return None if f"step-{step}" == folder.name else f"{STATE} is of step {step!a:.60}, not of this checkpoint"


def _file_fault(folder: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    """Return what is wrong with one file of a checkpoint, or None."""
    parts = PurePosixPath(name)
    path = folder / parts
    if not name.isprintable() or parts.is_absolute() or ".." in parts.parts or path.is_symlink():
        return f"{name!r} is not a regular file inside the checkpoint"
    if not is_file(path):
        return f"{name} is missing"
    if path.stat().st_size != entry["size"]:
        return f"{name} has {path.stat().st_size} bytes instead of {entry['size']}"
    return None if sha256_of(path) == entry["sha256"] else f"{name} has changed since it was written (SHA-256)"

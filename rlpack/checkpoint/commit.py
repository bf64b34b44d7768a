"""The commit protocol: a checkpoint either exists completely or not at all, whenever the process is killed.

    <root>/.tmp-<step>-<nonce>/     ranks write their shards here; state.json and manifest.json come last
        flush files and directories
    <root>/step-<N>/                renamed from the above
    <root>/step-<N>/COMMITTED       SHA-256 of the manifest, flushed; from now on the checkpoint is valid
    <root>/latest                   a hint for humans, replaced by rename; loading ignores it
        prune

Invariants (tests/unit/checkpoint):
1. If a save is killed before any of its file operations, the previous checkpoint can still be loaded.
2. A changed, truncated or missing byte in a listed file, the manifest or the marker invalidates the checkpoint.
3. Everything else is on disk before the marker is.
4. Pruning keeps the two newest committed checkpoints that aren't known to be damaged, and deletes a marker before the
   files.
5. A checkpoint of another format, or of a newer version of rlpack, is refused; it isn't damaged, so no older one is
   loaded in its place.

Only JSON is parsed here. Nothing else in a checkpoint may be opened before `newest` has returned it.
"""

import logging
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rlpack import __version__
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.files import discard_folder, flush, sha256_of, write_flushed
from rlpack.checkpoint.publish import MANIFEST, MARKER, publish_folder, strict_json
from rlpack.safe_files import read_json, read_object, read_text

logger = logging.getLogger(__name__)

# 2: the state identifies the prompts that the run started with. 3: it has the hashes of the reference's weights, and
# the manifest has the version of rlpack. 4: it may hold a batch that was drawn ahead. 5: it may hold
# several, drawn or not. Adding a field that readers need, to any of the files, requires a new format.
FORMAT = 5
STATE, HINT = "state.json", "latest"
DAMAGED = "DAMAGED"  # written into a checkpoint that was skipped, with the reason; pruning doesn't count it
NEVER_PRUNED = 2
_STEP_FOLDER = re.compile(r"step-(0|[1-9]\d*)\Z")
_VERSION = re.compile(r"[\w.+ -]{1,60}", re.ASCII)
_DEBRIS = re.compile(r"\.(tmp|replaced)-")


@dataclass
class Staging:
    """A checkpoint in progress: write to `path`, then call `commit` once.

    Attributes:
        root: directory of all checkpoints of the run.
        step: step of the checkpoint.
        path: staging directory.
        committed: final directory, None before the commit.
    """

    root: Path
    step: int
    path: Path
    committed: Path | None = field(default=None, init=False)

    def commit(self, state: Mapping[str, Any], *, keep: int = NEVER_PRUNED) -> dict[str, Any]:
        """Publish the checkpoint, prune older ones, and return the manifest.

        Args:
            state: the driver's state (progress, configuration, fingerprints of the prompts) as JSON values. `step`,
                `format` and `rlpack`, the version, are added.
            keep: number of committed checkpoints to keep; the two newest are always kept.

        Raises:
            CheckpointError: a file could not be written; earlier checkpoints are untouched.
        """
        assert self.committed is None, "commit is called once"
        try:
            manifest = self._publish(dict(state))
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {self.step} could not be written to {self.root}: {error}"
            ) from error
        prune(self.root, keep)
        return manifest

    def _publish(self, state: dict[str, Any]) -> dict[str, Any]:
        """Write the state, publish the folder, and update the hint."""
        version = {"format": FORMAT, "rlpack": __version__, "step": self.step}
        document = state | version
        (self.path / STATE).write_text(strict_json(document), encoding="utf-8")
        target = self.root / f"step-{self.step}"
        # Only a damaged checkpoint is moved aside; new_checkpoint refuses to replace any other.
        aside = self.root / f".replaced-{self.step}-{secrets.token_hex(4)}"
        manifest = publish_folder(self.path, target, version, aside=aside)
        self.committed = target
        hint = self.root / f".{HINT}"  # a fixed name, so that the next save overwrites what a crash leaves
        write_flushed(hint, target.name + "\n")
        hint.replace(self.root / HINT)
        flush(self.root)
        return manifest


@contextmanager
def new_checkpoint(root: Path, step: int) -> Iterator[Staging]:
    """Yield a staging directory, deleted on exit unless committed.

    Requires as much free space as the newest committed checkpoint takes, since the next one will be about as large.

    Args:
        root: directory of the run's checkpoints, created if missing. Only one run at a time may write there.
        step: number of the step, not negative.

    Raises:
        CheckpointError: too little space, the step is already committed, or the directory can't be written.
    """
    assert step >= 0, f"step {step} is negative"
    if (root / f"step-{step}").exists() and _fault(root / f"step-{step}") is None:
        raise CheckpointError(f"{root / f'step-{step}'} is already a committed checkpoint; it is never overwritten")
    try:
        root.mkdir(parents=True, exist_ok=True)
        free, required = shutil.disk_usage(root).free, _newest_size(root)
        if free < required:
            keeps = " lower checkpoint.keep," if len(list(saved_steps(root))) > 1 else ""
            raise CheckpointError(
                f"a checkpoint of {required:,} bytes, like the previous one, which is kept until this one is complete, "
                f"doesn't fit into {root}: {free:,} bytes are free; free some space,{keeps} or choose another run_dir"
            )
        staging = Staging(root, step, root / f".tmp-{step}-{secrets.token_hex(4)}")
        staging.path.mkdir()
    except OSError as error:
        raise CheckpointError(f"no checkpoint can be written to {root}: {error}") from error
    try:
        yield staging
    finally:
        if staging.committed is None:
            discard_folder(staging.path)


def newest(root: Path) -> Path | None:
    """Return the newest valid checkpoint, or None.

    Newer checkpoints that are damaged or were never committed are skipped, with a warning that says why. The damage is
    recorded in them, so that `prune` doesn't keep damaged checkpoints instead of valid ones.

    Raises:
        CheckpointError: the newest intact one was written by another version of rlpack.
    """
    for step in sorted(saved_steps(root), reverse=True):
        folder = root / f"step-{step}"
        fault = _fault(folder)
        _record_damage(folder, fault)
        if fault is None:
            return folder
        logger.warning("checkpoint %s is skipped: %s; trying the previous one", folder, fault)
    return None


def fault_of(checkpoint: Path) -> str | None:
    """Return why a checkpoint can't be loaded, or None if it is valid.

    Raises:
        CheckpointError: another version of rlpack wrote it.
    """
    return _fault(checkpoint)


def hashes_of(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a valid checkpoint by its relative name, except that of its state."""
    manifest = read_json(checkpoint / MANIFEST)
    return {entry["name"]: entry["sha256"] for entry in manifest["files"] if entry["name"] != STATE}


def newest_damage(root: Path) -> tuple[Path, str] | None:
    """Return the newest committed checkpoint that is damaged, and what is wrong with it; None if there is none."""
    for step in sorted(saved_steps(root), reverse=True):
        folder = root / f"step-{step}"
        if (folder / MARKER).is_file() and (fault := _fault(folder)) is not None:
            return folder, fault
    return None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """Return the state passed to `commit`, with `step`, `format` and `rlpack`.

    Args:
        checkpoint: a directory that `newest` returned.

    Raises:
        CheckpointError: the file doesn't match the manifest, or another version of rlpack wrote it.
    """
    fault = _fault(checkpoint, only=STATE)
    if fault is not None:
        raise CheckpointError(f"checkpoint {checkpoint} can't be loaded: {fault}")
    return read_object(checkpoint / STATE)


def newest_state(root: Path) -> dict[str, Any] | None:
    """Return the state of the newest checkpoint whose state is valid, None if there is none.

    The other files are not verified, because that takes long for a large model. Resuming starts with `newest`, which
    also says why checkpoints are skipped.

    Raises:
        CheckpointError: another version of rlpack wrote it.
    """
    for step in sorted(saved_steps(root), reverse=True):
        folder = root / f"step-{step}"
        if _fault(folder, only=STATE) is None:
            with suppress(OSError):  # pruned in the meantime by the run that holds the directory
                return read_object(folder / STATE)
    return None


def prune(root: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints, and leftovers of crashes.

    Checkpoints that `newest` found damaged don't count, and are deleted once a newer one is committed. At least two of
    the others are kept, even if `keep` is one: if the newest turns out to be damaged, the run can resume from the
    previous one. A deletion that fails only warns.
    """
    steps = sorted(saved_steps(root), reverse=True)
    folders = {step: root / f"step-{step}" for step in steps}
    committed = [step for step, folder in folders.items() if _is_marked(folder) and not (folder / DAMAGED).exists()]
    retained = committed[: max(keep, NEVER_PRUNED)]
    newest_retained = retained[0] if retained else -1
    for step in steps:
        if step not in retained and step < newest_retained:
            _delete(folders[step])
    for path in root.iterdir():
        if _DEBRIS.match(path.name) and path.is_dir():
            discard_folder(path)


def _record_damage(folder: Path, fault: str | None) -> None:
    """Record in a checkpoint what is wrong with it, or remove the record if `fault` is None."""
    try:
        if fault is None:
            (folder / DAMAGED).unlink(missing_ok=True)
        else:
            (folder / DAMAGED).write_text(fault + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("could not record in %s whether it is damaged: %s", folder, error)


def _delete(folder: Path) -> None:
    """Delete a checkpoint, its marker first, so that a partially deleted one never counts as committed."""
    try:
        (folder / MARKER).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("could not delete %s (%s); it can be deleted by hand", folder, error)
        return
    discard_folder(folder)


def saved_steps(root: Path) -> list[int]:
    """Return the steps that have a directory, committed or not."""
    if not root.is_dir():
        return []
    matches = [_STEP_FOLDER.match(path.name) for path in root.iterdir() if path.is_dir()]
    return [int(match.group(1)) for match in matches if match]


def _newest_size(root: Path) -> int:
    """Return the size of the newest committed checkpoint in bytes, 0 without one."""
    committed = [folder for step in saved_steps(root) if _is_marked(folder := root / f"step-{step}")]
    if not committed:
        return 0
    newest_one = max(committed, key=lambda folder: int(folder.name.removeprefix("step-")))
    manifest = read_json(newest_one / MANIFEST)
    return sum(entry["size"] for entry in manifest["files"])


def _is_marked(folder: Path) -> bool:
    """Return whether marker and manifest match, without reading the other files."""
    try:
        return read_text(folder / MARKER).strip() == sha256_of(folder / MANIFEST)
    except (OSError, ValueError):
        return False


def _fault(folder: Path, only: str | None = None) -> str | None:
    """Return why a checkpoint is invalid, or None; `only` limits the check to one file.

    Raises:
        CheckpointError: another version of rlpack wrote it.
    """
    if not (folder / MARKER).is_file():
        return f"it was never committed (no {MARKER})"
    if not _is_marked(folder):
        return f"{MARKER} and {MANIFEST} don't match"
    try:
        manifest = read_object(folder / MANIFEST)
        _check_version(folder, manifest)
        return _manifest_fault(folder, manifest) or _files_fault(folder, manifest, only) or _state_fault(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} can't be read ({error!r})"
    except OSError as error:
        return str(error)


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
    faults = (_file_fault(folder, name, entries[name]) for name in ([only] if only else entries))
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
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != entry["size"]:
        return f"{name} has {path.stat().st_size} bytes instead of {entry['size']}"
    return None if sha256_of(path) == entry["sha256"] else f"{name} has changed since it was written (SHA-256)"

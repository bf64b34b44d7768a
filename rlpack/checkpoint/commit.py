"""The commit protocol: a checkpoint is either whole or not there, whenever the process is killed.

    <root>/.tmp-<step>-<nonce>/     ranks write their shards here; state.json and manifest.json come last
        flush files and directories
    <root>/step-<N>/                by one rename
    <root>/step-<N>/COMMITTED       the manifest's SHA-256, flushed: from here on the checkpoint counts
    <root>/latest                   a hint for people, by rename; loading doesn't trust it
        prune

Invariants (tests/unit/checkpoint):
1. killed before any file operation of a save, the checkpoint before it is still loadable;
2. a changed, cut or missing byte in any listed file, the manifest or the marker makes a checkpoint not loadable;
3. everything is on the disk before the marker is;
4. pruning never takes one of the two newest committed checkpoints that aren't known to be damaged, and takes the marker
   before the files.

Only JSON is parsed here, and nothing else of a checkpoint may be opened before `newest` returned it.
"""

import json
import logging
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.files import flush, flush_tree, regular_files, remove_tree, sha256_of, write_flushed

logger = logging.getLogger(__name__)

FORMAT = 2  # since 2 the state knows the prompts that the run began with
STATE, MANIFEST, MARKER, HINT = "state.json", "manifest.json", "COMMITTED", "latest"
DAMAGED = "DAMAGED"  # beside the marker of a checkpoint that was passed over, and why: it doesn't count as kept
NEVER_PRUNED = 2
_STEP_FOLDER = re.compile(r"step-(0|[1-9]\d*)\Z")
_DEBRIS = re.compile(r"\.(tmp|replaced)-")


@dataclass
class Staging:
    """A checkpoint that is being written: fill `path`, then call `commit` once.

    Attributes:
        root: directory of all checkpoints of the run.
        step: the step that the checkpoint belongs to.
        path: where files are written until the commit.
    """

    root: Path
    step: int
    path: Path
    committed: Path | None = field(default=None, init=False)

    def commit(self, state: Mapping[str, Any], *, keep: int = NEVER_PRUNED) -> dict[str, Any]:
        """Make what was written the newest checkpoint, prune older ones and return the manifest.

        Args:
            state: what the driver needs to go on (policy version, position in the prompts, seed, ...): JSON values.
                `step` and `format` are added.
            keep: how many committed checkpoints stay; the two newest stay in any case.

        Raises:
            CheckpointError: a file could not be written, as on a full disk; earlier checkpoints are untouched.
        """
        assert self.committed is None, "commit is called once"
        try:
            manifest = self._publish(dict(state))
        except OSError as error:
            raise CheckpointError(
                f"checkpoint of step {self.step} could not be written below {self.root}: {error}"
            ) from error
        prune(self.root, keep)
        return manifest

    def _publish(self, state: dict[str, Any]) -> dict[str, Any]:
        """Write state and manifest, flush, rename, mark."""
        document = state | {"format": FORMAT, "step": self.step}
        (self.path / STATE).write_text(_json(document), encoding="utf-8")
        files = [
            {"name": path.relative_to(self.path).as_posix(), "size": path.stat().st_size, "sha256": sha256_of(path)}
            for path in regular_files(self.path)
        ]
        manifest = {"format": FORMAT, "step": self.step, "files": files}
        text = _json(manifest)
        (self.path / MANIFEST).write_text(text, encoding="utf-8")
        flush_tree(self.path)
        target = self.root / f"step-{self.step}"
        if target.exists():  # damaged, or new_checkpoint would have refused
            target.rename(self.root / f".replaced-{self.step}-{secrets.token_hex(4)}")
        self.path.rename(target)
        flush(self.root)
        write_flushed(target / MARKER, sha256(text.encode()).hexdigest() + "\n")
        self.committed = target
        hint = self.root / f".{HINT}"  # one name, so that a crash can't leave more than the next save overwrites
        write_flushed(hint, target.name + "\n")
        hint.replace(self.root / HINT)
        flush(self.root)
        return manifest


@contextmanager
def new_checkpoint(root: Path, step: int) -> Iterator[Staging]:
    """Yield a staging directory for the checkpoint of `step`; what is not committed is deleted on the way out.

    As much space has to be free as the newest committed checkpoint takes, because the next one will hardly be smaller.

    Args:
        root: directory of the run's checkpoints; made when missing. One run at a time writes there.
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
            raise CheckpointError(
                f"a checkpoint of {required:,} bytes, as the one before, doesn't fit below {root}: {free:,} bytes are "
                "free; free some space, lower checkpoint.keep, or choose another run_dir"
            )
        staging = Staging(root, step, root / f".tmp-{step}-{secrets.token_hex(4)}")
        staging.path.mkdir()
    except OSError as error:
        raise CheckpointError(f"no checkpoint can be written below {root}: {error}") from error
    try:
        yield staging
    finally:
        if staging.committed is None:
            remove_tree(staging.path)


def newest(root: Path) -> Path | None:
    """Return the newest checkpoint that is whole, or None when there is none.

    A newer one that is damaged or was never committed is passed over with a warning that says what is wrong; the damage
    is noted, so that `prune` doesn't keep it in the place of a whole one.
    """
    for step in sorted(_steps(root), reverse=True):
        folder = root / f"step-{step}"
        fault = _fault(folder)
        _note_damage(folder, fault)
        if fault is None:
            return folder
        logger.warning("checkpoint %s is passed over: %s; the one before it is tried", folder, fault)
    return None


def newest_damage(root: Path) -> tuple[Path, str] | None:
    """Return the newest checkpoint that was committed and can't be trusted any more, and why; None if there is none."""
    for step in sorted(_steps(root), reverse=True):
        folder = root / f"step-{step}"
        if (folder / MARKER).is_file() and (fault := _fault(folder)) is not None:
            return folder, fault
    return None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """Return the state that was given to `commit`, with `step` and `format`.

    Args:
        checkpoint: a directory that `newest` returned.

    Raises:
        CheckpointError: the file isn't the one in the manifest, or of a format that this version can't read.
    """
    fault = _fault(checkpoint, only=STATE)
    if fault is not None:
        raise CheckpointError(f"checkpoint {checkpoint} can't be loaded: {fault}")
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def prune(root: Path, keep: int) -> None:
    """Delete all but the `keep` newest committed checkpoints, and what crashed saves left behind.

    One that `newest` found damaged doesn't count, and goes when a newer one is committed. The two newest others stay
    even if `keep` is one: should the newest turn out damaged, the run goes on from the one before.
    A delete that fails only warns.
    """
    steps = sorted(_steps(root), reverse=True)
    folders = {step: root / f"step-{step}" for step in steps}
    committed = [step for step, folder in folders.items() if _is_marked(folder) and not (folder / DAMAGED).exists()]
    kept = committed[: max(keep, NEVER_PRUNED)]
    newest_kept = kept[0] if kept else -1
    for step in steps:
        if step not in kept and step < newest_kept:
            _delete(folders[step])
    for path in root.iterdir():
        if _DEBRIS.match(path.name) and path.is_dir():
            remove_tree(path)


def _note_damage(folder: Path, fault: str | None) -> None:
    """Write down beside a checkpoint's files what is wrong with them, or that nothing is any more."""
    try:
        if fault is None:
            (folder / DAMAGED).unlink(missing_ok=True)
        else:
            (folder / DAMAGED).write_text(fault + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("could not note in %s whether it is damaged: %s", folder, error)


def _delete(folder: Path) -> None:
    """Delete a checkpoint, its marker first, so that half a directory never counts as committed."""
    try:
        (folder / MARKER).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("could not delete %s (%s); it can be deleted by hand", folder, error)
        return
    remove_tree(folder)


def _steps(root: Path) -> list[int]:
    """Return the steps that have a directory, committed or not."""
    if not root.is_dir():
        return []
    matches = [_STEP_FOLDER.match(path.name) for path in root.iterdir() if path.is_dir()]
    return [int(match.group(1)) for match in matches if match]


def _newest_size(root: Path) -> int:
    """Return the bytes of the files of the newest committed checkpoint, 0 when there is none."""
    committed = [folder for step in _steps(root) if _is_marked(folder := root / f"step-{step}")]
    if not committed:
        return 0
    newest_one = max(committed, key=lambda folder: int(folder.name.removeprefix("step-")))
    manifest = json.loads((newest_one / MANIFEST).read_text(encoding="utf-8"))
    return sum(entry["size"] for entry in manifest["files"])


def _is_marked(folder: Path) -> bool:
    """Return whether marker and manifest agree, without reading the files."""
    try:
        return (folder / MARKER).read_text(encoding="utf-8").strip() == sha256_of(folder / MANIFEST)
    except (OSError, UnicodeDecodeError):
        return False


def _fault(folder: Path, only: str | None = None) -> str | None:
    """Return why a checkpoint can't be trusted, or None; `only` limits the check of files to one name."""
    if not (folder / MARKER).is_file():
        return f"it was never committed (no {MARKER})"
    if not _is_marked(folder):
        return f"{MARKER} and {MANIFEST} disagree"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return _manifest_fault(folder, manifest) or _files_fault(folder, manifest, only)
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} can't be read ({error!r})"
    except OSError as error:
        return str(error)


def _manifest_fault(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return why a manifest isn't one that this version loads for this directory, or None."""
    if manifest["format"] != FORMAT:
        return f"its format is {manifest['format']!r}; this version reads {FORMAT}"
    if f"step-{manifest['step']}" != folder.name:
        return f"it holds step {manifest['step']}, not that of its name"
    return None


def _files_fault(folder: Path, manifest: Mapping[str, Any], only: str | None) -> str | None:
    """Return what is wrong with the first file that isn't as it was written, or None."""
    entries = {str(entry["name"]): entry for entry in manifest["files"]}
    if STATE not in entries:
        return f"{STATE} is missing from {MANIFEST}"
    faults = (_file_fault(folder, name, entries[name]) for name in ([only] if only else entries))
    return next((fault for fault in faults if fault), None)


def _file_fault(folder: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    """Return what is wrong with one file of a checkpoint, or None."""
    parts = PurePosixPath(name)
    path = folder / parts
    if parts.is_absolute() or ".." in parts.parts or path.is_symlink():
        return f"{name!r} is not a plain file inside the checkpoint"
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != entry["size"]:
        return f"{name} has {path.stat().st_size} bytes, {entry['size']} were written"
    return None if sha256_of(path) == entry["sha256"] else f"{name} has changed since it was written (SHA-256)"


def _json(value: Mapping[str, Any]) -> str:
    """Return strict JSON; a value that JSON can't hold is a bug of the caller and raises."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"

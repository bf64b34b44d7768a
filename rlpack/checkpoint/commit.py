"""The commit protocol: a checkpoint either exists completely or not at all, whenever the process is killed.

    <root>/.tmp-<step>-<nonce>/     ranks write their shards here; state.json and manifest.json come last
        flush files and directories
    <root>/step-<N>/                renamed from the above
    <root>/step-<N>/.COMMITTED      SHA-256 of the manifest, flushed
    <root>/step-<N>/COMMITTED       renamed from the above; from now on the checkpoint is valid
    <root>/latest                   a hint for humans, replaced by rename; loading ignores it
        prune

Invariants (tests/unit/checkpoint):
1. If a save is killed before any of its file operations, the previous checkpoint can still be loaded.
2. A changed, truncated or missing byte in a listed file, the manifest or the marker invalidates the checkpoint.
3. Everything else is on disk before the marker is, and the marker has all of its content or doesn't exist.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpack import __version__
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.files import discard_folder
from rlpack.checkpoint.publish import MANIFEST, MARKER, publish_folder, strict_json
from rlpack.checkpoint.validity import FORMAT, STATE, fault_of, is_file, is_marked
from rlpack.safe_files import read_json, read_object
from rlpack.whole_files import write_whole

logger = logging.getLogger(__name__)

HINT = "latest"
DAMAGED = "DAMAGED"  # written into a checkpoint that was skipped, with the reason; pruning doesn't count it
NEVER_PRUNED = 2
_STEP_FOLDER = re.compile(r"step-(0|[1-9]\d*)\Z")
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

    def commit(
        self, state: Mapping[str, Any], *, keep: int = NEVER_PRUNED, check: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Publish the checkpoint, prune older ones, and return the manifest.

        Args:
            state: the driver's state (progress, configuration, fingerprints of the prompts) as JSON values. `step`,
                `format` and `rlpack`, the version, are added.
            keep: number of committed checkpoints to keep; the two newest are always kept.
            check: raises if another process may write to `root` by now; called before the checkpoint is renamed.

        Raises:
            CheckpointError: a file could not be written; earlier checkpoints are untouched.
        """
        assert self.committed is None, "commit is called once"
        try:
            manifest = self._publish(dict(state), check)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {self.step} could not be written to {self.root}: {error}"
            ) from error
        prune(self.root, keep)
        return manifest

    def _publish(self, state: dict[str, Any], check: Callable[[], None] | None) -> dict[str, Any]:
        """Write the state, publish the folder, and update the hint."""
        version = {"format": FORMAT, "rlpack": __version__, "step": self.step}
        document = state | version
        (self.path / STATE).write_text(strict_json(document), encoding="utf-8")
        target = self.root / f"step-{self.step}"
        # Only a damaged checkpoint is moved aside; new_checkpoint refuses to replace any other.
        aside = self.root / f".replaced-{self.step}-{secrets.token_hex(4)}"
        manifest = publish_folder(self.path, target, version, aside=aside, check=check)
        self.committed = target
        write_whole(self.root / HINT, target.name + "\n")
        return manifest


@contextmanager
def new_checkpoint(root: Path, step: int, *, keep: int | None = None) -> Iterator[Staging]:
    """Yield a staging directory, deleted on exit unless committed.

    Requires as much free space as the newest committed checkpoint takes, since the next one will be about as large.
    Leftovers of crashes are deleted first.

    Args:
        root: directory of the run's checkpoints, created if missing. Only one run at a time may write there.
        step: number of the step, not negative.
        keep: if there is too little space, all but this number of checkpoints are deleted first; None deletes none.

    Raises:
        CheckpointError: too little space, the step is already committed, or the directory can't be written.
    """
    assert step >= 0, f"step {step} is negative"
    if (root / f"step-{step}").exists() and fault_of(root / f"step-{step}") is None:
        raise CheckpointError(f"{root / f'step-{step}'} is already a committed checkpoint; it is never overwritten")
    try:
        root.mkdir(parents=True, exist_ok=True)
        _discard_debris(root)
        required = _newest_size(root)
        if keep is not None and shutil.disk_usage(root).free < required:
            prune(root, keep)
        if (free := shutil.disk_usage(root).free) < required:
            keeps = " lower checkpoint.keep," if sum(map(bool, _states(root).values())) > NEVER_PRUNED else ""
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
        CheckpointError: the newest intact one was written by another version of rlpack, or one can't be read.
    """
    for step in sorted(saved_steps(root), reverse=True):
        folder = root / f"step-{step}"
        fault = fault_of(folder)
        _record_damage(folder, fault)
        if fault is None:
            return folder
        logger.warning("checkpoint %s is skipped: %s; trying the previous one", folder, fault)
    return None


def hashes_of(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a valid checkpoint by its relative name, except that of its state."""
    manifest = read_json(checkpoint / MANIFEST)
    return {entry["name"]: entry["sha256"] for entry in manifest["files"] if entry["name"] != STATE}


def newest_damage(root: Path) -> tuple[Path, str] | None:
    """Return the newest committed checkpoint that is damaged, and what is wrong with it; None if there is none.

    Raises:
        CheckpointError: see `fault_of`.
    """
    for step in sorted(saved_steps(root), reverse=True):
        folder = root / f"step-{step}"
        fault = fault_of(folder)  # first, since it explains why a folder can't be read
        if fault is not None and is_file(folder / MARKER):
            return folder, fault
    return None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """Return the state passed to `commit`, with `step`, `format` and `rlpack`.

    Args:
        checkpoint: a directory that `newest` returned.

    Raises:
        CheckpointError: the file doesn't match the manifest, or another version of rlpack wrote it.
    """
    fault = fault_of(checkpoint, only=STATE)
    if fault is not None:
        raise CheckpointError(f"checkpoint {checkpoint} can't be loaded: {fault}")
    return read_object(checkpoint / STATE)


def newest_state(root: Path) -> dict[str, Any] | None:
    """Return the state of the newest checkpoint whose state is valid, None if there is none.

    The other files are not verified, because that takes long for a large model. Resuming starts with `newest`, which
    also says why checkpoints are skipped.

    Raises:
        CheckpointError: another version of rlpack wrote it, or it can't be read for another reason than damage.
    """
    for step in sorted(saved_steps(root), reverse=True):
        folder = root / f"step-{step}"
        if fault_of(folder, only=STATE) is None:
            with suppress(OSError):  # pruned in the meantime by the run that holds the directory
                return read_object(folder / STATE)
    return None


def prune(root: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints, and leftovers of crashes.

    Checkpoints that `newest` found damaged don't count, and are deleted once a newer one is committed. At least two of
    the others are kept, even if `keep` is one: if the newest turns out to be damaged, the run can resume from the
    previous one. One that can't be read at the moment is neither counted nor deleted. A deletion that fails only warns.
    """
    states = _states(root)
    retained = [step for step, is_intact in states.items() if is_intact][: max(keep, NEVER_PRUNED)]
    newest_retained = retained[0] if retained else -1
    for step, is_intact in states.items():
        if step not in retained and step < newest_retained and is_intact is not None:
            _delete(root / f"step-{step}")
    _discard_debris(root)


def _states(root: Path) -> dict[int, bool | None]:
    """Return by step, the newest first, whether it is committed and not known to be damaged; None as in `is_marked`."""
    folders = {step: root / f"step-{step}" for step in sorted(saved_steps(root), reverse=True)}
    return {step: is_marked(folder) and not (folder / DAMAGED).exists() for step, folder in folders.items()}


def _discard_debris(root: Path) -> None:
    """Delete what a process that was killed during a save has left."""
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
    """Return the steps that have a directory, committed or not.

    Raises:
        CheckpointError: the directory can't be read, so that its checkpoints are unknown.
    """
    try:
        matches = [_STEP_FOLDER.match(path.name) for path in root.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {root} can't be listed: {error}; check the disk and the permissions and try again"
        ) from error
    return [int(match.group(1)) for match in matches if match]


def _newest_size(root: Path) -> int:
    """Return the size of the newest committed checkpoint in bytes, 0 without one."""
    committed = [folder for step in saved_steps(root) if is_marked(folder := root / f"step-{step}")]
    if not committed:
        return 0
    newest_one = max(committed, key=lambda folder: int(folder.name.removeprefix("step-")))
    manifest = read_json(newest_one / MANIFEST)
    return sum(entry["size"] for entry in manifest["files"])

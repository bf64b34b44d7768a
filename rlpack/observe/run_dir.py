"""The run directory: the names of its files, and checks that a run can use it."""

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlpack.config.errors import ConfigError
from rlpack.config.yaml_limits import read_yaml
from rlpack.observe.errors import RunDirectoryError
from rlpack.path_suggestions import kind_of
from rlpack.run_log import is_log_of_node
from rlpack.safe_files import parse_json
from rlpack.spans import FOLDER as SPANS
from rlpack.whole_files import write_whole

logger = logging.getLogger(__name__)

CONFIG, METRICS, SAMPLES, LENGTHS = "config.yaml", "metrics.jsonl", "samples.jsonl", "packing.json"
PICTURE, REPORT, EVENTS, CHECKPOINTS = "packing.png", "report.html", "tensorboard", "checkpoints"
LOCK, LOG, WANDB_ID = "run.lock", "run.log", "wandb-id"
# How the last attempt ended (`rlpack.observe.run_end`); missing while it runs, or if its process was killed.
END = "end.json"
# The trained policy, a Hugging Face folder.
MODEL = "model"
# The folders of checkpoints to resume from; the reference policy is stored in another one.
PHASES = ("sft_warmup", "train")
# Bytes of a file that are hashed at a time.
_BLOCK = 1 << 20
# The kernel limits paths to 4096 bytes; the longest ones below a run directory are those of a checkpoint's files.
_LONGEST_PATH = 3800
# Files that a run reads or writes; the lock is checked separately.
_FILES = (CONFIG, METRICS, SAMPLES, LENGTHS, PICTURE, REPORT, LOG, WANDB_ID, END)
# Files that a run which never started, or Hydra, leaves in a directory without a run.
_HARMLESS = frozenset(
    {f".{CONFIG}", LOCK, LOG, REPORT, EVENTS, "wandb", WANDB_ID, SPANS, ".hydra", "logs", "multirun.yaml"}
)


def holds_run(run_dir: Path) -> bool:
    """Return whether the directory contains a run."""
    return any((run_dir / name).exists() for name in (CONFIG, METRICS, CHECKPOINTS))


def holds_checkpoint(run_dir: Path) -> bool:
    """Return whether the directory contains a committed checkpoint, possibly damaged."""
    return any(any((run_dir / CHECKPOINTS / phase).glob("step-*/COMMITTED")) for phase in PHASES)


def has_started(run_dir: Path) -> bool:
    """Return whether the run has written a record or a checkpoint."""
    metrics = run_dir / METRICS
    return (metrics.exists() and metrics.stat().st_size > 0) or any(
        any((run_dir / CHECKPOINTS / phase).glob("step-*")) for phase in PHASES
    )


def remove_unstarted_run(run_dir: Path) -> None:
    """Delete the files of a run that failed at startup.

    The directory is deleted if it is then empty, so the same command works again once its mistake is fixed. A run that
    has started is left alone.
    """
    if has_started(run_dir):
        return
    try:
        for path in (
            *(run_dir / name for name in (CONFIG, METRICS, SAMPLES, LOG, END)),
            *filter(is_log_of_node, run_dir.iterdir()),
        ):
            path.unlink(missing_ok=True)
        shutil.rmtree(run_dir / SPANS, ignore_errors=True)
        shutil.rmtree(run_dir / CHECKPOINTS, ignore_errors=True)  # a frozen policy, and incomplete saves
        if not any(run_dir.iterdir()):
            run_dir.rmdir()
    except OSError as error:
        logger.warning("the files of the failed run could not be deleted from %s: %s", run_dir, error)


def way_out(error: OSError, key: str = "run_dir") -> str:
    """Return what to do if a run directory can't be written; on a full disk, another one would lose the checkpoints."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "free some space there, and repeat the command" if is_full else f"choose another {key}"


def check_run_dir(run_dir: Path, *, resume: bool) -> None:
    """Check, without creating anything, that a run can use the directory.

    Raises:
        RunDirectoryError: it is a file, can't be written, contains a run without `resume`, or contains unrelated files,
            or one of its files is a folder, a link or a device; or it contains a finished run without checkpoints.
    """
    place = run_dir.absolute()
    if (size := len(os.fsencode(place))) > _LONGEST_PATH:
        raise RunDirectoryError(
            f"run_dir has a path of {size:,} bytes, but the files in it need one of at most {_LONGEST_PATH:,}; choose "
            "another run_dir"
        )
    try:
        exists = run_dir.exists()
        broken = next((path for path in (place, *place.parents) if path.is_symlink() and not path.exists()), None)
    except (OSError, ValueError) as error:  # a name over 255 bytes, a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunDirectoryError(f"run_dir={run_dir} can't be a directory ({reason}); choose another run_dir") from error
    if broken is not None:
        raise RunDirectoryError(
            f"run_dir={run_dir} is behind the link {broken}, which leads nowhere; choose another run_dir"
        )
    if exists and not run_dir.is_dir():
        raise RunDirectoryError(f"run_dir={run_dir} is not a directory; choose another run_dir")
    for name in _FILES:
        path = run_dir / name
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            what = "a link" if path.is_symlink() else kind_of(path)
            raise RunDirectoryError(
                f"run_dir={run_dir}: {name} is {what}, but the run needs a regular file there; remove it, or choose "
                "another run_dir"
            )
    if holds_run(run_dir):
        _check_can_continue(run_dir, resume=resume)
    if unrelated := [] if holds_run(run_dir) else _unrelated_files(run_dir):
        raise RunDirectoryError(
            f"run_dir={run_dir} contains unrelated files ({', '.join(unrelated[:3])}{', …' * (len(unrelated) > 3)}); "
            "choose another run_dir, or a subdirectory"
        )
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise RunDirectoryError(
            f"run_dir={run_dir} can't be written (no permission in {nearest}); choose another run_dir"
        )


def _check_can_continue(run_dir: Path, *, resume: bool) -> None:
    if not resume:
        raise RunDirectoryError(
            f"run_dir={run_dir} already contains a run; continue it with resume=auto, or choose another run_dir"
        )
    if (run_dir / MODEL).exists() and not holds_checkpoint(run_dir):
        raise RunDirectoryError(
            f"run_dir={run_dir} contains a finished run, whose checkpoints are gone, so it can't be continued; restore "
            f"{run_dir / CHECKPOINTS}, or choose another run_dir"
        )


def _unrelated_files(run_dir: Path) -> list[str]:
    """Return the files in a directory that neither a run nor Hydra writes."""
    try:
        return sorted(
            path.name for path in run_dir.iterdir() if path.name not in _HARMLESS and not is_log_of_node(path)
        )
    except OSError:  # it doesn't exist, or can't be read, which has its own error
        return []


def open_run_dir(run_dir: Path, config: Mapping[str, Any], *, resume: bool) -> None:
    """Create the directory and write `config.yaml`.

    Warns about keys that changed since the last start.

    Args:
        run_dir: the directory.
        config: plain values, with secrets hidden.
        resume: allow a directory that contains a run.

    Raises:
        RunDirectoryError: the directory can't be used.
    """
    check_run_dir(run_dir, resume=resume)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        before = read_config(run_dir)
        if has_started(run_dir) and not holds_checkpoint(run_dir):
            logger.warning("%s contains no checkpoint, so the run starts again from the beginning", run_dir)
        (run_dir / END).unlink(missing_ok=True)
        write_whole(run_dir / CONFIG, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise RunDirectoryError(f"run_dir={run_dir} can't be written ({error}); {way_out(error)}") from error
    changed = changed_keys(before, config) if before else []
    if changed:
        old, new = flat(before), flat(config)
        values = (f"{key}={new.get(key)} (was {old.get(key)})" for key in changed)
        logger.warning("resumed with values that changed since the last start: %s", ", ".join(values))


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the stored configuration, empty if it is missing or can't be read."""
    path = run_dir / CONFIG
    try:
        loaded = read_yaml(path) if path.exists() else {}
    except (ConfigError, OSError) as error:
        logger.warning("%s can't be read and is ignored: %s", path, error)
        return {}
    return loaded if isinstance(loaded, dict) else {}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the stored rollouts.

    Lines that can't be read are skipped with a warning.
    """
    if not path.exists():
        return []
    samples: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            sample = parse_json(line)
        except ValueError:
            logger.warning("a line of %s can't be read and is skipped", path)
            continue
        samples += [sample] if isinstance(sample, dict) else []
    return samples


def record_hashes(run_dir: Path) -> dict[str, dict[str, str | int]]:
    """Return `sha256` and `bytes` of the files that a resumed run continues: metrics, samples, id of the W&B run."""
    files = {name: run_dir / name for name in (METRICS, SAMPLES, WANDB_ID) if (run_dir / name).is_file()}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return {name: {"sha256": _hash(path, sizes[name]), "bytes": sizes[name]} for name, path in files.items()}


def check_records(run_dir: Path, hashes: Mapping[str, Any]) -> None:
    """Warn if the records up to a checkpoint, to which later ones are appended, have changed since it was written.

    Args:
        run_dir: the run directory. After the checkpoint's records come at most those of the evaluation after its step.
        hashes: `record_hashes` at the time of the checkpoint; older versions of rlpack wrote SHA-256 of whole files. If
            it has none of a W&B run's id, W&B may have been switched on since. An empty file without a hash is not a
            change: it was first written after the checkpoint, and the resumed run has truncated it.
    """
    known = {name: found if isinstance(found, dict) else {"sha256": found} for name, found in hashes.items()}
    files = {name: run_dir / name for name in (METRICS, SAMPLES, WANDB_ID) if (run_dir / name).is_file()}
    present = {name for name, path in files.items() if name in known or path.stat().st_size > 0}
    same = {
        name
        for name in present & known.keys()
        if _hash(files[name], known[name].get("bytes")) == known[name].get("sha256")
    }
    if has_changed := (present | known.keys()) - same - ({WANDB_ID} - known.keys()):
        logger.warning(
            "%s in %s changed after the checkpoint was written: its records up to the checkpoint are not those of the "
            "run (the training state is intact)",
            *(" and ".join(sorted(has_changed)), run_dir),
        )


def _hash(path: Path, size: int | None) -> str:
    """Return the SHA-256 of a file's first `size` bytes, of all of it if `size` is None."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        left = path.stat().st_size if size is None else size
        while left > 0 and (block := stream.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to dotted keys.

    >>> flat({"seed": 1, "trainer": {"steps": 70}})
    {'seed': 1, 'trainer.steps': 70}
    """
    dotted: dict[str, Any] = {}
    for key, value in config.items():
        dotted |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return dotted


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose values differ, except `resume`.

    >>> changed_keys({"seed": 1, "resume": "never"}, {"seed": 2, "resume": "auto"})
    ['seed']
    """
    old, new = flat(before), flat(after)
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key != "resume")

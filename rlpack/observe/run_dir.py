"""The run directory: what lies where, and whether a run may use it."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlpack.observe.errors import RunDirectoryError

logger = logging.getLogger(__name__)

CONFIG, METRICS, SAMPLES, LENGTHS = "config.yaml", "metrics.jsonl", "samples.jsonl", "packing.json"
PICTURE, REPORT, EVENTS, CHECKPOINTS = "packing.png", "report.html", "tensorboard", "checkpoints"
# What a run that never began, or Hydra, may have left in a directory that holds no run.
_LEFTOVERS = frozenset({REPORT, EVENTS, "wandb", "wandb-id", ".hydra", "logs", "multirun.yaml"})


def holds_run(run_dir: Path) -> bool:
    """Return whether a run has written into `run_dir`."""
    return any((run_dir / name).exists() for name in (CONFIG, METRICS, CHECKPOINTS))


def holds_checkpoint(run_dir: Path) -> bool:
    """Return whether a run has committed a checkpoint in `run_dir`; it may be damaged."""
    return any((run_dir / CHECKPOINTS).glob("*/step-*/COMMITTED"))


def has_begun(run_dir: Path) -> bool:
    """Return whether the run in `run_dir` came to a record or a checkpoint."""
    metrics = run_dir / METRICS
    return (metrics.exists() and metrics.stat().st_size > 0) or any((run_dir / CHECKPOINTS).glob("*/step-*"))


def give_back(run_dir: Path) -> None:
    """Delete what a run wrote at its start, and the directory if nothing else is there, unless the run has begun.

    So the same command works again once its mistake is mended.
    """
    if has_begun(run_dir):
        return
    try:
        for name in (CONFIG, METRICS, SAMPLES):
            (run_dir / name).unlink(missing_ok=True)
        shutil.rmtree(run_dir / CHECKPOINTS, ignore_errors=True)  # a frozen policy, and saves that were cut short
        if not any(run_dir.iterdir()):
            run_dir.rmdir()
    except OSError as error:
        logger.warning("%s can't be cleared of the run that failed at its start: %s", run_dir, error)


def check_run_dir(run_dir: Path, *, resume: bool) -> None:
    """Check, without making anything, that a run may use `run_dir`.

    Raises:
        RunDirectoryError: it is a file, can't be written, holds a run that isn't to be resumed, or files of no run.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise RunDirectoryError(f"run_dir={run_dir} is not a directory; choose another run_dir")
    if not resume and holds_run(run_dir):
        raise RunDirectoryError(
            f"run_dir={run_dir} already holds a run; go on with it by resume=auto, or choose another run_dir"
        )
    if strangers := [] if holds_run(run_dir) else _strangers(run_dir):
        raise RunDirectoryError(
            f"run_dir={run_dir} holds files and no run ({', '.join(strangers[:3])}{', …' * (len(strangers) > 3)}); "
            "choose another run_dir, or one below it"
        )
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise RunDirectoryError(f"run_dir={run_dir} can't be written ({nearest} refuses); choose another run_dir")


def _strangers(run_dir: Path) -> list[str]:
    """Return what lies in a directory and is neither a run's nor Hydra's."""
    try:
        return sorted(path.name for path in run_dir.iterdir() if path.name not in _LEFTOVERS)
    except OSError:  # there is none, or it can't be read, which is said of its own
        return []


def open_run_dir(run_dir: Path, config: Mapping[str, Any], *, resume: bool) -> None:
    """Check and make the directory and write `config.yaml`; a resumed run says which keys differ from before.

    Args:
        run_dir: the directory.
        config: plain values, secrets already hidden.
        resume: whether the directory may hold a run.

    Raises:
        RunDirectoryError: the directory can't be used.
    """
    check_run_dir(run_dir, resume=resume)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        before = read_config(run_dir)
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        (run_dir / CONFIG).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"run_dir={run_dir} can't be written ({error}); choose another run_dir") from error
    changed = changed_keys(before, config) if before else []
    if changed:
        logger.warning("resumed with other values than before of: %s", ", ".join(changed))


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the configuration that the run wrote, empty if there is none that can be read."""
    path = run_dir / CONFIG
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        logger.warning("%s can't be read and is left out: %s", path, error)
        return {}
    return loaded if isinstance(loaded, dict) else {}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the rollouts that were kept; a line that can't be read is left out."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            sample = json.loads(line)
        except ValueError:
            logger.warning("a line of %s can't be read and is left out", path)
            continue
        found += [sample] if isinstance(sample, dict) else []
    return found


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration as dotted keys.

    >>> flat({"seed": 1, "trainer": {"steps": 70}})
    {'seed': 1, 'trainer.steps': 70}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose values differ; `resume` itself, which has to, is left out.

    >>> changed_keys({"seed": 1, "resume": "never"}, {"seed": 2, "resume": "auto"})
    ['seed']
    """
    old, new = flat(before), flat(after)
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key != "resume")

"""The directory of a sweep, which Hydra creates before it composes the jobs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepDir(Callback):
    """A callback of Hydra that records which directories it creates for the sweep that it composes.

    Attributes:
        created: the sweep's directory and those of its parents that didn't exist, from the inside out; empty if the
            sweep's directory did, or without a sweep.
    """

    created: ClassVar[list[Path]] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Record the directories before Hydra creates them; an error of a job doesn't name them."""
        folder = Path(config.hydra.sweep.dir).absolute()
        SweepDir.created = [path for path in (folder, *folder.parents) if not path.exists()]


# Hydra's override that adds the callback.
RECORD_DIR = f"+hydra.callbacks.rlpack._target_={__name__}.{SweepDir.__name__}"
_OF_HYDRA = "multirun.yaml"


@contextmanager
def removed_if_refused() -> Iterator[None]:
    """Remove what Hydra creates for a sweep that is refused inside the block: empty directories, and one file."""
    SweepDir.created = []
    try:
        yield
    except BaseException:
        if SweepDir.created:
            with suppress(OSError):  # for example, they were never created, or hold something else
                _remove(SweepDir.created)
        raise


def remove_if_unused(run_dirs: Iterable[str | None]) -> None:
    """Remove what Hydra created for a sweep whose jobs all have other run directories."""
    if not SweepDir.created:
        return
    sweep = SweepDir.created[0]
    if not any(Path(run_dir or ".").absolute().is_relative_to(sweep) for run_dir in run_dirs):
        with suppress(OSError):
            _remove(SweepDir.created)


def _remove(created: list[Path]) -> None:
    """Remove a sweep's directory with nothing but Hydra's file and empty jobs, and the parents created for it.

    Raises:
        OSError: one can't be removed, because it isn't empty, for example.
    """
    sweep = created[0]
    jobs = [path for path in sweep.iterdir() if path.name != _OF_HYDRA]
    for job in jobs:
        job.rmdir()
    (sweep / _OF_HYDRA).unlink(missing_ok=True)
    for folder in created:
        folder.rmdir()

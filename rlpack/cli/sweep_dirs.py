"""The directory of a sweep, which Hydra creates before it composes the jobs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepDir(Callback):
    """A callback of Hydra that records the directory of the sweep that it composes.

    Attributes:
        latest: the directory; None without a sweep.
    """

    latest: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Record the directory before Hydra creates it; an error of a job doesn't name it."""
        SweepDir.latest = Path(config.hydra.sweep.dir).absolute()


# Hydra's override that adds the callback.
RECORD_DIR = f"+hydra.callbacks.rlpack._target_={__name__}.{SweepDir.__name__}"
_OF_HYDRA = "multirun.yaml"


@contextmanager
def removed_if_refused() -> Iterator[None]:
    """Remove the directory of a sweep that is refused inside the block, unless it holds more than Hydra creates."""
    SweepDir.latest = None
    try:
        yield
    except BaseException:
        if SweepDir.latest is not None:
            with suppress(OSError):  # for example, it was never created
                _remove(SweepDir.latest)
        raise


def _remove(folder: Path) -> None:
    """Remove a directory with nothing but Hydra's file and empty folders, and empty parents in the working directory.

    Raises:
        OSError: it can't be read or removed, or a parent isn't empty.
    """
    here = Path.cwd()
    if here.is_relative_to(folder) or not all(map(_is_unused, folder.iterdir())):
        return
    shutil.rmtree(folder)
    for parent in folder.parents:
        if parent == here or not parent.is_relative_to(here):
            return
        parent.rmdir()


def _is_unused(path: Path) -> bool:
    return path.name == _OF_HYDRA or (path.is_dir() and not any(path.iterdir()))

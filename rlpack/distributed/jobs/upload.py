"""The upload of a working directory, checked before it is packed, because Ray rejects it only afterwards.

Ray puts the folder that it unpacks first on the import path of every process of a job, its own included. The user's
files go into a folder inside of it (`JOB_FILES`), which the job's driver and ranks append to their import path.
"""

import heapq
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory

from ray._private.runtime_env import packaging

import rlpack
from rlpack.config.errors import ConfigError
from rlpack.config.sections.submission import JOB_FILES
from rlpack.distributed.ray_internals import upload_excludes

# Run folders and caches of tools; Ray itself excludes .git, .venv, venv and __pycache__.
_EXCLUDES = (
    "/runs",
    "/multirun",
    "/outputs",
    "/wandb",
    "*.egg-info",
    ".pytest_cache",
    ".ruff_cache",
    ".mypy_cache",
    ".hypothesis",
    ".ipynb_checkpoints",
)
# Ray packs without compression: each file takes its size and two headers with its name.
_HEADERS = 30 + 46 + 2 * 20
_MIB = 2**20
_PACKAGE = Path(rlpack.__file__).parent.resolve()
# A home directory may have millions of files: over the limit, the walk stops after this time.
_WALK_S = 10.0


@dataclass(frozen=True)
class Upload:
    """The files to upload.

    Attributes:
        folder: the working directory, absolute.
        excludes: patterns of the files to leave out, without those of ignore files.
        sizes: bytes of each file, by its path in the folder.
        limit: the most bytes that Ray accepts.
        empty_folders: folders without files, into which a job may write.
    """

    folder: Path
    excludes: tuple[str, ...]
    sizes: dict[Path, int]
    limit: int
    empty_folders: list[Path] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Return the bytes of the packed folder."""
        names = sum(len(str(self._place(path))) for path in self.sizes)
        return sum(self.sizes.values()) + _HEADERS * len(self.sizes) + 2 * names

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """Yield a temporary folder of links to the files, laid out as Ray is to unpack them."""
        with TemporaryDirectory(prefix="rlpack-job-") as name:
            root = Path(name)
            (root / JOB_FILES).mkdir()
            for path in self.sizes:
                link = root / self._place(path)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(self.folder / path)
            for path in self.empty_folders:
                (root / self._place(path)).mkdir(parents=True, exist_ok=True)
            yield root

    def _place(self, path: Path) -> Path:
        """Return where a file is in the unpacked folder: in `JOB_FILES`, unless it belongs to the running rlpack.

        A checkout that is submitted provides rlpack itself, which Ray's processes have to find.
        """
        is_ours = path.parts[0] == _PACKAGE.name and (self.folder / path.parts[0]).resolve() == _PACKAGE
        return path if is_ours else JOB_FILES / path


class _TooLongError(Exception):
    """The folder is over the limit, and walking it takes too long."""


# Older versions of Ray always skip what .gitignore names.
_GITIGNORE = {"include_gitignore": True} if "include_gitignore" in signature(packaging._dir_travel).parameters else {}


def list_upload(folder: Path, excludes: Sequence[str], limit: int = packaging.GCS_STORAGE_MAX_SIZE) -> Upload:
    """List the files of a folder that Ray would upload: all but `excludes`, ignored files, run folders and caches.

    Raises:
        ConfigError: there is no such folder, it can't be read, or it exceeds Ray's limit; names the biggest files.
    """
    if not folder.is_dir():
        raise ConfigError([f"job.working_dir is {str(folder)!r}, which is not a folder; set it to one, or to null"])
    folder = folder.absolute()
    patterns = (*upload_excludes(), *_EXCLUDES, *excludes)
    upload = Upload(folder, patterns, {}, limit)
    began, total, ended = time.monotonic(), 0, True

    def count(path: Path) -> None:
        nonlocal total
        if path.is_dir() and path != folder and not any(path.iterdir()):
            upload.empty_folders.append(path.relative_to(folder))
        if path.is_file():
            if not os.access(path, os.R_OK):
                raise PermissionError(f"no permission to read {path}")
            size = path.stat().st_size
            upload.sizes[path.relative_to(folder)] = size
            total += size
            if total > limit and time.monotonic() - began > _WALK_S:
                raise _TooLongError

    # Ray's own walk, so that exactly the packed files are counted; its log of each file is silenced.
    silent = logging.Logger("upload", level=logging.CRITICAL + 1)
    try:
        packaging._dir_travel(
            folder, [packaging._get_excludes(folder, list(patterns))], count, logger=silent, **_GITIGNORE
        )
    except _TooLongError:
        ended = False
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"job.working_dir is {str(folder)!r}, which can't be read: {error}"]) from error
    if upload.size > limit:
        raise ConfigError([_too_big(upload, whole=ended)])
    return upload


def _too_big(upload: Upload, *, whole: bool) -> str:
    biggest = heapq.nlargest(5, upload.sizes.items(), key=lambda item: item[1])
    listed = ", ".join(f"{path} ({size / _MIB:,.1f} MiB)" for path, size in biggest)
    return (
        f"job.working_dir is {str(upload.folder)!r}, which has {'' if whole else 'more than '}"
        f"{upload.size / _MIB:,.1f} MiB to upload, over Ray's limit of {upload.limit / _MIB:,.0f} MiB; the biggest are "
        f"{listed}; name what the run doesn't need in job.excludes or .gitignore, put data and weights on storage that "
        "the nodes share, or choose another job.working_dir"
    )

"""Checks of a job where it is submitted: its config, and the files that its upload must contain.

Existing models, absolute paths and datasets of the Hub are left to the job, and no reward function is imported.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path

from rlpack.batch.errors import DataError
from rlpack.cli.environment import check_code, targets_of
from rlpack.cli.hydra_flags import DIRECTORY_FLAGS, values_of
from rlpack.cli.sweep_dirs import removed_if_refused
from rlpack.cli.train import compose_jobs
from rlpack.config import evaluation_sets
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Config
from rlpack.distributed.jobs.upload import Upload, list_upload
from rlpack.path_suggestions import DATA_FILES
from rlpack.startup.first_checks import check_new_model, check_uploaded
from rlpack.user_code import UserCode, find_module_file

JOINS = "placement.address=auto"


def checked_config(arguments: Sequence[str]) -> Config:
    """Return the validated config that a job's `rlpack train` would run with.

    Raises:
        ConfigError: an error of `rlpack train`, a sweep, or a relative or missing run_dir.
        ModelError: transformers can't build a new model, or a pattern matches none of its weights.
    """
    with removed_if_refused(), _inside(Path()):  # for the module of a recipe
        jobs = compose_jobs([*arguments, JOINS])
        if len(jobs) != 1 or jobs[0].number is not None:
            problem = "a job is one run: remove Hydra's --multirun, --cfg and --help; submit each run separately"
            raise ConfigError([problem])
    config = jobs[0].config
    problems = list(_run_dir(config))
    for word in arguments:
        if word.lstrip("+").startswith("placement.address=") and word != JOINS:
            problems.append(f"{word}: a job joins the cluster that it runs on; remove placement.address")
    if problems:
        raise ConfigError(problems)
    with chdir(_folder(config)):
        check_code(config, os.environ)
        check_new_model(config)
    return config


def checked_upload(config: Config, arguments: Sequence[str] = ()) -> Upload | None:
    """Return what to upload for a config; None if everything is on the nodes.

    Args:
        config: the job's config.
        arguments: the arguments of its `rlpack train`, which may name folders of presets.

    Raises:
        ConfigError: the folder exceeds Ray's limit, or a module or a folder of presets would not be uploaded.
        DataError: a data file or folder with a relative path would not be uploaded.
        ValueError: another error that `rlpack train` would find in the uploaded files.
    """
    if config.job.working_dir is None:
        return None
    upload = list_upload(_folder(config), config.job.excludes)
    if problems := [*_missing_presets(arguments, upload), *_missing_modules(config, upload)]:
        raise ConfigError(problems)
    if missing := list(_missing_files(config, upload)):
        raise DataError("\n".join(missing))
    with _inside(upload.folder), UserCode("code that the configuration names"):
        check_uploaded(config)
    return upload


def _folder(config: Config) -> Path:
    folder = Path(os.path.expanduser(config.job.working_dir or "."))
    if not folder.is_dir():
        raise ConfigError(
            [f"job.working_dir is {config.job.working_dir!r}, but there is no such folder; set one, or null"]
        )
    return folder


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Make a folder the working directory, whose modules can be found, as the job does."""
    path = list(sys.path)
    sys.path.append(str(folder.absolute()))
    try:
        with chdir(folder):
            yield
    finally:
        sys.path[:] = path


def _run_dir(config: Config) -> Iterator[str]:
    if config.run_dir is None or not Path(config.run_dir).is_absolute():
        yield (
            f"run_dir is {config.run_dir or 'null'}, but a job's working directory is deleted when it "
            "ends; set run_dir to an absolute path on storage that all nodes share"
        )


def _missing_presets(arguments: Sequence[str], upload: Upload) -> Iterator[str]:
    """Yield a problem for each folder of presets with a relative path that would be missing in the job's folder."""
    for value in values_of(arguments, DIRECTORY_FLAGS):
        path = Path(os.path.normpath(value))
        if not path.is_absolute() and not any(file.is_relative_to(path) for file in upload.sizes):
            yield (
                f"the folder of presets {value!r} would not be uploaded with {upload.folder}: "
                f"{_why_missing(path, upload)}; put it there, or give its absolute path on storage that the nodes share"
            )


def _missing_modules(config: Config, upload: Upload) -> Iterator[str]:
    """Yield a problem for each target whose module is in the folder but isn't uploaded."""
    with _inside(upload.folder):
        for key, target in {"recipe.target": config.recipe.target, **targets_of(config)}.items():
            file = find_module_file(target.partition(":")[0])
            if file is not None and _is_left_out(file, upload):
                yield f"{key} is {target!r}, but {file} isn't uploaded: an ignore file or job.excludes matches it"


def _is_left_out(file: Path, upload: Upload) -> bool:
    """Return whether a module is in the folder, but neither uploaded nor part of a virtual environment in it."""
    inside = file.is_relative_to(upload.folder) and "site-packages" not in file.parts
    return inside and file.relative_to(upload.folder) not in upload.sizes


def _missing_files(config: Config, upload: Upload) -> Iterator[str]:
    """Yield a problem for each data file or folder that would be missing in the job's working directory."""
    sources: Mapping[str, str | None] = {
        "data.source": config.data.source,
        "data.validation_source": config.data.validation_source,
        **evaluation_sets.sources(config),
    }
    for key, source in sources.items():
        if source in (None, "arithmetic") or os.path.isabs(os.path.expanduser(source)):
            continue  # generated, or on the nodes
        is_folder = (upload.folder / source).is_dir()
        if not is_folder and not source.endswith(DATA_FILES):
            continue  # on the Hub
        path = Path(os.path.normpath(source))
        if any(file.is_relative_to(path) for file in upload.sizes):
            continue
        kind = "folder" if is_folder else "file"
        yield (
            f"{key} is {source!r}, which would not be uploaded with {upload.folder}: {_why_missing(path, upload)}; put "
            f"it there, or set the absolute path of a {kind} on storage that the nodes share"
        )


def _why_missing(path: Path, upload: Upload) -> str:
    """Return why no file of a relative path is uploaded."""
    if path.parts[:1] == ("..",):
        return "it is outside of that folder"
    place = upload.folder / path
    if place.is_dir():
        return "it is empty, or an ignore file or job.excludes matches its files"
    return "an ignore file or job.excludes matches it" if place.exists() else "it doesn't exist"

"""What a job needs, looked at where it is submitted: the whole config, and what of it the upload has to carry."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from pathlib import Path

from rlpack.batch.errors import DataError
from rlpack.cli.environment import check_code_and_packages, targets_of
from rlpack.cli.train import compose_jobs
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Config
from rlpack.distributed.jobs.upload import Upload, list_upload

JOINS = "placement.address=auto"


def checked_config(arguments: Sequence[str]) -> Config:
    """Return the config that a job's `rlpack train` would run with; it has to stand here as it will there.

    Raises:
        ConfigError: what `rlpack train` would refuse, or what no job can do: a sweep, a relative or missing run_dir.
    """
    jobs = compose_jobs([*arguments, JOINS])
    if len(jobs) != 1 or jobs[0].number is not None:
        raise ConfigError(
            ["a job is one run: leave out Hydra's --multirun, --cfg and --help; submit each run by itself"]
        )
    config = jobs[0].config
    problems = list(_run_dir(config))
    for word in arguments:
        if word.lstrip("+").startswith("placement.address=") and word != JOINS:
            problems.append(f"{word}: a job joins the cluster that it runs on; leave placement.address out")
    if problems:
        raise ConfigError(problems)
    with chdir(_folder(config)):
        check_code_and_packages(config, os.environ)
    return config


def checked_upload(config: Config) -> Upload | None:
    """Return what is uploaded for a config; None when the job finds all it needs on the nodes.

    Raises:
        ConfigError: the folder is over Ray's limit, or a module that lies in it would stay here.
        DataError: a data file named by a relative path would not be where the job looks for it.
    """
    if config.job.working_dir is None:
        return None
    upload = list_upload(_folder(config), config.job.excludes)
    if problems := list(_modules_that_stay(config, upload)):
        raise ConfigError(problems)
    if missing := list(_files_that_stay(config, upload)):
        raise DataError("\n".join(missing))
    return upload


def _folder(config: Config) -> Path:
    folder = Path(config.job.working_dir or ".").expanduser()
    if not folder.is_dir():
        raise ConfigError([f"job.working_dir is {config.job.working_dir!r}, which is no folder here; set one, or null"])
    return folder


def _run_dir(config: Config) -> Iterator[str]:
    if config.run_dir is None or not Path(config.run_dir).is_absolute():
        yield (
            f"run_dir is {config.run_dir or 'null'}, and a job's working directory is deleted with what "
            "it wrote there; set run_dir to an absolute path on storage that all nodes share"
        )


def _modules_that_stay(config: Config, upload: Upload) -> Iterator[str]:
    """Yield a problem for each target whose module lies in the folder, but isn't uploaded."""
    path = list(sys.path)
    sys.path.insert(0, str(upload.folder))
    try:
        for key, target in targets_of(config).items():
            found = importlib.util.find_spec(target.partition(":")[0])
            file = Path(found.origin) if found is not None and found.origin is not None else None
            if file is not None and _stays(file, upload):
                yield f"{key} is {target!r}, and {file} isn't uploaded: an ignore file or job.excludes names it"
    finally:
        sys.path[:] = path


def _stays(file: Path, upload: Upload) -> bool:
    """Whether a module lies in the folder, and is neither uploaded nor part of an environment, which nodes have too."""
    inside = file.is_relative_to(upload.folder) and "site-packages" not in file.parts
    return inside and file.relative_to(upload.folder) not in upload.sizes


def _files_that_stay(config: Config, upload: Upload) -> Iterator[str]:
    """Yield a problem for each data file that is looked for in the job's working directory, and won't be there."""
    sources: Mapping[str, str | None] = {
        "data.source": config.data.source,
        "data.validation_source": config.data.validation_source,
    }
    for key, source in sources.items():
        if source is None or not source.endswith((".jsonl", ".parquet")) or Path(source).expanduser().is_absolute():
            continue  # on the nodes, or no file
        if Path(os.path.normpath(source)) in upload.sizes:
            continue
        reason = "an ignore file or job.excludes names it" if (upload.folder / source).is_file() else "it isn't there"
        yield (
            f"{key} is {source!r}, which would not be uploaded with {upload.folder}: {reason}; put it there, or "
            "name a file on storage that the nodes share by its absolute path"
        )

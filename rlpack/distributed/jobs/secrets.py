"""Secrets by name: each process reads them on its own node, so no value is sent or logged."""

import socket
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from rlpack.config.errors import ConfigError
from rlpack.config.sections.submission import Submission


def missing_secrets(job: Submission, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for each of `job.secret_names` that is missing on this node."""
    for name in job.secret_names:
        if not environment.get(name) and not _value(job, name):
            yield (
                f"job.secret_names holds {name}, which is neither in the environment of this process on "
                f"{socket.gethostname()} nor a readable file {_file(job, name)} (job.secrets_dir) with something "
                "in it; set it there before Ray is started, or mount it"
            )


def load_secrets(job: Submission, environment: MutableMapping[str, str]) -> None:
    """Set environment variables from the files of `job.secret_names`; variables that are set already stay.

    Raises:
        ConfigError: one is neither set nor a file.
    """
    if problems := list(missing_secrets(job, environment)):
        raise ConfigError(problems)
    for name in job.secret_names:
        if not environment.get(name):
            environment[name] = _value(job, name)


def _file(job: Submission, name: str) -> Path:
    return Path(job.secrets_dir) / name


def _value(job: Submission, name: str) -> str:
    """Return the stripped text of a secret's file, empty if it can't be read."""
    try:
        return _file(job, name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""

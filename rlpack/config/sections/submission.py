"""The section of `rlpack submit`, which runs a job on a Ray cluster."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, field_validator

from rlpack.config.redaction import looks_secret
from rlpack.config.sections.section import Count, NonNegative, Section

# Grace period of a stopped job, which Ray reads in the environment of the job's supervisor.
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
# Folder of a job's files in the folder that Ray unpacks and puts first on the import path. The name is not that of a
# module, so no file of the user's replaces one of Ray, of rlpack or of the standard library.
JOB_FILES = "job-files"
# Tells a job's ranks that its files are there.
JOB_FILES_VARIABLE = "RLPACK_JOB_FILES"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = {
    STOP_WAIT: "set job.stop_timeout_s instead",
    JOB_FILES_VARIABLE: "rlpack sets it",
    "PYTHONPATH": "modules are imported from job.working_dir and from installed packages: put yours there",
}
# Last words of variables that hold secrets, such as OPENAI_KEY; keys of a config end in them for other reasons, too.
_SECRET_END = re.compile(r"_(key|pat|pwd)$", re.IGNORECASE)


class Submission(Section):
    """A run as a job on a Ray cluster: `rlpack submit`."""

    working_dir: str | None = Field(
        default=".",
        description="Folder that is uploaded and that the job runs in; null if everything is on the nodes.",
    )
    excludes: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Patterns, as in .gitignore, of files not to upload, besides runs, .git, .venv and .gitignore's.",
    )
    pip: tuple[str, ...] = Field(
        default=(), strict=False, description="Packages that Ray installs on every node for the job."
    )
    env_vars: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of the job. No secrets: Ray's dashboard shows them. Whole numbers may be "
        "unquoted; quotes keep their spelling.",
    )
    secret_names: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Names of secrets that the run needs; they are read on the nodes, never sent.",
    )
    secrets_dir: str = Field(
        default="/run/secrets",
        description="Folder on each node with one file per secret; environment variables come first.",
    )
    driver_cpus: NonNegative = Field(
        default=0.0, description="CPU cores reserved for the driver; 0 runs it on the head node without a reservation."
    )
    stop_timeout_s: Count = Field(
        default=120,
        description="Time for a stopped job to finish its step and save before it is killed, in seconds.",
    )

    @field_validator("env_vars", mode="before")
    @classmethod
    def _whole_numbers_as_text(cls, values: Any) -> Any:
        """Convert whole numbers to text: overrides and YAML read 4 as a number."""
        if not isinstance(values, Mapping):
            return values
        return {name: str(value) if type(value) is int else value for name, value in values.items()}


def submission_problems(job: Submission) -> Iterator[str]:
    """Yield problems of a job: invalid names, and secrets that would be shown.

    >>> list(submission_problems(Submission(env_vars={"HF_TOKEN": "abc"})))[0].partition(",")[0]
    'job.env_vars.HF_TOKEN looks like a secret'
    """
    for key, names in (("job.env_vars", tuple(job.env_vars)), ("job.secret_names", job.secret_names)):
        for name in names:
            if not _NAME.fullmatch(name):
                yield f"{key} holds {name!r}, which is not the name of an environment variable (letters, digits and _)"
            elif name in _RESERVED:
                yield f"{key} holds {name}; {_RESERVED[name]}"
    yield from _shown_secrets(job)
    if repeated := sorted(set(job.env_vars) & set(job.secret_names)):
        yield f"{', '.join(repeated)} is in both job.env_vars and job.secret_names; remove it from one"
    for key, text in (("job.working_dir", job.working_dir), ("job.secrets_dir", job.secrets_dir)):
        if text is not None and not text.strip():
            yield f"{key} is blank; set a folder"


def _shown_secrets(job: Submission) -> Iterator[str]:
    """Yield problems of secrets that Ray would show to everyone with access to the cluster."""
    for name, value in job.env_vars.items():
        is_named = bool(value) and _SECRET_END.search(name) is not None
        if is_named or any(looks_secret(part, value) for part in (name, name.rpartition("_")[2])):
            yield (
                f"job.env_vars.{name} looks like a secret, and Ray shows a job's environment to everyone with access "
                f"to the cluster; remove it and set job.secret_names=[{name}]. If it is not a secret, set it in the "
                "nodes' image"
            )
    for number, requirement in enumerate(job.pip):
        if looks_secret("", requirement):
            yield (
                f"job.pip.{number} is a URL with a password or token, and Ray shows a job's packages to everyone with "
                "access to the cluster; install the package in the nodes' image instead"
            )

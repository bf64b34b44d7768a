"""The section that says how `rlpack submit` runs a job on a Ray cluster."""

import re
from collections.abc import Iterator

from pydantic import Field

from rlpack.config.redaction import looks_secret
from rlpack.config.sections.section import Count, NonNegative, Section

# How long a stopped job has, read by Ray in the environment of the process that watches over the job.
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TAKEN = {
    STOP_WAIT: "set job.stop_timeout_s instead",
    "PYTHONPATH": "modules are looked for in job.working_dir and among installed packages: put yours there",
}


class Submission(Section):
    """A run as a job of a Ray cluster: `rlpack submit`."""

    working_dir: str | None = Field(
        default=".",
        description="Folder that is uploaded and that the job runs in; null uploads none: all is on the nodes.",
    )
    excludes: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Patterns, as in .gitignore, of what stays here, beside runs, .git, .venv and .gitignore's own.",
    )
    pip: tuple[str, ...] = Field(
        default=(), strict=False, description="Packages that Ray installs on every node for the job's processes."
    )
    env_vars: dict[str, str] = Field(
        default_factory=dict, description="Environment of the job's processes. Ray's dashboard shows it: no secrets."
    )
    secret_names: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Names of secrets that every process of the run needs, found where it runs, never sent.",
    )
    secrets_dir: str = Field(
        default="/run/secrets",
        description="Folder on each node with a file a secret, for those not in its environment.",
    )
    driver_cpus: NonNegative = Field(
        default=0.0, description="CPU cores claimed for the driver; 0 runs it on the head node and claims none."
    )
    stop_timeout_s: Count = Field(
        default=120,
        description="Time a stopped job has to finish its step and save, in whole seconds, till it's killed.",
    )


def submission_problems(job: Submission) -> Iterator[str]:
    """Yield what is wrong with a job beyond single values: names that can't be, and secrets that would be shown.

    >>> list(submission_problems(Submission(env_vars={"HF_TOKEN": "abc"})))[0].partition(",")[0]
    'job.env_vars.HF_TOKEN looks like a secret'
    """
    for key, names in (("job.env_vars", tuple(job.env_vars)), ("job.secret_names", job.secret_names)):
        for name in names:
            if not _NAME.fullmatch(name):
                yield f"{key} holds {name!r}, which is no name of an environment variable (letters, digits and _)"
            elif name in _TAKEN:
                yield f"{key} holds {name}; {_TAKEN[name]}"
    for name, value in job.env_vars.items():
        if any(looks_secret(part, value) for part in (name, name.rpartition("_")[2])):
            yield (
                f"job.env_vars.{name} looks like a secret, and Ray shows a job's environment to all who see the "
                f"cluster; leave its value out and set job.secret_names=[{name}]"
            )
    if repeated := sorted(set(job.env_vars) & set(job.secret_names)):
        yield f"{', '.join(repeated)} is in job.env_vars and in job.secret_names; keep it in one of them"
    for key, text in (("job.working_dir", job.working_dir), ("job.secrets_dir", job.secrets_dir)):
        if text is not None and not text.strip():
            yield f"{key} is blank; set a folder"

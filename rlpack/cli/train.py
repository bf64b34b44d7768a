"""`rlpack train`: Hydra composes the jobs, all of them are validated, then they run one after another.

Recipes run outside of Hydra's job runner, because it prints its own words about an exception and ends the process with
its own exit code. So a sweep's last job is known to be valid before its first one starts.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import zip_longest
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from rlpack.cli.environment import check_surroundings
from rlpack.config.compose import CONFIG_NAME, PRESETS, VERSION_BASE, config_errors, plain, register_base
from rlpack.config.errors import ConfigError
from rlpack.config.keys import find, unknown_key_problem
from rlpack.config.recipe_targets import recipe_targets
from rlpack.config.recipes import load_main
from rlpack.config.roles import started_roles
from rlpack.config.schema import Config
from rlpack.config.validate import validate
from rlpack.config.warnings import config_warnings
from rlpack.config.yaml_limits import check_yaml_files
from rlpack.distributed.jobs.secrets import load_secrets
from rlpack.observe.run_dir import holds_checkpoint

log = logging.getLogger(__name__)

RUN_FAILED, CONFIG_WRONG, DATA_WRONG, INTERRUPTED = 1, 2, 3, 130
_OWN_PACKAGES = ("rlpack.",)
_DIRECTORY_FLAGS = {"--config-dir", "-cd", "--config-path", "-cp"}
# Hydra's own options.
_FLAGS = _DIRECTORY_FLAGS | {
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p", "--run", "-r"),
    *("--multirun", "-m", "--shell-completion", "-sc", "--config-name", "-cn", "--experimental-rerun", "--info", "-i"),
}
_PLUGINS = ("hydra/launcher=", "hydra/sweeper=")


@dataclass(frozen=True)
class Job:
    """One run to do: its config, and for one of a sweep its number, Hydra's directory for it and its overrides."""

    config: Config
    number: int | None = None
    sweep_dir: str = ""
    overrides: str = ""


def train(arguments: list[str]) -> int:
    """Compose, validate and run what `arguments` (Hydra's overrides and flags) ask for; return the exit code.

    The first job that fails ends a sweep.
    """
    if os.getcwd() not in sys.path:  # where users keep their own recipes, roles and rewards
        sys.path.append(os.getcwd())
    try:
        jobs = with_run_dirs(compose_jobs(arguments), datetime.now())
        for job in jobs:
            check_surroundings(job.config, os.environ)
            load_secrets(job.config.job, os.environ)
    except ValueError as error:
        return _report_failure(error)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for job in jobs:
        if job.number is not None:
            log.info("job %d of %d (%s), in %s", job.number + 1, len(jobs), job.overrides, job.config.run_dir)
        for warning in config_warnings(job.config):
            log.warning("%s", warning)
        if code := run(job.config):
            return code
    return 0


def run(config: Config) -> int:
    """Run the recipe of a config, its run_dir made absolute, and return the exit code that its end means."""
    try:
        main = _load_while_ray_starts(config)
        main(config.model_copy(update={"run_dir": str(Path(config.run_dir or ".").absolute())}))
    except KeyboardInterrupt:
        saved = config.run_dir is not None and holds_checkpoint(Path(config.run_dir))
        way_on = f"the same command with run_dir={config.run_dir} resume=auto goes on from its last checkpoint"
        _say(f"interrupted; {way_on if saved else 'nothing was saved yet'}")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the edge of the process: every error ends here as a message and a code
        return _report_failure(error)
    finally:
        _stop_ray()
    return 0


def _load_while_ray_starts(config: Config) -> Callable[[Config], None]:
    """Import the recipe while Ray's daemons start on this machine, and return its `main`.

    Both take seconds, and Ray's are mostly spent waiting. No rank runs before the preflight checks pass; if they fail,
    `run` stops the daemons. Without `placement.address=null`, or with more ranks than the checks allow, the cluster is
    left to the recipe.
    """
    from rlpack.distributed.ray_connection import connect, fits_this_machine

    if not fits_this_machine(config.placement):
        return load_main(config.recipe.target)
    modules = [config.roles[name].target.partition(":")[0] for name in started_roles(config)]
    with ThreadPoolExecutor(1, thread_name_prefix="load-recipe") as thread:
        loading = thread.submit(load_main, config.recipe.target)
        connect(config.placement, preload=[name for name in modules if name.startswith(_OWN_PACKAGES)])
        return loading.result()


def _stop_ray() -> None:
    """Stop what `_load_while_ray_starts` started, if the recipe's cluster did not take it over."""
    from rlpack.distributed.ray_connection import disconnect

    disconnect()


def compose_jobs(arguments: list[str]) -> list[Job]:
    """Return the validated jobs of a command line; none when it only asks Hydra to show something.

    Raises:
        ConfigError: a job can't be composed, or is not valid.
    """
    jobs: list[Job] = []
    problems: list[str] = []

    def collect(composed: DictConfig) -> None:
        job, in_sweep = HydraConfig.get().job, HydraConfig.get().mode == RunMode.MULTIRUN
        label = f"job {job.num} ({job.override_dirname}): " if in_sweep else ""
        try:
            config = validate(plain(composed, root))
        except ConfigError as error:  # Hydra would print its own words about it
            problems.extend(label + problem for problem in error.problems)
            return
        sweep_dir = HydraConfig.get().runtime.output_dir
        jobs.append(Job(config, job.num, sweep_dir, job.override_dirname) if in_sweep else Job(config))

    flags, overrides = _split(arguments)
    root = register_base(recipe_targets(overrides, [PRESETS, *_config_dirs(flags)]))
    with config_errors(overrides, root), _hydras_command_line([*flags, *overrides]):
        hydra.main(config_path=str(PRESETS), config_name=CONFIG_NAME, version_base=VERSION_BASE)(collect)()
    if problems:
        raise ConfigError(problems)
    return jobs


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return flags (with their values) and overrides; Hydra's parser wants the overrides side by side.

    Raises:
        ConfigError: a word is neither, a plugin is asked for that rlpack can't run, or a config directory is unsafe.
    """
    flags: list[str] = []
    overrides: list[str] = []
    before = ""
    for word in arguments:
        if word.startswith("-") or (before.startswith("-") and "=" not in word):
            flags.append(word)
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
        else:
            raise ConfigError([f"{word!r} is not an override; write key=value, such as trainer.steps=50"])
        flag, _, value = word.partition("=") if word.startswith("-") else (before, "", word)
        if word.startswith("-") and flag not in _FLAGS:
            raise ConfigError([_no_flag(flag)])
        if flag in _DIRECTORY_FLAGS and value:
            check_yaml_files(Path(value))
        before = word
    for override in overrides:
        if override.startswith(_PLUGINS) and not override.endswith("=basic"):
            raise ConfigError([f"{override} is not supported; the jobs of a sweep run one after another"])
    return flags, overrides


def _config_dirs(flags: Sequence[str]) -> Iterator[Path]:
    """Yield the directories that flags add to Hydra's search path."""
    for flag, following in zip_longest(flags, flags[1:], fillvalue=""):
        name, has_value, value = flag.partition("=")
        if name in _DIRECTORY_FLAGS:
            yield Path(value if has_value else following)


def _no_flag(flag: str) -> str:
    """Return the message for an unknown option, which most likely means a key."""
    key = flag.lstrip("-").replace("-", "_")
    meant = f"write {key}=…" if find(key) is not None else unknown_key_problem(key)
    return f"unknown option {flag}; overrides take no dashes: {meant}"


@contextmanager
def _hydras_command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Hand Hydra its arguments, and have it raise its errors instead of printing them and leaving with code 1."""
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["rlpack", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before[0]
        os.environ.pop("HYDRA_FULL_ERROR")
        if before[1] is not None:
            os.environ["HYDRA_FULL_ERROR"] = before[1]


def with_run_dirs(jobs: Sequence[Job], now: datetime) -> list[Job]:
    """Return the jobs with run_dir set, `~` read as the home directory; the jobs of a sweep never share one.

    In a sweep a null run_dir becomes the directory that Hydra gave the job, and one that several jobs name gets the
    job's number below it.
    """
    named = [job.config.run_dir for job in jobs]
    placed = []
    for job in jobs:
        run_dir = job.config.run_dir
        if run_dir is None:
            run_dir = job.sweep_dir or _fresh_name(now, job.config.recipe.name)
        elif job.number is not None and named.count(run_dir) > 1:
            run_dir = str(Path(run_dir) / str(job.number))
        run_dir = os.path.expanduser(run_dir)
        placed.append(replace(job, config=job.config.model_copy(update={"run_dir": run_dir})))
    return placed


def _fresh_name(now: datetime, recipe: str) -> str:
    """Return runs/<date>-<recipe>, with a number behind it when another run began in the same second."""
    name = base = Path("runs") / f"{now:%Y-%m-%d_%H-%M-%S}-{recipe}"
    count = 1
    while name.exists():
        count += 1
        name = base.with_name(f"{base.name}-{count}")
    return str(name)


def _report_failure(error: Exception) -> int:
    """Say what ended a run and return its exit code; our own errors speak for themselves, others get a traceback."""
    from rlpack.batch.errors import DataError

    ours = any(parent.__module__.startswith(_OWN_PACKAGES) for parent in type(error).__mro__)
    if not ours or os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    else:
        _say(str(error))
    if isinstance(error, DataError):
        return DATA_WRONG
    return CONFIG_WRONG if ours and isinstance(error, ValueError) else RUN_FAILED


def _say(message: str) -> None:
    print(f"rlpack train: {message}", file=sys.stderr)

"""`rlpack train`: compose all jobs with Hydra, validate them, then run one after another.

Recipes run outside Hydra's job runner, which would print its own messages and choose the exit code. All jobs of a
sweep are validated before the first one starts.
"""

import atexit
import gc
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from rlpack.background_call import BackgroundCall
from rlpack.checkpoint.errors import CheckpointError
from rlpack.cli.dry_run import estimate, split_options
from rlpack.cli.environment import check_code, check_environment, run_dir_problems
from rlpack.cli.error_text import print_error
from rlpack.cli.failed_run import CONFIG_WRONG, INTERRUPTED, print_failure, report_failure
from rlpack.cli.fresh_run_dir import Namer, free_name, reserved_names
from rlpack.cli.hydra_flags import NAME_FLAGS, SWEEP_FLAGS, search_path, values_of
from rlpack.cli.quiet_console import hide_progress_bars, log_to_console
from rlpack.cli.split_words import split_words
from rlpack.cli.supervise import begin_attempt, supervise
from rlpack.cli.sweep_dirs import RECORD_DIR, remove_if_unused, removed_if_refused
from rlpack.cli.user_modules import import_from_working_directory
from rlpack.config.compose import CONFIG_NAME, PRESETS, VERSION_BASE, config_errors, groups, plain, register_base
from rlpack.config.errors import ConfigError
from rlpack.config.given_keys import given_key_problems, given_keys
from rlpack.config.hydra_text import as_argument, hydra_text
from rlpack.config.overridden_choices import overridden_choices
from rlpack.config.preset_defaults import Presets
from rlpack.config.preset_files import preset_problems
from rlpack.config.recipe_targets import recipe_targets
from rlpack.config.recipes import load_main
from rlpack.config.roles import started_roles
from rlpack.config.schema import Config
from rlpack.config.validate import validate
from rlpack.config.warnings import config_warnings
from rlpack.distributed.jobs.secrets import load_secrets
from rlpack.observe.errors import StandardOutputClosedError
from rlpack.observe.run_dir import holds_checkpoint
from rlpack.observe.run_lock import lock_run_dir
from rlpack.run_log import attached_log
from rlpack.startup.first_checks import check_first
from rlpack.user_code import UserCode, UserCodeError

log = logging.getLogger(__name__)

_OWN_PACKAGES = ("rlpack.",)


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        config: its configuration.
        given: keys that the command sets.
        number: its place in a sweep; None for a single run.
        sweep_dir: Hydra's directory of this run of a sweep.
        overrides: its own overrides in a sweep.
        overridden: warnings about presets that the command chooses and that its experiment overrides.
        resume_dir: value of `run_dir` with which the same command resumes it, and all runs of its sweep; None if the
            command sets `run_dir` itself, "" if no value does.
    """

    config: Config
    given: frozenset[str] = frozenset()
    number: int | None = None
    sweep_dir: str = ""
    overrides: str = ""
    overridden: tuple[str, ...] = ()
    resume_dir: str | None = None


def train(arguments: list[str]) -> int:
    """Compose, validate and run the jobs of `arguments` (Hydra's overrides and flags); return the exit code.

    With `--dry-run` their memory is estimated instead. The first job that fails ends a sweep.
    """
    with reserved_names() as reserve:
        return _train(arguments, reserve)


def _train(arguments: list[str], reserve: Namer) -> int:
    """Do the work of `train`; `reserve` names the directory of a run that has none."""
    hide_progress_bars()
    is_dry, memory_gb = False, None
    try:
        import_from_working_directory()
        is_dry, memory_gb, arguments = split_options(arguments)
        with removed_if_refused():
            composed = _compose_for_dry_run(arguments) if is_dry else compose_jobs(arguments)
            jobs = with_run_dirs(composed, datetime.now(), free_name if is_dry else reserve)
            remove_if_unused(job.config.run_dir for job in jobs)
            for job in jobs:
                _check(job.config, is_dry=is_dry)
    except (ValueError, CheckpointError, UserCodeError) as error:
        return report_failure(error) if isinstance(error, ValueError) else _refuse(error)
    log_to_console()
    if is_dry:
        return _estimate(jobs, memory_gb)
    if jobs and (config := jobs[0].config).supervise:
        return supervise(arguments, config.run_dir or ".", config.supervise)
    return _run_jobs(jobs)


def _check(config: Config, *, is_dry: bool) -> None:
    """Raise on a mistake that is found before a run starts; a dry run needs no optional packages and secrets.

    Raises:
        ValueError: a mistake in the configuration, the data or this machine.
        CheckpointError: the checkpoint to resume from is damaged.
        UserCodeError: code that the configuration names failed.
    """
    (check_code if is_dry else check_environment)(config, os.environ)
    with UserCode("code that the configuration names"):  # any that isn't guarded with its key
        check_first(config, starts=not is_dry)
    if not is_dry:
        load_secrets(config.job, os.environ)


def _run_jobs(jobs: Sequence[Job]) -> int:
    """Run jobs one after another up to the first that fails, and return its exit code, or 0."""
    for job in jobs:
        if job.number is not None:
            log.info("job %d of %d (%s), in %s", job.number + 1, len(jobs), job.overrides, job.config.run_dir)
        with attached_log("driver", print_failure):
            begin_attempt()
            _warn(job)
            if code := run(job.config, how_to_go_on=partial(how_to_resume, job)):
                return code
    return 0


def _warn(job: Job) -> None:
    """Log what is probably a mistake in a valid configuration."""
    for warning in (*config_warnings(job.config, job.given), *job.overridden):
        log.warning("%s", warning)


def _compose_for_dry_run(arguments: list[str]) -> list[Job]:
    """Compose the jobs of a dry run; Hydra would otherwise create the directories of a sweep."""
    with tempfile.TemporaryDirectory() as folder:
        return compose_jobs([*arguments, f"hydra.sweep.dir={hydra_text(folder)}"])


def _estimate(jobs: Sequence[Job], memory_gb: float | None) -> int:
    """Print the memory of jobs instead of running them, and return the exit code."""
    labels = ["" if job.number is None else f"job {job.number + 1} of {len(jobs)} ({job.overrides})" for job in jobs]
    try:
        for job in jobs:
            _warn(job)
            for problem in run_dir_problems(job.config, os.environ):  # the run may start on another machine
                log.warning("a run from here would be refused: %s", problem)
        return estimate(zip(labels, (job.config for job in jobs), strict=True), memory_gb)
    except Exception as error:  # noqa: BLE001 - every error becomes a message and an exit code, as in a run
        return report_failure(error)


def how_to_resume(job: Job, config: Config) -> str:
    """Describe what an interrupted run has saved, and how to resume it, or the sweep that it belongs to."""
    is_saved = config.run_dir is not None and holds_checkpoint(Path(config.run_dir))
    if not is_saved and (not job.number or job.resume_dir == ""):  # else earlier runs of the sweep are saved
        return "nothing was saved yet"
    if job.resume_dir == "":
        alone = as_argument("run_dir", config.run_dir or "")
        return f"start this run alone, with {alone} resume=auto, to resume from its last checkpoint"
    where = "" if job.resume_dir is None else f"{as_argument('run_dir', job.resume_dir)} "
    of = "its last checkpoint" if job.number is None else "the last checkpoint of each run of the sweep"
    return f"run the same command with {where}resume=auto to resume from {of}"


def run(
    config: Config,
    command: str = "train",
    *,
    how_to_go_on: Callable[[Config], str] | None = None,
    key: str = "run_dir",
) -> int:
    """Run the recipe of a config and return the exit code; the run directory is locked until Ray is stopped.

    Args:
        config: the configuration, with `run_dir` set.
        command: name of the command, for messages.
        how_to_go_on: completes the message of an interrupted command; by default, `how_to_resume` for a single run.
        key: the key of the directory, for messages.
    """
    run_dir = Path(config.run_dir or ".").absolute()
    try:
        with lock_run_dir(run_dir, key=key), UserCode(f"recipe.target {config.recipe.target!r}"):
            _run_locked(config.model_copy(update={"run_dir": str(run_dir)}))
    except KeyboardInterrupt:
        how_to_go_on = how_to_go_on or partial(how_to_resume, Job(config, resume_dir=config.run_dir))
        print_error(command, f"interrupted; {how_to_go_on(config)}")
        return INTERRUPTED
    except StandardOutputClosedError:  # `main` exits as SIGPIPE would
        raise
    except Exception as error:  # noqa: BLE001 - the outermost handler: every error becomes a message and an exit code
        return report_failure(error, command)
    return 0


def _unfreeze_for_triton() -> None:
    """Let Triton's objects be freed at exit, since Triton prints any that are left.

    Without Triton they stay frozen, which makes exiting faster.
    """
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()


def _run_locked(config: Config) -> None:
    """Load the recipe and run it."""
    try:
        main = _load_while_ray_starts(config)
        if not gc.isenabled():  # off since the command began; what was imported by now is never garbage
            gc.freeze()
            gc.enable()
            atexit.register(_unfreeze_for_triton)
        main(config)
    finally:
        _stop_ray()


def _load_while_ray_starts(config: Config) -> Callable[[Config], None]:
    """Import the recipe while Ray's daemons start on this machine, and return its `main`.

    Both take seconds, and Ray's are mostly spent waiting. No rank runs before the preflight checks pass; if they fail,
    `run` stops the daemons. If `placement.address` is set, or there are more ranks than the checks allow, the recipe
    connects to Ray itself.
    """
    from rlpack.distributed.ray_connection import connect, fits_this_machine

    if not fits_this_machine(config.placement):
        return load_main(config.recipe.target)
    modules = [config.roles[name].target.partition(":")[0] for name in started_roles(config)]
    deadline = time.monotonic() + config.placement.start_timeout_s
    loading = BackgroundCall(partial(load_main, config.recipe.target), name="import-recipe")
    try:
        connect(config.placement, preload=[name for name in modules if name.startswith(_OWN_PACKAGES)])
    finally:  # the interpreter can't exit cleanly in the middle of an import
        has_loaded = loading.wait(max(0.0, deadline - time.monotonic()))
    if not has_loaded:
        raise ConfigError(
            [
                f"recipe.target={config.recipe.target} was not imported within placement.start_timeout_s="
                f"{config.placement.start_timeout_s:g} s; do the work in its main function, or raise the limit"
            ]
        )
    return loading.outcome()


def _stop_ray() -> None:
    """Stop the Ray that `_load_while_ray_starts` started, if the recipe's cluster did not take it over."""
    from rlpack.distributed.ray_connection import disconnect

    disconnect()


def compose_jobs(arguments: list[str]) -> list[Job]:
    """Return the validated jobs of a command line; none if Hydra only prints something.

    Raises:
        ConfigError: a job can't be composed, or is invalid.
    """
    jobs: list[Job] = []
    problems: list[str] = []

    def collect(composed: DictConfig) -> None:
        job, in_sweep = HydraConfig.get().job, HydraConfig.get().mode == RunMode.MULTIRUN
        label = f"job {job.num} ({job.override_dirname}): " if in_sweep else ""
        try:
            config = validate(plain(composed, root))
        except ConfigError as error:  # Hydra would print its own message
            problems.extend(label + problem for problem in error.problems)
            return
        sweep_dir = HydraConfig.get().runtime.output_dir
        task = HydraConfig.get().overrides.task
        given = given_keys(task)
        lost = tuple(overridden_choices(task, given, folders, config.model_dump(mode="json")))
        problems.extend(label + problem for problem in given_key_problems(config, given))
        if in_sweep and config.supervise:
            problems.append(f"{label}supervise={config.supervise} is for one run; leave it out of a sweep (--multirun)")
        if in_sweep:  # else Hydra has no number
            jobs.append(Job(config, given, job.num, sweep_dir, job.override_dirname, lost))
        else:
            jobs.append(Job(config, given, overridden=lost))

    flags, overrides = split_words(arguments)
    names = list(values_of(flags, NAME_FLAGS))
    root = register_base(recipe_targets(overrides, search_path(flags), *names[-1:]))
    folders = search_path(flags)
    own = [folder for folder in folders if folder != PRESETS]
    if wrong := preset_problems(overrides, Presets(groups(folders), groups(), own), root):
        raise ConfigError(wrong)
    recorded = [RECORD_DIR] if SWEEP_FLAGS.intersection(flags) else []
    with config_errors(overrides, root, search_path(flags)), _hydras_command_line([*flags, *overrides, *recorded]):
        hydra.main(config_path=str(PRESETS), config_name=CONFIG_NAME, version_base=VERSION_BASE)(collect)()
    if problems:
        raise ConfigError(problems)
    return jobs


@contextmanager
def _hydras_command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Set Hydra's arguments, and make it raise errors instead of printing them and exiting with code 1."""
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


def with_run_dirs(jobs: Sequence[Job], now: datetime, name: Namer = free_name) -> list[Job]:
    """Return the jobs with run_dir set and `~` expanded; the jobs of a sweep never share one.

    In a sweep, a null run_dir becomes the directory that Hydra chose for the job. If several jobs name the same
    run_dir, each gets a folder below it, named after its number. `name` returns the directory of any other run without
    one.
    """
    named = [job.config.run_dir for job in jobs]
    placed = []
    for job in jobs:
        run_dir, in_sweep, resume_dir = job.config.run_dir, job.number is not None, None
        if run_dir is None:
            run_dir = resume_dir = job.sweep_dir or name(now, job.config.recipe.name)
            if in_sweep:  # jobs that name the same run_dir, of which there are several, get folders below it
                is_found = len(jobs) > 1 and Path(run_dir).name == str(job.number)
                resume_dir = str(Path(run_dir).parent) if is_found else ""
        elif in_sweep and named.count(run_dir) > 1:
            run_dir = str(Path(run_dir) / str(job.number))
        elif not in_sweep:
            resume_dir = run_dir
        run_dir = os.path.expanduser(run_dir)
        config = job.config.model_copy(update={"run_dir": run_dir})
        placed.append(replace(job, config=config, resume_dir=resume_dir))
    return placed


def _refuse(error: Exception) -> int:
    """Print the error of a run that can't begin, whatever its class, and return the exit code."""
    print_failure(error)
    return CONFIG_WRONG

"""Open a session: check everything, start the roles, continue from a checkpoint; shut all of it down at the end."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlpack.config.roles import longest_planned_row, started_roles
from rlpack.config.schema import Config
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.errors import RoleError
from rlpack.distributed.start_roles import start_roles
from rlpack.models.flops import sequence_cost
from rlpack.models.text_settings import shape_of
from rlpack.observe.errors import RunTakenOverError
from rlpack.observe.run import Run
from rlpack.observe.run_dir import METRICS, check_records
from rlpack.observe.run_lock import RunLock, lock_run_dir
from rlpack.observe.sinks import ResumePoint, has_record
from rlpack.packing import warm_up_jit
from rlpack.recipes.driver.exports import export_models, store_reference_again
from rlpack.recipes.driver.performance import PerformanceMeter
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.reference_policy import check_reference
from rlpack.recipes.driver.resume import LoadedCheckpoint, check_same_prompts, checkpoint_to_resume
from rlpack.recipes.driver.role_groups import RoleGroups
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.splits import cache_splits, load_sets, load_splits
from rlpack.recipes.preflight.config_checks import check_before_start
from rlpack.spans import FOLDER, recorded_spans
from rlpack.startup.data_epochs import with_steps
from rlpack.startup.model_paths import with_absolute_models
from rlpack.startup.same_run import check_steps


@contextmanager
def open_session(config: Config) -> Iterator[Session]:
    """Start everything a recipe needs, and shut all of it down on exit.

    Data and tokenizer are read, preflight checks run, and a run directory in use is refused before any rank starts.

    Raises:
        RunDirectoryError: another process holds the run directory.
        RoleError: a call failed; it carries the step.
    """
    with lock_run_dir(Path(cast(str, config.run_dir))) as lock, _one_thread(), _open_locked(config, lock) as session:
        yield session


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit this process's PyTorch operations to one thread.

    The driver's tensors are small. While the ranks compute on all cores, an operation on two threads waits for a core:
    `values[mask]` with 8,000 values took 3.7 ms on two busy cores, 0.2 ms on one thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _open_locked(config: Config, lock: RunLock) -> Iterator[Session]:
    """Do the work of `open_session` in a directory that this process holds."""
    directory = Path(cast(str, config.run_dir))
    loaded = checkpoint_to_resume(directory, config)
    progress = loaded.progress_with(config) if loaded else Progress()
    hashes = loaded.state["reference"] if loaded and progress.recipe_started else None
    tokenizer, prompts, held_out = load_splits(config)
    sets = load_sets(config, tokenizer)
    data_epochs, config = config.trainer.data_epochs, with_steps(config, len(prompts))
    if loaded is not None:
        check_steps(loaded.state["progress"], config, data_epochs)
        check_same_prompts(loaded, config, prompts, held_out)
    needs_reference = "reference" in started_roles(config)
    rebuild = check_reference(directory, config, hashes) if hashes is not None and needs_reference else None
    model = check_before_start(config, tokenizer, prompts, held_out, sets)
    threading.Thread(target=warm_up_jit, daemon=True).start()  # while the roles start, which takes longer
    point = None if loaded is None else _resume_point(loaded, config, directory)
    run = Run.start(config, directory, resume_at=point, lock=lock, shape=shape_of(model.config))
    with (
        run,
        recorded_spans(directory / FOLDER, "driver"),
        Cluster(config.placement, config.job, run.log_path, is_interrupted=lambda: run.interrupted) as cluster,
        run.recording_failures(),
    ):
        run.set_ray_logs(cluster.ray_logs)
        if loaded is not None:
            check_records(directory, loaded.state["records"])
        groups = _start_groups(run, cluster, config, tokenizer, model)
        performance = PerformanceMeter.start(config, groups, model)
        train, test, *others = cache_splits(cluster.store, tokenizer, prompts, held_out, *sets.values())
        session = Session(config, run, tokenizer, train, test, groups, cluster.store, progress)
        session.reference_hashes, session.performance = hashes, performance
        session.restarts = cluster.restarts
        session.evaluation_sets = dict(zip(sets, others, strict=True))
        session.stop_if_interrupted()
        if rebuild is not None:
            store_reference_again(session, rebuild)
        if loaded is not None and point is not None:
            session.restore(loaded, evaluation_is_due=point.evaluation_is_due)
        with _ending_checkpoint(session), _naming_step(session):
            yield session
            session.checkpoints.finish()
        session.stop_if_interrupted()
        export_models(session)


def _resume_point(loaded: LoadedCheckpoint, config: Config, directory: Path) -> ResumePoint:
    """Return where a run continues, and whether it begins with the evaluation after the checkpoint's step."""
    progress = loaded.progress
    is_logged = has_record(directory / METRICS, "evaluation", progress.step)
    return ResumePoint(progress.step, progress.phase, loaded.evaluation_is_due(config, is_logged=is_logged))


def _start_groups(
    run: Run, cluster: Cluster, config: Config, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> RoleGroups:
    """Start the roles that the recipe uses; `model` is the policy on the meta device."""
    names, settings = started_roles(config), (with_absolute_models(config, os.environ), tokenizer)
    with _timing_start(run, names):
        return RoleGroups(
            start_roles(cluster, config, names, settings, cost=sequence_cost(model, longest_planned_row(config)))
        )


@contextmanager
def _timing_start(run: Run, names: list[str]) -> Iterator[None]:
    """Print which roles are started, and after how many seconds they are ready."""
    run.note(f"starting the roles {', '.join(names)}")
    began = time.perf_counter()
    yield
    run.note(f"the roles are ready after {time.perf_counter() - began:.1f} s")


@contextmanager
def _naming_step(session: Session) -> Iterator[None]:
    """Add phase and step to the errors of roles; at the end, end the queue."""
    try:
        yield
    except RoleError as error:
        if error.step is None:
            error.phase = session.progress.phase
            error.step = None if session.step is None else session.step.number
        raise
    finally:
        if session.ahead is not None:
            session.ahead.end()
        session.evaluations.end()


@contextmanager
def _ending_checkpoint(session: Session) -> Iterator[None]:
    """End the checkpoint in flight: after an error, commit it if its roles answer.

    After a second Ctrl-C, or if another process has taken over the run directory, delete it.
    """
    try:
        yield
    except RunTakenOverError:
        session.checkpoints.discard()
        raise
    except Exception:
        session.checkpoints.finish_after_error()
        raise
    finally:
        session.checkpoints.abandon()

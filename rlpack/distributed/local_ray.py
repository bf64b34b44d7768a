"""Ray's daemons on this machine, for one run: no dashboard, no autoscaler, and workers that import early.

Ray has no settings for some of this. Its private functions are replaced while it starts, and only then.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import ray
from ray._private import node, services, utils
from ray._private.utils import detect_fate_sharing_support
from ray.job_config import JobConfig

from rlpack.config.schema import Placement
from rlpack.distributed.errors import PlacementError

logger = logging.getLogger(__name__)

_MAX_WORKERS_PER_RANK = 2
_WITHOUT_GC = "rlpack.distributed.imports_without_gc"
_POLL_S = 0.05
_ANSWER_S = 5.0
# Ray's daemons that end a start when they end. On a machine that stalls, the raylet gives up on its agents after 15 s.
_NEEDED = {"raylet", "gcs_server"}
_ATTEMPTS = 3


class _DaemonEndedError(Exception):
    """A daemon ended while Ray started. No RuntimeError, which Ray would take as a node that is not ready yet."""


def start_local_ray(placement: Placement, job_config: JobConfig, preload: Sequence[str]) -> None:
    """Start Ray on this machine and connect to it; start again if one of Ray's daemons ends meanwhile.

    Args:
        placement: the pools. The cluster gets one CPU slot per core, or more if the pools claim more.
        job_config: Ray's settings of this driver.
        preload: modules that the workers import while they wait for a rank to run.

    Raises:
        PlacementError: Ray did not start by `placement.start_timeout_s`, or a daemon ended in every attempt.
    """
    claimed = math.ceil(sum(pool.ranks * pool.cpus_per_rank for pool in placement.pools.values()))
    cores = os.cpu_count() or 1
    if claimed > cores:
        logger.warning("the pools claim %d CPUs, this machine has %d: its ranks will share them", claimed, cores)
    # Ray starts one worker per core at once. Preload modules only if enough of the workers will become ranks.
    preloads = cores <= _MAX_WORKERS_PER_RANK * sum(pool.ranks for pool in placement.pools.values())
    # Ray would kill a rank's reward supervisor before it could kill the reward processes and remove their files.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "false")
    # Ray lowers its workers' priority, by which other programs on this machine would slow a run down.
    os.environ.setdefault("RAY_worker_niceness", "0")
    start = partial(
        ray.init,
        address="local",
        num_cpus=max(claimed, cores),
        object_store_memory=None if placement.object_store_gb is None else int(1e9 * placement.object_store_gb),
        include_dashboard=False,
        logging_level=logging.WARNING,
        job_config=job_config,
    )
    deadline = time.monotonic() + placement.start_timeout_s
    with _preloading([_WITHOUT_GC, *preload] if preload and preloads else ()):
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                _start(start, placement.start_timeout_s, deadline)
                return
            except _DaemonEndedError as error:
                if attempt == _ATTEMPTS:
                    raise PlacementError(f"Ray did not start on this machine: {error}; {_way_out()}") from error
                logger.warning("%s; starting Ray again (attempt %d of %d)", error, attempt + 1, _ATTEMPTS)


def _start(start: Callable[[], Any], timeout_s: float, deadline: float) -> None:
    """Call `start` with the replacements in Ray; if it fails, end the daemons that were started.

    Raises:
        _DaemonEndedError: the raylet or the GCS ended.
        PlacementError: the node did not register by the deadline.
    """
    nodes: list[node.Node] = []
    with ExitStack() as stack:
        for module, name, replace in _replacements(nodes, timeout_s, deadline):
            stack.enter_context(_replaced(module, name, replace))
        try:
            start()
        except BaseException as error:
            ended = [_ended(one) for one in nodes]
            for one in nodes:
                one.kill_all_processes(check_alive=False)
            if isinstance(error, RuntimeError) and any(ended):  # what Ray raises if the GCS is gone
                raise _DaemonEndedError(next(filter(None, ended))) from error
            raise


def _replacements(
    nodes: list[node.Node], timeout_s: float, deadline: float
) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield what is replaced while Ray starts: module or class, name, and a function of the original.

    The node that is started is added to `nodes`.
    """
    yield services, "get_node", partial(_patient, nodes=nodes, timeout_s=timeout_s, deadline=deadline)
    yield node.Node, "start_head_processes", partial(_noting, nodes=nodes)
    # A terminal, `timeout` and many schedulers signal a whole process group. The driver handles the signal by finishing
    # its step, for which it needs Ray, so each of Ray's processes gets its own group. Where the kernel doesn't end
    # children with their parent, Ray relies on the driver's process group to end its processes.
    if detect_fate_sharing_support():
        yield services, "ConsolePopen", lambda start: partial(start, process_group=0)
    # Three Python processes that a local run has no use for: the dashboard's server, for which the start would wait and
    # which `include_dashboard` only makes smaller; the autoscaler; the dashboard's agent, which stays small where the
    # packages of ray[default] are missing.
    yield services, "start_api_server", lambda start: lambda *args, **kwargs: (None, None)
    yield node.Node, "start_monitor", lambda start: lambda self: None
    yield utils, "get_dashboard_dependency_error", lambda check: lambda: ImportError("a local run has no dashboard")


def _noting(start_processes: Callable[[node.Node], None], nodes: list[node.Node]) -> Callable[[node.Node], None]:
    """Return Ray's `start_head_processes`, adding the node to `nodes`."""

    def start(self: node.Node) -> None:
        nodes.append(self)
        start_processes(self)

    return start


def _patient(
    get_node: Callable[[str, str], Any], nodes: list[node.Node], timeout_s: float, deadline: float
) -> Callable[[str, str], Any]:
    """Return Ray's `get_node`, waiting for the node to register as long as its daemons run.

    Ray itself gives up after 30 s, too early for a busy machine, and asks without a pause, which slows the start down.
    """

    def wait(gcs_address: str, node_id: str) -> Any:
        problem = "no answer"
        # `get_node` would wait 30 s for a raylet that is gone or hangs, so it is called once the node is registered.
        while all(_is_registered(one, node_id, deadline) for one in nodes) and time.monotonic() < deadline:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError as error:
                problem = str(error)
                time.sleep(_POLL_S)
        raise PlacementError(
            f"Ray did not start on this machine within placement.start_timeout_s={timeout_s:g} s; {_way_out()}. Ray "
            f"says: {problem}; its session's folder has raylet.out and gcs_server.out"
        )

    return wait


def _is_registered(one: node.Node, node_id: str, deadline: float) -> bool:
    """Return true once the node is registered, or if this version of Ray can't be asked; false at the deadline.

    Raises:
        _DaemonEndedError: the raylet or the GCS ended.
    """
    while time.monotonic() < deadline:
        if (ended := _ended(one)) is not None:
            raise _DaemonEndedError(ended)
        try:
            gcs: Any = one.get_gcs_client()
            if any(known.hex() == node_id for known in gcs.get_all_node_info(timeout=_ANSWER_S)):
                return True
        except (AttributeError, TypeError) as error:
            logger.debug("Ray %s can't be asked for its nodes: %s", ray.__version__, error)
            return True
        except Exception as error:  # noqa: BLE001 - Ray has no common class for an answer that does not come
            logger.debug("Ray's GCS does not answer: %s", error)
        time.sleep(_POLL_S)
    return False


def _ended(one: node.Node) -> str | None:
    """Return which of the needed daemons ended, and where the logs are; None if they run."""
    ended = _NEEDED.intersection(name for name, _ in one.dead_processes())
    return f"Ray's {', '.join(sorted(ended))} ended while it started, see {one.get_logs_dir_path()}" if ended else None


def _way_out() -> str:
    """Return what to do if Ray does not start."""
    return (
        f"{os.cpu_count()} cores have a load of {os.getloadavg()[0]:.0f}: wait until other programs have ended, raise "
        "placement.start_timeout_s, or join a running cluster with placement.address"
    )


@contextmanager
def _replaced(module: Any, name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by a function of it, if there is one in this version of Ray."""
    try:
        before = getattr(module, name)
    except AttributeError:
        logger.debug("Ray %s has no %s.%s: its local start stays as it is", ray.__version__, module.__name__, name)
        yield
        return
    setattr(module, name, replace(before))
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _preloading(modules: Sequence[str]) -> Iterator[None]:
    """Make the workers of a cluster started in this block import these modules.

    Do nothing if the user has set Ray's variable for it.
    """
    name = "RAY_preload_python_modules"
    if not modules or name in os.environ:
        yield
        return
    os.environ[name] = ",".join(modules)
    try:
        yield
    finally:
        del os.environ[name]

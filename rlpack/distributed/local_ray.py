"""Ray's daemons on this machine, for one run: no dashboard, no autoscaler, and workers that import early.

Ray has no settings for some of this. Its private functions are replaced while it starts, and only then.
"""

import logging
import math
import os
import random
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import ray
from ray.job_config import JobConfig

from rlpack.config.schema import Placement
from rlpack.distributed.errors import PlacementError, UnavailableError, in_units
from rlpack.distributed.ray_daemons import NEEDED, RayDaemons
from rlpack.distributed.ray_internals import children_end_with_parent, find, private_module, temp_dir
from rlpack.distributed.ray_watch import ended_at
from rlpack.distributed.run_token import RunToken

logger = logging.getLogger(__name__)

_WAITING_WORKERS = "--num_prestart_python_workers="
# The raylet starts its workers once two agents have opened their ports, and aborts if that takes more than 15 s. A run
# uses none of those of the dashboard's agent; versions of Ray without the last one ignore it. The agent for runtime
# environments gets a given port instead of any, for which the raylet doesn't wait.
_UNUSED_PORTS = ("--metrics-agent-port=", "--metrics_export_port=", "--dashboard_agent_listen_port=")
_OPTIONAL = "--undefok=dashboard_agent_listen_port"
_NO_PORT = -1
_ANY_AGENT_PORT = re.compile(r"(?<=--runtime.env.agent.port=)0\b")
# Below the ports that Linux gives to outgoing connections: one of these could take it before the agent does.
_AGENT_PORTS = range(20_000, 32_768)
_WITHOUT_GC = "rlpack.distributed.imports_without_gc"
_PORTS_TRIED = 20
_LOOPBACK = "127.0.0.1"
# Without this name, other machines may reach the run's Ray.
_LOCALHOST = "resolve_ip_for_localhost"
_POLL_S = 0.05
_ANSWER_S = 5.0
# Time after a start's deadline at which the script ends it, if no thread of this process could.
_STUCK_S = 15.0
# A daemon may end on a machine that stalls.
_ATTEMPTS = 3
_PORT_POLL_MS = 500
# Ray's own log files of a start take about 100 kB.
_LEAST_ROOM = 1_000_000
_ROOM = "make room, or set RAY_TMPDIR to a folder that is writable and has room for the run's logs"


class _DaemonEndedError(Exception):
    """A daemon ended while Ray started. Not a RuntimeError, which Ray would take for a node that is not ready yet."""


def start_local_ray(placement: Placement, job_config: JobConfig, preload: Sequence[str]) -> RayDaemons:
    """Start Ray on this machine, connect to it and return its daemons; start again if one ends meanwhile.

    Args:
        placement: the pools. The cluster gets one CPU slot per core, or more if the pools claim more.
        job_config: Ray's settings of this driver.
        preload: modules that the workers import while they wait for a rank to run.

    Raises:
        PlacementError: Ray did not start by `placement.start_timeout_s`, a daemon ended in every attempt, or there is
            no room for Ray's files.
    """
    claimed = math.ceil(sum(pool.ranks * pool.cpus_per_rank for pool in placement.pools.values()))
    cores = os.cpu_count() or 1
    if claimed > cores:
        logger.warning("the pools claim %d CPUs, this machine has %d: its ranks will share them", claimed, cores)
    # Ray would kill a rank's reward supervisor before it could kill the reward processes and remove their files.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "false")
    # Ray lowers its workers' priority; other programs on this machine would then slow a run down.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # The GCS keeps the states of the last 100,000 calls, 100 kB a step, for a dashboard that a local run doesn't have.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    start = partial(
        ray.init,
        address="local",
        num_cpus=max(claimed, cores),
        object_store_memory=None if placement.object_store_gb is None else int(1e9 * placement.object_store_gb),
        include_dashboard=False,
        logging_level=logging.WARNING,
        job_config=job_config,
        _node_ip_address=_LOOPBACK,
    )
    deadline = time.monotonic() + placement.start_timeout_s
    daemons: RayDaemons | None = None
    check_room()
    try:
        daemons = RayDaemons(RunToken())
        with daemons.token.in_environment(), _preloading([_WITHOUT_GC, *preload] if preload else ()):
            _start_within_attempts(partial(_start, start, daemons, placement, deadline), deadline)
    except BaseException as error:
        if daemons is not None:
            daemons.close()
        if isinstance(error, Exception) and not isinstance(error, PlacementError):  # Ray has no common class
            raise UnavailableError(_did_not_start(error)) from error
        raise
    return daemons


def _start_within_attempts(start: Callable[[], None], deadline: float) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            start()
            return
        except _DaemonEndedError as error:
            if attempt == _ATTEMPTS or time.monotonic() >= deadline:
                raise UnavailableError(f"Ray did not start on this machine: {error}; {_way_out()}") from error
            logger.warning("%s; starting Ray again (attempt %d of %d)", error, attempt + 1, _ATTEMPTS)


def _start(start: Callable[[], Any], daemons: RayDaemons, placement: Placement, deadline: float) -> None:
    """Call `start` with the replacements in Ray; if it fails, end the daemons that were started.

    As many workers as there are ranks start with Ray.

    Raises:
        _DaemonEndedError: the raylet or the GCS ended.
        PlacementError: the node did not register by the deadline.
    """
    nodes: list[Any] = []
    timeout_s, ranks = placement.start_timeout_s, sum(pool.ranks for pool in placement.pools.values())
    with ExitStack() as stack:
        late = partial(_too_late, timeout_s, "one of its daemons does not answer")
        stack.enter_context(ended_at(deadline + _ANSWER_S - time.monotonic(), late, daemons.kill))
        stuck = _too_late(timeout_s, "its workers ended before they registered, and raylet.err says why")
        daemons.end_start_after(deadline + _STUCK_S - time.monotonic(), stuck)
        for module, name, replace in _replacements(nodes, daemons, ranks, timeout_s, deadline):
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
    logs = nodes[-1].get_logs_dir_path() if nodes else "the folder of Ray's logs"
    daemons.watch(logs, placement.ray_timeout_s)


def _replacements(
    nodes: list[Any], daemons: RayDaemons, ranks: int, timeout_s: float, deadline: float
) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield the replacements made while Ray starts: module or class, name, and a function of the original.

    The node that is started is added to `nodes`.
    """
    node, services, utils = map(private_module, ("node", "services", "utils"))
    node_class = find("_private.node", "Node")
    yield services, "start_ray_process", partial(_with_options, ranks=ranks, daemons=daemons)
    yield services, "get_node", partial(_patient, nodes=nodes, timeout_s=timeout_s, deadline=deadline)
    yield node_class, "start_head_processes", partial(_noting, nodes=nodes)
    yield node, "wait_for_persisted_port", partial(_while_gcs_runs, nodes=nodes)
    # Ray would replace the loopback address by one that other machines reach.
    yield services, _LOCALHOST, lambda resolve: lambda host: host
    # A terminal, `timeout` and many schedulers signal a whole process group. The driver handles the signal by finishing
    # its step, for which it needs Ray, so each of Ray's processes gets its own session. Where the kernel doesn't end
    # children with their parent, Ray relies on the driver's process group to end its processes.
    if children_end_with_parent():
        yield services, "ConsolePopen", daemons.starting
    # Three Python processes that a local run has no use for: the dashboard's server, for which the start would wait and
    # which `include_dashboard` only makes smaller; the autoscaler; the dashboard's agent, which stays small where the
    # packages of ray[default] are missing.
    yield services, "start_api_server", lambda start: lambda *args, **kwargs: (None, None)
    yield node_class, "start_monitor", lambda start: lambda self: None
    yield utils, "get_dashboard_dependency_error", lambda check: lambda: ImportError("a local run has no dashboard")


def _with_options(start_process: Callable[..., Any], ranks: int, daemons: RayDaemons) -> Callable[..., Any]:
    """Return Ray's `start_ray_process`, which starts the raylet with other options.

    One worker per rank waits for work, where Ray would start one per core, and the raylet waits for neither agent.
    """

    def start(command: list[str], *args: Any, **options: Any) -> Any:
        if any(word.startswith(_WAITING_WORKERS) for word in command):
            others = [word for word in command if not word.startswith((_WAITING_WORKERS, *_UNUSED_PORTS))]
            ports = [f"{flag}{_NO_PORT}" for flag in _UNUSED_PORTS]
            command = [*others, f"{_WAITING_WORKERS}{ranks}", *ports, _OPTIONAL]
            agent_port = str(_reserved_port(daemons))
            command = [_ANY_AGENT_PORT.sub(agent_port, word) for word in command]
        return start_process(command, *args, **options)

    return start


def _reserved_port(daemons: RayDaemons) -> int:
    """Return a free port that no other run takes, for an agent; 0, for any, if none of those tried is free.

    A socket stays bound to it while the run's Ray runs. The agent, whose socket has SO_REUSEADDR, can bind to it, too.
    """
    for port in random.SystemRandom().sample(_AGENT_PORTS, _PORTS_TRIED):
        holder = socket.socket()
        try:
            holder.bind((_LOOPBACK, port))
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # afterwards: another run's attempt fails
        daemons.hold(holder)
        return port
    return 0


def _noting(start_processes: Callable[[Any], None], nodes: list[Any]) -> Callable[[Any], None]:
    """Return Ray's `start_head_processes`, adding the node to `nodes`."""

    def start(self: Any) -> None:
        nodes.append(self)
        start_processes(self)

    return start


def _while_gcs_runs(wait_for_port: Callable[..., int], nodes: list[Any]) -> Callable[..., int]:
    """Return Ray's `wait_for_persisted_port`, which gives up when the GCS that is to write its port has ended."""

    def wait(*args: Any, timeout_ms: int, **options: Any) -> int:
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            try:
                return wait_for_port(*args, timeout_ms=_PORT_POLL_MS, **options)
            except Exception:  # Ray has no common class for a port that is not there yet
                if (ended := next(filter(None, map(_ended, nodes)), None)) is not None:
                    raise _DaemonEndedError(ended) from None
                if time.monotonic() > deadline:
                    raise

    return wait


def check_room() -> None:
    """Check that Ray can write its files; its daemons would end without saying why.

    Raises:
        PlacementError: their folder is full or can't be written.
    """
    folder = temp_dir()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < _LEAST_ROOM:
        problem = f"has {in_units(free)} free"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"can't be written by user {os.getuid()}"
    else:
        return
    raise PlacementError(
        f"Ray did not start on this machine: {existing}, where its files and logs go, {problem}; {_ROOM}"
    )


def _patient(
    get_node: Callable[[str, str], Any], nodes: list[Any], timeout_s: float, deadline: float
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
        raise _too_late(timeout_s, problem)

    return wait


def _too_late(timeout_s: float, problem: str) -> UnavailableError:
    return UnavailableError(
        f"Ray did not start on this machine within placement.start_timeout_s={timeout_s:g} s; {_way_out()}. Ray "
        f"says: {problem}; its session's folder has raylet.out and gcs_server.out"
    )


def _is_registered(one: Any, node_id: str, deadline: float) -> bool:
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


def _ended(one: Any) -> str | None:
    """Return which of the needed daemons ended, and where the logs are; None if they run."""
    ended = NEEDED.intersection(name for name, _ in one.dead_processes())
    return f"Ray's {', '.join(sorted(ended))} ended while it started, see {one.get_logs_dir_path()}" if ended else None


def _did_not_start(error: Exception) -> str:
    """Describe an error of Ray's start that is not the end or the silence of a daemon."""
    reason = str(error).partition("\n")[0]
    text = f"Ray did not start on this machine: {type(error).__name__}: {reason}"
    if isinstance(error, OSError):
        return f"{text}; Ray's files and logs go to {temp_dir()}: {_ROOM}"
    return f"{text}; {_way_out()}; Ray's logs: {temp_dir()}/session_latest/logs"


def _way_out() -> str:
    """Return advice for a Ray that does not start."""
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
        level = logging.WARNING if name == _LOCALHOST else logging.DEBUG
        logger.log(level, "Ray %s has no %s.%s: its local start stays as it is", ray.__version__, module, name)
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

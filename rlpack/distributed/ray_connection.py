"""The driver's connection to Ray: join a cluster, or start one on this machine.

It imports only Ray and the configuration, so that Ray's daemons can start while the driver imports everything else.

User code never shadows ours. Ray puts the driver's working directory first on the import path of its workers, where a
file `random.py` would replace the standard library's. Here it is left out; each rank appends it instead
(`rlpack.distributed.process`).
"""

import atexit
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import ray
from ray.exceptions import AuthenticationError
from ray.job_config import JobConfig

from rlpack.background_call import BackgroundCall
from rlpack.config.schema import Placement
from rlpack.distributed.answers import ask_ray
from rlpack.distributed.capacity import MAX_RANKS_PER_CORE
from rlpack.distributed.errors import PlacementError, UnavailableError, in_units
from rlpack.distributed.local_ray import start_local_ray
from rlpack.distributed.ray_internals import (
    available_memory,
    find,
    forbid_implicit_start,
    largest_slow_store,
    logs_folder,
    shared_memory,
)
from rlpack.distributed.ray_watch import (
    LOOK_S,
    RayWatch,
    answers,
    close_current,
    current,
    ended_at,
    ray_ended,
    set_current,
)
from rlpack.installation import RAY_JOB

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
# Leaving Ray takes a second; without its daemons, a minute.
_SHUTDOWN_S, _HURRIED_SHUTDOWN_S = 30.0, 3.0


# Threads of shutdowns that did not end in time.
_SHUTDOWNS: list[threading.Thread] = []


def connect(placement: Placement, preload: Sequence[str] = ()) -> None:
    """Join the cluster at `placement.address`, or start one on this machine; do nothing if already connected.

    A local cluster gets one CPU slot per core, or more if the pools claim more.

    Args:
        placement: the pools, and where they run.
        preload: modules that the workers of a local cluster import while they wait for a rank to run.

    Raises:
        PlacementError: there is no cluster at the address, or no room for the object store.
    """
    if ray.is_initialized():
        return
    check_object_store(placement)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray otherwise hides GPUs from CPU actors by an environment variable and warns that this will change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not (sys.stdout.isatty() and sys.stderr.isatty()):  # Ray colors the prefixes of ranks' output even in files
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # Ray warns when token authentication is on.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    with _own_sigterm():
        if placement.address is None:
            set_current(start_local_ray(placement, _job_config(), preload))
        else:
            set_current(_join(placement.address, placement))


def disconnect() -> None:
    """Leave the cluster, and stop it if this process started it.

    A thread that still waits for a call gets an error: it does not start a Ray by that, as it otherwise would.
    """
    forbid_implicit_start()
    watch, has_ended = current(), ray_ended()
    if watch is not None:
        watch.stop_watching()
        if has_ended:
            watch.kill()
    shutdown = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    shutdown.start()
    deadline = time.monotonic() + (_HURRIED_SHUTDOWN_S if has_ended else _SHUTDOWN_S)
    while shutdown.is_alive() and time.monotonic() < deadline:
        shutdown.join(LOOK_S)
        if watch is not None and not has_ended and watch.is_stuck():
            has_ended, deadline = True, time.monotonic() + _HURRIED_SHUTDOWN_S
            logger.warning("one of Ray's daemons is stopped (SIGSTOP) and does not end; it is killed")
            watch.kill()
    if shutdown.is_alive():
        _SHUTDOWNS.append(shutdown)
        logger.debug("Ray's shutdown is left behind: a daemon does not answer")
        atexit.unregister(ray.shutdown)  # it would wait for the shutdown in the thread
    close_current()


def hangs() -> bool:
    """Return whether Ray's shutdown, which waits for a daemon that ended or is stopped, still runs in a thread."""
    return any(thread.is_alive() for thread in _SHUTDOWNS)


def check_object_store(placement: Placement) -> None:
    """Reject an object store larger than this machine's memory, before Ray is started.

    Raises:
        PlacementError: it is too large; the message says how much memory there is.
    """
    if placement.address is not None or placement.object_store_gb is None:
        return
    size, memory, shared = 1e9 * placement.object_store_gb, available_memory(), shared_memory()
    # Where shared memory is too small, as in a container, Ray puts a small store on disk and warns.
    goes_to_disk = size <= largest_slow_store() or "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE" in os.environ
    for room, what in ((memory, "memory free"), (math.inf if goes_to_disk else shared, "shared memory (/dev/shm)")):
        if size > room:
            raise PlacementError(
                f"placement.object_store_gb is {placement.object_store_gb:g}, and this machine has {in_units(room)} of "
                f"{what}; lower it, or leave it null, which takes 30 % of memory"
            )


def check_cluster(placement: Placement) -> None:
    """Raise if nothing answers at `placement.address`, without joining the cluster; None needs no cluster.

    Raises:
        PlacementError: no process listens there, or the one that does is stopped.
    """
    address = placement.address
    if address is None or ray.is_initialized():
        return
    try:
        find_address = find("_private.services", "get_ray_address_from_environment")
        place = find_address(address, None) if address == "auto" and find_address is not None else address
        asked = BackgroundCall(partial(_check_answer, place), name="ask-cluster")  # a name server may never answer
        if not asked.wait(2 * _ANSWER_S):
            raise TimeoutError(f"no answer within {2 * _ANSWER_S:g} s")
        asked.outcome()
    except (OSError, ValueError) as error:
        raise _no_cluster(address, error) from error


class _IgnoredPaths(list[str]):
    """An import path for Ray's workers that stays empty.

    `extend`, which Ray calls with the driver's directories, does nothing.
    """

    def extend(self, paths: Iterable[str]) -> None:
        """Ignore the driver's working directory: the ranks append it to their import path."""


def _job_config() -> JobConfig:
    config = JobConfig()
    config._py_driver_sys_path = _IgnoredPaths()
    return config


def _join(address: str, placement: Placement) -> RayWatch:
    """Join a cluster and return the watch of its GCS and of this machine's raylet."""
    limit, watch = placement.start_timeout_s, RayWatch()
    late = UnavailableError(f"the Ray cluster at placement.address={address} did not answer within {limit:g} s")
    try:
        _check_answer(address)
        with ended_at(limit, lambda: late, lambda: None):
            ray.init(
                address=address, logging_level=logging.WARNING, runtime_env=_runtime_env(), job_config=_job_config()
            )
        watch.start_asking(ask_ray(_daemons, limit), placement.ray_timeout_s, logs_folder())
        return watch
    except (OSError, ValueError, RuntimeError, AuthenticationError) as error:
        if ray.is_initialized():
            disconnect()
        raise _no_cluster(address, error) from error


def _runtime_env() -> dict[str, dict[str, str]] | None:
    """Return a runtime_env with the driver's PYTHONPATH for the ranks; None if they get theirs from the Ray job.

    Ray refuses a variable that both the job and the driver set, even to the same value.
    """
    job = json.loads(os.environ.get(RAY_JOB, "{}"))
    of_job = (job.get("runtime_env") or {}).get("env_vars") or {}
    python_path = os.environ.get("PYTHONPATH")
    return {"env_vars": {"PYTHONPATH": python_path}} if python_path and "PYTHONPATH" not in of_job else None


def _no_cluster(address: str, error: Exception) -> PlacementError:
    return PlacementError(
        f"no Ray cluster answers at placement.address={address}: {error}; "
        "start one with `ray start --head`, check that its token is known here (RAY_AUTH_MODE, "
        "RAY_AUTH_TOKEN_PATH), or set placement.address=null to start one for this run"
    )


def fits_this_machine(placement: Placement) -> bool:
    """Return whether a run starts Ray here, with ranks that fit."""
    slots = sum(pool.ranks * max(1.0, pool.cpus_per_rank) for pool in placement.pools.values())
    return placement.address is None and slots <= MAX_RANKS_PER_CORE * (os.cpu_count() or 1)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the process's SIGTERM handler, because that of `ray.init` exits at once, in the middle of a step."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _daemons() -> dict[str, str]:
    """Return the addresses of the GCS and of this machine's raylet."""
    context = ray.get_runtime_context()
    here = context.get_node_id()
    addresses = {"GCS": context.gcs_address}
    for node in ray.nodes():
        if node["NodeID"] == here:
            addresses["raylet"] = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    return addresses


def _check_answer(address: str) -> None:
    """Probe a `host:port` once, because Ray retries for minutes if nothing listens or answers there.

    Raises:
        OSError: nothing listens there, or what does is stopped.
    """
    place = address.rpartition("/")[2]
    host, _, port = place.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        if not answers(place, _ANSWER_S):
            raise TimeoutError(f"its process accepts connections, but says nothing within {_ANSWER_S:g} s")

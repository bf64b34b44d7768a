"""The driver's connection to Ray: join a cluster, or start one on this machine.

It imports Ray and the configuration alone, so that Ray's daemons can start while the driver imports everything else.

User code never shadows ours. Ray puts the driver's working directory first on the import path of its workers, where a
file `random.py` would replace the standard library's. Here it is left out; each rank appends it instead
(`rlpack.distributed.process`).
"""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray._private import services
from ray._private.ray_constants import REQUIRE_SHM_SIZE_THRESHOLD
from ray._private.utils import detect_fate_sharing_support, estimate_available_memory, get_shared_memory_bytes
from ray.exceptions import AuthenticationError
from ray.job_config import JobConfig

from rlpack.config.schema import Placement
from rlpack.distributed.errors import PlacementError, in_units

logger = logging.getLogger(__name__)

# Ranks may share a core, for a test run; a mistyped number of ranks would only exhaust the machine's memory.
MAX_RANKS_PER_CORE = 32
_ANSWER_S = 5.0
_POLL_S = 0.05
_MAX_WORKERS_PER_RANK = 2
_WITHOUT_GC = "rlpack.distributed.imports_without_gc"


def connect(placement: Placement, preload: Sequence[str] = ()) -> None:
    """Join the cluster at `placement.address`, or start one on this machine; do nothing if already connected.

    A cluster of this machine gets as many CPU slots as the pools claim.

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
    # Ray warns when token authentication is on.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    with _own_sigterm():
        if placement.address is None:
            _start_local(placement, preload)
        else:
            _join(placement.address)


def disconnect() -> None:
    """Leave the cluster, and stop it if this process started it."""
    ray.shutdown()


def check_object_store(placement: Placement) -> None:
    """Reject an object store larger than this machine's memory, before Ray is started.

    Raises:
        PlacementError: it is too large; the message says how much memory there is.
    """
    if placement.address is not None or placement.object_store_gb is None:
        return
    size, memory, shared = 1e9 * placement.object_store_gb, estimate_available_memory(), get_shared_memory_bytes()
    # Where shared memory is too small, as in a container, Ray puts a small store on disk and warns.
    goes_to_disk = size <= REQUIRE_SHM_SIZE_THRESHOLD or "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE" in os.environ
    for room, what in ((memory, "memory free"), (math.inf if goes_to_disk else shared, "shared memory (/dev/shm)")):
        if size > room:
            raise PlacementError(
                f"placement.object_store_gb is {placement.object_store_gb:g}, and this machine has {in_units(room)} of "
                f"{what}; lower it, or leave it null, which takes 30 % of memory"
            )


class _IgnoredPaths(list[str]):
    """Directories for the import path of Ray's workers; ignores Ray's own."""

    def extend(self, paths: Iterable[str]) -> None:
        """Ignore the driver's working directory: the ranks append it to their import path."""


def _job_config() -> JobConfig:
    config = JobConfig()
    config._py_driver_sys_path = _IgnoredPaths()
    return config


def _join(address: str) -> None:
    python_path = os.environ.get("PYTHONPATH")
    runtime_env = {"env_vars": {"PYTHONPATH": python_path}} if python_path else None
    try:
        _check_answer(address)
        ray.init(address=address, logging_level=logging.WARNING, runtime_env=runtime_env, job_config=_job_config())
    except (OSError, ValueError, RuntimeError, AuthenticationError) as error:
        raise PlacementError(
            f"no Ray cluster answers at placement.address={address}: {error}; "
            "start one with `ray start --head`, check that its token is known here (RAY_AUTH_MODE, "
            "RAY_AUTH_TOKEN_PATH), or set placement.address=null to start one for this run"
        ) from error


def fits_this_machine(placement: Placement) -> bool:
    """Return whether a run starts Ray here, with ranks that fit."""
    slots = sum(pool.ranks * max(1.0, pool.cpus_per_rank) for pool in placement.pools.values())
    return placement.address is None and slots <= MAX_RANKS_PER_CORE * (os.cpu_count() or 1)


def _claimed_cpus(placement: Placement) -> int:
    return math.ceil(sum(pool.ranks * pool.cpus_per_rank for pool in placement.pools.values()))


def _start_local(placement: Placement, preload: Sequence[str]) -> None:
    claimed, cores = _claimed_cpus(placement), os.cpu_count() or 1
    if claimed > cores:
        logger.warning("the pools claim %d CPUs, this machine has %d: its ranks will share them", claimed, cores)
    # Ray starts one worker for each core at once. Where most of them would never become a rank, they stay small.
    is_small = cores <= _MAX_WORKERS_PER_RANK * sum(pool.ranks for pool in placement.pools.values())
    # Ray would kill a rank's reward supervisor before it could kill the reward processes and remove their files.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "false")
    # Ray lowers its workers' priority, by which other programs on this machine would slow a run down.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with (
        _own_process_group(),
        _preloading([_WITHOUT_GC, *preload] if preload and is_small else ()),
        _patience(placement.start_timeout_s),
    ):
        ray.init(
            address="local",
            num_cpus=max(claimed, cores),
            object_store_memory=None if placement.object_store_gb is None else int(1e9 * placement.object_store_gb),
            include_dashboard=False,
            logging_level=logging.WARNING,
            job_config=_job_config(),
        )


@contextmanager
def _preloading(modules: Sequence[str]) -> Iterator[None]:
    """Have the workers of a cluster that is started meanwhile import these modules; what a user set goes first."""
    name = "RAY_preload_python_modules"
    if not modules or name in os.environ:
        yield
        return
    os.environ[name] = ",".join(modules)
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def _patience(timeout_s: float) -> Iterator[None]:
    """Give Ray's daemons this long to start; Ray itself gives up after 30 s, too early for a busy machine.

    Ray also asks for the node without a pause, which slows the start down on few cores.
    """
    before = services.get_node

    def get_node(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return before(gcs_address, node_id)
            except RuntimeError as error:  # not registered yet
                if time.monotonic() > deadline:
                    raise PlacementError(
                        f"Ray did not start on this machine within placement.start_timeout_s={timeout_s:g} s; "
                        f"{os.cpu_count()} cores have a load of {os.getloadavg()[0]:.0f}: wait until other programs "
                        "have ended, raise placement.start_timeout_s, or join a running cluster with placement.address"
                    ) from error
                time.sleep(_POLL_S)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = before


@contextmanager
def _own_process_group() -> Iterator[None]:
    """Start each of Ray's processes in its own process group, not the driver's.

    A terminal, `timeout` and many schedulers signal the whole group. The driver handles the signal by finishing its
    step, for which it needs Ray. Where the kernel doesn't end children with their parent, Ray needs the group for it.
    """
    before = services.ConsolePopen
    if detect_fate_sharing_support():
        services.ConsolePopen = partial(before, process_group=0)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        services.ConsolePopen = before


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the process's SIGTERM handler, because that of `ray.init` exits at once, in the middle of a step."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _check_answer(address: str) -> None:
    """Connect to a `host:port` once, because Ray retries for minutes if nothing listens there."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()

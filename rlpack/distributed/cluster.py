"""A run's place on a Ray cluster: joins or starts one, puts pools of ranks on it, and ends all it started."""

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Self

import ray
from ray._private import services
from ray._private.ray_constants import REQUIRE_SHM_SIZE_THRESHOLD
from ray._private.utils import detect_fate_sharing_support, estimate_available_memory, get_shared_memory_bytes
from ray.exceptions import AuthenticationError
from ray.util.placement_group import placement_group, remove_placement_group

from rlpack.config.schema import Placement, Pool
from rlpack.config.sections.submission import Submission
from rlpack.distributed.capacity import check_capacity, listing
from rlpack.distributed.errors import PlacementError, in_units
from rlpack.distributed.ranks import RayRanks
from rlpack.distributed.ray_store import RayStore

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
# After so long a wait for devices one is told what is free.
_SAID_S = 10.0


class Cluster:
    """Pools of ranks on a Ray cluster; a context manager that leaves no process behind."""

    def __init__(self, placement: Placement, job: Submission | None = None) -> None:
        """Join the cluster at `placement.address`, or start one on this machine.

        Args:
            placement: the pools, and where they run.
            job: names the secrets that ranks need; None for none.

        Raises:
            PlacementError: there is no cluster at the address, or no room for the object store or for the batches.
        """
        self._placement = placement
        self._job = Submission() if job is None else job
        self._pools: dict[str, RayRanks] = {}
        check_object_store(placement)
        with _own_sigterm():
            _connect(placement)
        try:
            self.store = _store(placement)
        except BaseException:
            ray.shutdown()  # nobody else knows yet that it runs
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every process of the run, at once when the run failed, and leave the cluster."""
        for ranks in self._pools.values():
            if error is None:
                ranks.close()
            else:
                ranks.kill()
        self._pools.clear()
        ray.shutdown()

    def open_pools(self, names: list[str]) -> dict[str, RayRanks]:
        """Start the processes of these pools, if they don't run yet, and wait until each has its process group.

        Raises:
            PlacementError: the cluster has fewer devices than the pools ask for; said at once, with what is free.
            RoleError: the processes did not start by `placement.start_timeout_s`.
        """
        pools = {name: self._placement.pools[name] for name in [*self._pools, *names]}
        check_capacity(pools, _nodes(), ray.available_resources())
        opened = {name: self._open(name, pool) for name, pool in pools.items() if name not in self._pools}
        for ranks in opened.values():
            ranks.init_process_group(self._job)
        return self._pools

    def _open(self, name: str, pool: Pool) -> RayRanks:
        bundle = {"CPU": pool.cpus_per_rank, "GPU": pool.gpus_per_rank}
        group = placement_group([{kind: n for kind, n in bundle.items() if n > 0}] * pool.ranks, strategy="PACK")
        deadline = self._placement.start_timeout_s
        if not group.wait(min(_SAID_S, deadline)):
            logger.warning(
                "pool %s waits up to %g s for devices that others hold: its %d ranks ask for %s each, free are %s",
                *(name, deadline, pool.ranks, listing(bundle), listing(ray.available_resources())),
            )
            if not group.wait(max(0.0, deadline - _SAID_S)):
                remove_placement_group(group)
                raise PlacementError(
                    f"pool {name} did not get its {pool.ranks} ranks within {deadline:g} s; free are "
                    f"{listing(ray.available_resources())}; wait for others to finish, or lower "
                    f"placement.pools.{name}.ranks"
                )
        self._pools[name] = RayRanks(name, pool, group, self._placement, self.store)
        return self._pools[name]


def check_object_store(placement: Placement) -> None:
    """Refuse an object store that this machine has no memory for, before Ray is started.

    Raises:
        PlacementError: says how much there is.
    """
    if placement.address is not None or placement.object_store_gb is None:
        return
    size, memory, shared = 1e9 * placement.object_store_gb, estimate_available_memory(), get_shared_memory_bytes()
    # A small store Ray puts on the disk where shared memory lacks room, as in a container, and warns.
    goes_to_disk = size <= REQUIRE_SHM_SIZE_THRESHOLD or "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE" in os.environ
    for room, what in ((memory, "memory free"), (math.inf if goes_to_disk else shared, "shared memory (/dev/shm)")):
        if size > room:
            raise PlacementError(
                f"placement.object_store_gb is {placement.object_store_gb:g}, and this machine has {in_units(room)} of "
                f"{what}; lower it, or leave it null, which takes 30 % of memory"
            )


def _store(placement: Placement) -> RayStore:
    """Return the store of the cluster, within the budget that a user gave.

    Raises:
        PlacementError: the budget is more than the store has.
    """
    budget = None if placement.in_flight_gb is None else 1e9 * placement.in_flight_gb
    store = RayStore(budget, wait_s=placement.call_timeout_s)
    if store.budget > store.size:
        raise PlacementError(
            f"placement.in_flight_gb is {placement.in_flight_gb:g}, and the object stores of all nodes have "
            f"{in_units(store.size)}; lower it, or raise placement.object_store_gb"
        )
    return store


def _connect(placement: Placement) -> None:
    """Call `ray.init`; a cluster of this machine alone gets as many CPU slots as the pools claim."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray otherwise hides GPUs from CPU actors by an environment variable and warns that this will change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray warns that its token authentication is on, which is what one wants.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    # Ranks import a user's own roles and rewards from where the command was given, as the driver does.
    import_path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    if placement.address is not None:
        try:
            _check_answer(placement.address)
            runtime_env = {"env_vars": {"PYTHONPATH": import_path}}
            ray.init(address=placement.address, logging_level=logging.WARNING, runtime_env=runtime_env)
        except (OSError, ValueError, RuntimeError, AuthenticationError) as error:
            raise PlacementError(
                f"no Ray cluster answers at placement.address={placement.address}: {error}; "
                "start one with `ray start --head`, see that its token is known here (RAY_AUTH_MODE, "
                "RAY_AUTH_TOKEN_PATH), or set placement.address=null for one of this run's own"
            ) from error
        return
    claimed = math.ceil(sum(pool.ranks * pool.cpus_per_rank for pool in placement.pools.values()))
    cores = os.cpu_count() or 1
    if claimed > cores:
        logger.warning("the pools claim %d CPUs, this machine has %d: its ranks will share them", claimed, cores)
    os.environ["PYTHONPATH"] = import_path  # inherited by Ray's processes
    # Ray would kill a rank's reward supervisor before it could kill the reward processes and remove their files.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "false")
    with _own_process_group():
        ray.init(
            address="local",
            num_cpus=max(claimed, cores),
            object_store_memory=None if placement.object_store_gb is None else int(1e9 * placement.object_store_gb),
            include_dashboard=False,
            logging_level=logging.WARNING,
        )


@contextmanager
def _own_process_group() -> Iterator[None]:
    """Start Ray's processes outside of the driver's process group, each in one of its own.

    A terminal, `timeout` and many schedulers signal the whole group. The driver has to hear that and finish its step,
    for which it needs Ray. Where the kernel doesn't end children with their parent, Ray does it by the group instead.
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
    """Keep what the process does on SIGTERM; `ray.init` would have it exit at once, in the middle of a step."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _check_answer(address: str) -> None:
    """Connect to a `host:port` once, since Ray tries for minutes where nobody listens."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


def _nodes() -> list[Mapping[str, float]]:
    """Return what each living node has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]

"""`Cluster`: joins or starts a Ray cluster, places pools of ranks on it, and ends everything it started."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import ray

from rlpack.config.schema import Placement, Pool
from rlpack.config.sections.submission import Submission
from rlpack.distributed.answers import ask_ray
from rlpack.distributed.capacity import check_capacity
from rlpack.distributed.errors import PlacementError, in_units
from rlpack.distributed.missing_nodes import wait_for_capacity
from rlpack.distributed.ranks import RayRanks
from rlpack.distributed.ray_connection import connect, disconnect
from rlpack.distributed.ray_internals import logs_folder
from rlpack.distributed.ray_store import RayStore
from rlpack.distributed.ray_watch import current
from rlpack.distributed.reservations import reserve
from rlpack.distributed.restarts import Restarts
from rlpack.distributed.shared_folder import check_shared, warn_of_lost_records


class Cluster:
    """Pools of ranks on a Ray cluster; a context manager that leaves no process behind.

    Attributes:
        store: holds the payloads of batches.
        restarts: the restarts of the pools.
    """

    def __init__(
        self,
        placement: Placement,
        job: Submission | None = None,
        log_path: Path | None = None,
        *,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Join the cluster at `placement.address`, or start one on this machine.

        Args:
            placement: the pools, and where they run.
            job: names the secrets that ranks need; None for none.
            log_path: the file to which ranks append what they log, on storage that all nodes share; None for none.
            is_interrupted: whether to stop waiting for devices and for room that others hold, as after a Ctrl-C.

        Raises:
            Interrupted: `is_interrupted` returned True while nodes were missing.
            PlacementError: no cluster answers at the address, or there is no room for the object store or its budget,
                in a restarted run until `placement.start_timeout_s` has passed.
        """
        self._placement = placement
        self._job = Submission() if job is None else job
        self._log_path = log_path
        self._is_interrupted = is_interrupted
        self._pools: dict[str, RayRanks] = {}
        self.restarts = Restarts()
        connect(placement)
        watch = current()
        if watch is not None and log_path is not None:
            watch.log_to(log_path)
        try:
            self.store = self._open_store()
        except BaseException:
            disconnect()  # no caller holds this half-built cluster to close it
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every process of the run, immediately if the run failed, and leave the cluster."""
        for ranks in self._pools.values():
            ranks.end()
        for ranks in self._pools.values():
            if error is None:
                ranks.close()
            else:
                ranks.kill()
        self._pools.clear()
        disconnect()

    def _open_store(self) -> RayStore:
        """Return the cluster's store with the configured budget; in a restarted run, once it has room for that.

        Raises:
            Interrupted: `is_interrupted` returned True while nodes were missing.
            PlacementError: the budget exceeds the store.
        """
        placement = self._placement
        budget = None if placement.in_flight_gb is None else 1e9 * placement.in_flight_gb
        is_shared = placement.address is not None
        wait_s = placement.call_timeout_s
        store = RayStore(budget, wait_s=wait_s, has_others=is_shared, is_interrupted=self._is_interrupted)
        if is_shared:
            check = partial(_check_budget, store, placement)
            wait_for_capacity(check, placement.start_timeout_s, self._is_interrupted)
        else:
            _check_budget(store, placement)
        return store

    @property
    def ray_logs(self) -> str:
        """Return the folder of Ray's logs on this machine."""
        return logs_folder()

    def open_pools(self, names: list[str]) -> dict[str, RayRanks]:
        """Start the processes of these pools, unless they run already, and form their process groups.

        On a cluster that others may use, no process starts before all pools have their devices.

        Raises:
            Interrupted: `is_interrupted` returned True while others used the devices, or some were missing.
            PlacementError: the cluster has fewer devices than the pools claim, which is raised at once, with what is
                free, except in a restarted run, which waits for them; or others used them. Either wait ends after
                `placement.start_timeout_s`.
            RoleError: the processes did not start by `placement.start_timeout_s`.
        """
        pools = {name: self._placement.pools[name] for name in [*self._pools, *names]}
        is_shared = self._placement.address is not None
        limits = self._placement.start_timeout_s, self._is_interrupted
        if is_shared:
            wait_for_capacity(partial(_check_capacity, pools), *limits)
        else:
            _check_capacity(pools)
        if not self._pools:
            self.store.measure()  # nodes may have joined while the run waited for them
        opened = {name: pool for name, pool in pools.items() if name not in self._pools}
        # A local cluster belongs only to this run, so nothing has to be reserved. Without a placement group, ranks use
        # the workers that Ray starts early, which have imported the roles' modules by now.
        reserved = reserve(opened, *limits) if is_shared and opened else {}
        for name, pool in opened.items():
            self._pools[name] = RayRanks(name, pool, reserved.get(name), self._placement, self.store, self.restarts)
        for ranks in [self._pools[name] for name in opened]:
            ranks.init_process_group(self._job, self._log_path)
        return self._pools

    def check_run_dir(self, names: Iterable[str]) -> None:
        """Check that ranks see the folder of the run's log, in which roles read and write files.

        Args:
            names: pools that need it. If ranks of the others don't see it, only their logs and spans are lost, which is
                a warning.

        Raises:
            PlacementError: a node of the named pools does not share it with the driver.
        """
        if self._log_path is not None:
            needing = set(names)
            for name in sorted(needing):
                check_shared(name, self._pools[name], self._log_path.parent)
            others = {name: ranks for name, ranks in self._pools.items() if name not in needing}
            warn_of_lost_records(others, self._log_path.parent)


def _check_budget(store: RayStore, placement: Placement) -> None:
    """Measure the store, and raise a `PlacementError` if the budget exceeds it."""
    store.measure()
    if store.budget > store.size:
        raise PlacementError(
            f"placement.in_flight_gb is {placement.in_flight_gb:g}, but the object stores of all nodes have "
            f"{in_units(store.size)}; lower it, or raise placement.object_store_gb"
        )


def _check_capacity(pools: Mapping[str, Pool]) -> None:
    """Raise a `PlacementError` if the cluster has fewer devices than the pools claim."""
    check_capacity(pools, _nodes(), ask_ray(ray.available_resources))


def _nodes() -> list[Mapping[str, float]]:
    """Return the resources of each living node."""
    return [node["Resources"] for node in ask_ray(ray.nodes) if node["Alive"]]

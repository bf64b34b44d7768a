"""Reservations: the devices of pools on a cluster that others may use, as Ray's placement groups.

Layouts number the ranks of a tensor- or expert-parallel group consecutively, but Ray doesn't place the bundles of a
placement group in their order: it sorts them by an unstable sort, which permutes equal bundles if there are more than
16. So ranks are assigned to bundles only once these have their nodes. Ray reserves each placement group as a whole, but
not several at once: two runs that each had one of their two pools would wait for each other. Invariants
(tests/unit/distributed/test_reservations.py):

1. the ranks on a node are consecutive; nodes with more of a pool's ranks come first;
2. a run gets the devices of all its pools or none; while some pools wait, the others hold theirs for 4, 8, 16, … s at a
   time, so that it gets them in the end though runs with a single pool never give theirs back;
3. pools whose ranks claim the most are placed first: Ray places one pool after the other, and small bundles that are
   spread over all nodes would leave no node with room for a large one.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from rlpack.config.schema import Pool
from rlpack.distributed.answers import ask_ray
from rlpack.distributed.capacity import listing
from rlpack.distributed.errors import PlacementError, UnavailableError
from rlpack.user_code import Interrupted

logger = logging.getLogger(__name__)

# After waiting this long for devices, a warning says what is free.
_WARN_S = 10.0
# Interval at which the state of placement groups is read.
_LOOK_S = 0.2
# Pools that have their devices wait this long for those that don't; twice as long in each further attempt.
_FIRST_HOLD_S = 4.0
# Random pauses before further attempts are no longer than this: others may take the devices meanwhile.
_MOST_PAUSE_S = 4.0
# Runs with the same seed have to pause for different times.
_RANDOM = random.SystemRandom()


@dataclass(frozen=True)
class ReservedDevices:
    """The devices of a pool.

    Attributes:
        group: the placement group, with one bundle per rank.
        bundles: the bundle of each rank.
    """

    group: PlacementGroup
    bundles: tuple[int, ...]


def bundles_by_rank(node_of: Mapping[int, str]) -> tuple[int, ...]:
    """Return the bundle of each rank, given Ray's id of the node of each bundle.

    >>> bundles_by_rank({0: "b", 1: "a", 2: "b", 3: "a", 4: "a"})
    (1, 3, 4, 0, 2)
    """
    # A node with few free devices would otherwise shift the parallel groups on all nodes after it.
    num_on, first_on = Counter(node_of.values()), dict[str, int]()
    for bundle in sorted(node_of):
        first_on.setdefault(node_of[bundle], bundle)
    return tuple(sorted(node_of, key=lambda bundle: (-num_on[node_of[bundle]], first_on[node_of[bundle]], bundle)))


def reserve(
    pools: Mapping[str, Pool], timeout_s: float, is_interrupted: Callable[[], bool] = lambda: False
) -> dict[str, ReservedDevices]:
    """Reserve the devices of pools, all of them or none.

    While only some pools have their devices, these are given back and requested again after a random pause, so that
    another run in the same situation can start.

    Args:
        pools: the pools, by name.
        timeout_s: deadline, in seconds.
        is_interrupted: whether to stop waiting, as after a Ctrl-C.

    Raises:
        Interrupted: `is_interrupted` returned True.
        PlacementError: they were not free together within `timeout_s` seconds.
    """
    wait, hold_s = _DeviceWait(pools, timeout_s, is_interrupted), _FIRST_HOLD_S
    while True:
        groups: dict[str, PlacementGroup] = {}
        try:
            for name, pool in sorted(pools.items(), key=_rank_size, reverse=True):  # which is stable
                groups[name] = _request(pool)
            nodes = wait.nodes_of(groups, hold_s)
        except BaseException:
            _release(groups)
            raise
        if nodes is not None:
            return {name: ReservedDevices(group, bundles_by_rank(nodes[name])) for name, group in groups.items()}
        _release(groups)
        wait.pause(_RANDOM.uniform(0.0, min(hold_s, _MOST_PAUSE_S)), list(pools))
        hold_s *= 2


class _DeviceWait:
    """The wait for the devices of pools, with its deadline and its messages; arguments are those of `reserve`."""

    def __init__(self, pools: Mapping[str, Pool], timeout_s: float, is_interrupted: Callable[[], bool]) -> None:
        self._pools, self._timeout_s = pools, timeout_s
        self._is_interrupted = is_interrupted
        self._began, self._is_warned = time.monotonic(), False

    def nodes_of(self, groups: Mapping[str, PlacementGroup], hold_s: float) -> dict[str, dict[int, str]] | None:
        """Wait until all groups have their devices, and return Ray's id of the node of each bundle of each.

        Returns None once some of the groups, but not all, have had theirs for `hold_s` seconds.
        """
        held_since = time.monotonic()
        while True:
            tables = {name: ask_ray(partial(placement_group_table, group)) for name, group in groups.items()}
            waiting = [name for name, table in tables.items() if table.get("state") != "CREATED"]
            if not waiting:
                return {name: table["bundles_to_node_id"] for name, table in tables.items()}
            if len(waiting) == len(groups):
                held_since = time.monotonic()
            if time.monotonic() - held_since > hold_s:
                return None
            self.pause(_LOOK_S, waiting)

    def pause(self, seconds: float, waiting: Sequence[str]) -> None:
        """Sleep; once the wait has taken `_WARN_S`, warn that these pools wait.

        Raises:
            Interrupted: the wait is to stop.
            PlacementError: the wait has reached its deadline.
        """
        end, deadline = time.monotonic() + seconds, self._began + self._timeout_s
        while (now := time.monotonic()) < end:
            if self._is_interrupted():
                raise Interrupted
            if now >= self._began + _WARN_S and not self._is_warned:
                self._is_warned = True
                free = ask_ray(ray.available_resources)
                is_idle = self._is_idle(free, waiting)
                reason = "that no node has free, though the cluster is idle" if is_idle else "in use elsewhere"
                logger.warning(
                    "waiting up to %g s for devices %s: %s; %s are free",
                    *(self._timeout_s, reason, self._claims(waiting), listing(free)),
                )
            if now >= deadline:
                raise self._missed(waiting)
            time.sleep(max(0.0, min(_LOOK_S, end - now, deadline - now)))

    def _missed(self, waiting: Sequence[str]) -> PlacementError:
        """Return the error for a wait that has reached its deadline."""
        free = ask_ray(ray.available_resources)
        silence = f"placement.start_timeout_s ({self._timeout_s:g}) passed without {self._claims(waiting)}"
        if self._is_idle(free, waiting):
            return PlacementError(
                f"{silence}; {listing(free)} are free and nothing else uses the cluster, so the pools "
                f"{', '.join(self._pools)} don't fit its nodes together; lower "
                f"{', '.join(f'placement.pools.{name}.{_claim_keys(self._pools[name])}' for name in waiting)}, or the "
                "ranks of a pool"
            )
        return UnavailableError(
            f"{silence}; {listing(free)} are free; wait for others to finish, raise the limit, or lower "
            f"{', '.join(f'placement.pools.{name}.ranks' for name in waiting)}"
        )

    def _is_idle(self, free: Mapping[str, float], waiting: Sequence[str]) -> bool:
        """Return whether all devices are free or those of the pools that don't wait: no other run holds any."""
        total = ask_ray(ray.cluster_resources)
        placed = [_bundle(pool) for name, pool in self._pools.items() if name not in waiting for _ in range(pool.ranks)]
        held = {kind: sum(bundle.get(kind, 0.0) for bundle in placed) for kind in ("CPU", "GPU")}
        return all(free.get(kind, 0.0) + held[kind] > total.get(kind, 0.0) - 1e-3 for kind in held)

    def _claims(self, names: Sequence[str]) -> str:
        return " and ".join(
            f"{self._pools[name].ranks} ranks of {listing(_bundle(self._pools[name]))} each for pool {name}"
            for name in names
        )


def _bundle(pool: Pool) -> dict[str, float]:
    """Return what a rank claims."""
    claims = {"CPU": pool.cpus_per_rank, "GPU": pool.gpus_per_rank}
    return {kind: number for kind, number in claims.items() if number > 0}


def _rank_size(named: tuple[str, Pool]) -> tuple[float, float]:
    """Return the GPUs and CPU cores that a rank of a pool claims."""
    _, pool = named
    return pool.gpus_per_rank, pool.cpus_per_rank


def _claim_keys(pool: Pool) -> str:
    """Return the keys of what a rank claims; which of them fits no node, Ray doesn't say."""
    return "gpus_per_rank or .cpus_per_rank" if pool.gpus_per_rank else "cpus_per_rank"


def _request(pool: Pool) -> PlacementGroup:
    """Request a placement group for a pool, without waiting for its devices."""
    return ask_ray(lambda: placement_group([_bundle(pool)] * pool.ranks, strategy="PACK"))


def _release(groups: Mapping[str, PlacementGroup]) -> None:
    """Give up the devices of placement groups, and the requests for them."""
    for name, group in groups.items():
        try:
            ask_ray(partial(remove_placement_group, group))
        except Exception as error:  # noqa: BLE001 - the others are given up, too
            logger.warning("the devices of pool %s could not be given back: %s", name, error)

"""Reservations: the devices of pools on a cluster that others may use, as Ray's placement groups.

Layouts number the ranks of a tensor- or expert-parallel group consecutively, but Ray doesn't place the bundles of a
group in their order: it sorts them by an unstable sort, which permutes equal bundles if there are more than 16. So
ranks are assigned to bundles only once these have their nodes. Invariant (tests/unit/distributed/test_reservations.py):

1. the ranks on a node are consecutive; nodes with more of a pool's ranks come first.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

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
from rlpack.distributed.errors import PlacementError

logger = logging.getLogger(__name__)

# After waiting this long for devices, a warning says what is free.
_WARN_S = 10.0
# Seconds after the end of a wait within which its answer arrives.
_ANSWER_S = 10.0


@dataclass(frozen=True)
class Reservation:
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


def reserve(name: str, pool: Pool, timeout_s: float) -> Reservation:
    """Reserve the devices of a pool.

    Raises:
        PlacementError: they were not free within `timeout_s` seconds.
    """
    bundle = {"CPU": pool.cpus_per_rank, "GPU": pool.gpus_per_rank}
    bundles = [{kind: n for kind, n in bundle.items() if n > 0}] * pool.ranks
    group = ask_ray(lambda: placement_group(bundles, strategy="PACK"))
    if not _is_reserved(group, min(_WARN_S, timeout_s)):
        logger.warning(
            "pool %s waits up to %g s for devices in use elsewhere: its %d ranks claim %s each, but only %s are free",
            *(name, timeout_s, pool.ranks, listing(bundle), listing(ask_ray(ray.available_resources))),
        )
        if not _is_reserved(group, max(0.0, timeout_s - _WARN_S)):
            ask_ray(lambda: remove_placement_group(group))
            raise PlacementError(
                f"pool {name} did not get its {pool.ranks} ranks within {timeout_s:g} s; "
                f"{listing(ask_ray(ray.available_resources))} are free; wait for others to finish, or lower "
                f"placement.pools.{name}.ranks"
            )
    return Reservation(group, bundles_by_rank(ask_ray(lambda: placement_group_table(group))["bundles_to_node_id"]))


def _is_reserved(group: PlacementGroup, timeout_s: float) -> bool:
    """Wait until a placement group has its devices; return whether it has."""
    return ask_ray(lambda: group.wait(timeout_s), timeout_s + _ANSWER_S)

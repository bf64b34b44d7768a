"""Checks that a cluster has the devices that pools claim. Imports no Ray, so `rlpack submit` uses it, too."""

from collections.abc import Mapping, Sequence
from math import inf

from rlpack.config.schema import Pool
from rlpack.distributed.errors import PlacementError

# Ranks may share a core, for a test run; a mistyped number of ranks would only exhaust the machine's memory.
MAX_RANKS_PER_CORE = 32


def check_capacity(
    pools: Mapping[str, Pool],
    nodes: Sequence[Mapping[str, float]],
    free: Mapping[str, float] | None,
    *,
    extra: float = 0,
) -> None:
    """Reject pools that the cluster can't hold even when it is idle.

    Args:
        pools: the pools that run at the same time.
        nodes: CPU cores and GPUs of each node.
        free: those that are idle now; None if unknown.
        extra: CPU cores that the job's driver claims in addition.

    Raises:
        PlacementError: the cluster has too few devices, or no node has those of a rank; the message says what is free.
    """
    free_now = "" if free is None else f" ({listing(free)} free)"
    total = {kind: sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU")}
    claimed = {
        "CPU": extra + sum(pool.ranks * pool.cpus_per_rank for pool in pools.values()),
        "GPU": sum(pool.ranks * pool.gpus_per_rank for pool in pools.values()),
    }
    driver = f" and the driver (job.driver_cpus {extra:g})" if extra else ""
    for kind, field in (("CPU", "cpus_per_rank"), ("GPU", "gpus_per_rank")):
        if claimed[kind] > total[kind]:
            raise PlacementError(
                f"the pools {', '.join(pools)}{driver * (kind == 'CPU')} ask for {claimed[kind]:g} {kind}, the cluster "
                f"has {total[kind]:g}{free_now}; lower placement.pools.*.ranks or .{field}"
            )
    for name, pool in pools.items():
        room = sum(_ranks_on(node, pool) for node in nodes)
        if room < pool.ranks:
            raise PlacementError(
                f"pool {name} asks for {pool.ranks} ranks of {pool.cpus_per_rank:g} CPU and {pool.gpus_per_rank:g} "
                f"GPU, each on one node; the cluster's {len(nodes)} nodes have room for {room:g} of them{free_now}; "
                f"lower placement.pools.{name}.ranks or {' or '.join(_limiting(nodes, pool))}"
            )


def listing(resources: Mapping[str, float]) -> str:
    """Format CPU cores and GPUs.

    >>> listing({"CPU": 2.0, "memory": 1e9})
    '2 CPU, 0 GPU'
    """
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))


def _limiting(nodes: Sequence[Mapping[str, float]], pool: Pool) -> list[str]:
    """Return the keys of the claims for which the nodes have no room, each taken alone; both if only together."""
    alone = {
        ".cpus_per_rank": sum(_times(node, "CPU", pool.cpus_per_rank) for node in nodes),
        ".gpus_per_rank": sum(_times(node, "GPU", pool.gpus_per_rank) for node in nodes),
    }
    return [key for key, room in alone.items() if room < pool.ranks] or list(alone)


def _ranks_on(node: Mapping[str, float], pool: Pool) -> float:
    """Return how many ranks of a pool fit on a node."""
    return min(_times(node, "CPU", pool.cpus_per_rank), _times(node, "GPU", pool.gpus_per_rank))


def _times(node: Mapping[str, float], kind: str, claim: float) -> float:
    """Return how many ranks that claim this much fit on a node; infinity for those that claim nothing."""
    if claim == 0:
        return inf
    # Floating point: 0.3 // 0.1 is 2.
    return (node.get(kind, 0.0) + 1e-6) // claim

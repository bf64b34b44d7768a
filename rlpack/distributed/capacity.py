"""Whether a cluster has the devices that pools ask for; no Ray in this file, so `rlpack submit` asks it, too."""

from collections.abc import Mapping, Sequence

from rlpack.config.schema import Pool
from rlpack.distributed.errors import PlacementError


def check_capacity(
    pools: Mapping[str, Pool],
    nodes: Sequence[Mapping[str, float]],
    free: Mapping[str, float] | None,
    *,
    extra: float = 0,
) -> None:
    """Refuse pools that the whole cluster could never hold, even if nobody else used it.

    Args:
        pools: the pools that run at one time.
        nodes: what each node has, in CPU cores and GPUs.
        free: what of it nobody holds now; None where it isn't known.
        extra: CPU cores that the job's driver claims beside the pools.

    Raises:
        PlacementError: there are too few devices in all, or no node has what a rank needs; it says what is free.
    """
    said_free = "" if free is None else f" ({listing(free)} free)"
    total = {kind: sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU")}
    asked = {
        "CPU": extra + sum(pool.ranks * pool.cpus_per_rank for pool in pools.values()),
        "GPU": sum(pool.ranks * pool.gpus_per_rank for pool in pools.values()),
    }
    driver = f" and the driver (job.driver_cpus {extra:g})" if extra else ""
    for kind, field in (("CPU", "cpus_per_rank"), ("GPU", "gpus_per_rank")):
        if asked[kind] > total[kind]:
            raise PlacementError(
                f"the pools {', '.join(pools)}{driver * (kind == 'CPU')} ask for {asked[kind]:g} {kind}, the cluster "
                f"has {total[kind]:g}{said_free}; lower placement.pools.*.ranks or .{field}"
            )
    for name, pool in pools.items():
        room = sum(_ranks_on(node, pool) for node in nodes)
        if room < pool.ranks:
            raise PlacementError(
                f"pool {name} asks for {pool.ranks} ranks of {pool.cpus_per_rank:g} CPU and {pool.gpus_per_rank:g} "
                f"GPU, each on one node; the cluster's {len(nodes)} nodes have room for {room} of them{said_free}; "
                f"lower placement.pools.{name}.ranks or .cpus_per_rank"
            )


def listing(resources: Mapping[str, float]) -> str:
    """Return CPU cores and GPUs in words.

    >>> listing({"CPU": 2.0, "memory": 1e9})
    '2 CPU, 0 GPU'
    """
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))


def _ranks_on(node: Mapping[str, float], pool: Pool) -> int:
    """Return how many ranks of a pool a node could hold."""
    # Of cores in floating point: 0.3 // 0.1 is 2.
    cores = int((node.get("CPU", 0.0) + 1e-6) // pool.cpus_per_rank)
    return cores if pool.gpus_per_rank == 0 else min(cores, int((node.get("GPU", 0.0) + 1e-6) // pool.gpus_per_rank))

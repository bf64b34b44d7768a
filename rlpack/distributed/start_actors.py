"""Start the Ray actors of a pool."""

from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpack.config.schema import Pool
from rlpack.distributed.context import RankContext
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.process import driver_import_path
from rlpack.distributed.rank_actor import RankActor
from rlpack.distributed.reservations import ReservedDevices


def _strategy(reserved: ReservedDevices | None, rank: int) -> PlacementGroupSchedulingStrategy | str:
    """Return Ray's scheduling strategy for a rank: its bundle of the reservation, or wherever there is room."""
    if reserved is None:
        return "DEFAULT"
    return PlacementGroupSchedulingStrategy(reserved.group, placement_group_bundle_index=reserved.bundles[rank])


def start_actors(name: str, pool: Pool, reserved: ReservedDevices | None, silence_s: float | None) -> list[Any]:
    """Start the processes of a pool."""
    threads = max(1, int(pool.cpus_per_rank))
    device = "cuda" if pool.gpus_per_rank > 0 else "cpu"
    actor_class, layout = ray.remote(RankActor), ParallelLayout(dp_shard=pool.ranks)
    return [
        actor_class.options(
            num_cpus=pool.cpus_per_rank,
            num_gpus=pool.gpus_per_rank,
            scheduling_strategy=_strategy(reserved, rank),
        ).remote(RankContext(name, rank, layout, device), threads, driver_import_path(), silence_s)
        for rank in range(pool.ranks)
    ]

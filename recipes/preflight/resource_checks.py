"""Resource checks: the pools and the object store against this machine, before Ray is started."""

import os

import torch

from rlpack.config.roles import pools_in_use
from rlpack.config.schema import Config
from rlpack.distributed.errors import PlacementError
from rlpack.distributed.ray_connection import MAX_RANKS_PER_CORE, check_object_store


def check_resources(config: Config) -> None:
    """Refuse pools and an object store that this machine can't hold.

    With `placement.address` nothing is checked here: the cluster's resources are checked when the pools are reserved.

    Raises:
        PlacementError: the pools need more GPUs than there are or more ranks than a machine of this size can run, or
            the object store needs more memory than is free.
    """
    placement = config.placement
    if placement.address is not None:
        return
    names, pools = zip(*pools_in_use(config).items(), strict=True)
    gpus = sum(pool.ranks * pool.gpus_per_rank for pool in pools)
    if gpus > torch.cuda.device_count():
        raise PlacementError(
            f"placement.pools ({', '.join(names)}) ask for {gpus:g} GPU, and this machine has "
            f"{torch.cuda.device_count()} that PyTorch can use; set placement=cpu, lower placement.pools.*.ranks or "
            ".gpus_per_rank, or join a cluster by placement.address"
        )
    cpus = sum(pool.ranks * max(1.0, pool.cpus_per_rank) for pool in pools)
    limit = MAX_RANKS_PER_CORE * (os.cpu_count() or 1)
    if cpus > limit:
        raise PlacementError(
            f"placement.pools ({', '.join(names)}) need {cpus:,g} CPUs, and this machine has {os.cpu_count()}; at most "
            f"{MAX_RANKS_PER_CORE} ranks may share one, which makes {limit:,}; lower placement.pools.*.ranks or "
            ".cpus_per_rank, or join a cluster by placement.address"
        )
    check_object_store(placement)

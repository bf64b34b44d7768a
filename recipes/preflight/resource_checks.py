"""What the pools of a run of this machine alone ask of it, looked at before Ray is started for them."""

import os

import torch

from rlpack.config.roles import pools_in_use
from rlpack.config.schema import Config
from rlpack.distributed.cluster import check_object_store
from rlpack.distributed.errors import PlacementError

# Ranks may share a core, for a trial; a mistyped number of them would only exhaust the machine's memory.
RANKS_A_CORE = 32


def check_machine(config: Config) -> None:
    """Refuse pools and an object store that this machine can't hold; a cluster that is joined is asked once it answers.

    Raises:
        PlacementError: more GPUs are asked for than there are, more ranks than any machine of its size could run, or
            more memory for objects than is free.
    """
    placement = config.placement
    if placement.address is not None:
        return
    names, pools = zip(*pools_in_use(config).items(), strict=True)
    gpus = sum(pool.ranks * pool.gpus_per_rank for pool in pools)
    if gpus > torch.cuda.device_count():
        raise PlacementError(
            f"placement.pools ({', '.join(names)}) ask for {gpus:g} GPUs, and this machine has "
            f"{torch.cuda.device_count()} that PyTorch can use; lower placement.pools.*.ranks or .gpus_per_rank, or "
            "join a cluster by placement.address"
        )
    slots, limit = (
        sum(pool.ranks * max(1.0, pool.cpus_per_rank) for pool in pools),
        RANKS_A_CORE * (os.cpu_count() or 1),
    )
    if slots > limit:
        raise PlacementError(
            f"placement.pools ({', '.join(names)}) ask for {slots:,g} CPUs, and this machine has {os.cpu_count()}; up "
            f"to {RANKS_A_CORE} ranks may share one, which makes {limit:,}; lower placement.pools.*.ranks or "
            ".cpus_per_rank, or join a cluster by placement.address"
        )
    check_object_store(placement)

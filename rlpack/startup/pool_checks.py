"""Check the pools and the object store against this machine, or the cluster that a run joins."""

import ctypes
import math
import os
import re
from pathlib import Path

from rlpack.config.roles import pools_in_use
from rlpack.config.schema import Config
from rlpack.distributed.capacity import MAX_RANKS_PER_CORE
from rlpack.distributed.errors import PlacementError

_DEVICES = Path("/dev")
_DEVICE = re.compile(r"nvidia\d+")
# Device files of GPUs that are counted in other ways: AMD, WSL 2, Jetson.
_OTHER_GPUS = ("kfd", "dxg", "nvhost-ctrl", "nvgpu")


def check_machine(config: Config, num_gpus: float) -> None:
    """Refuse pools that this machine can't hold; with `placement.address` they run elsewhere.

    Args:
        config: the configuration.
        num_gpus: GPUs of this machine, or an upper bound.

    Raises:
        PlacementError: the pools need more GPUs than there are or more ranks than a machine of this size can run, or
            the object store needs more memory than is free.
    """
    if config.placement.address is not None:
        return
    names, pools = zip(*pools_in_use(config).items(), strict=True)
    gpus = sum(pool.ranks * pool.gpus_per_rank for pool in pools)
    if gpus > num_gpus:
        raise PlacementError(
            f"placement.pools ({', '.join(names)}) ask for {gpus:g} GPU, but this machine has {num_gpus:g} that "
            "PyTorch can use; set placement=cpu, lower placement.pools.*.ranks or .gpus_per_rank, or join a cluster by "
            "placement.address"
        )
    cpus = sum(pool.ranks * max(1.0, pool.cpus_per_rank) for pool in pools)
    limit = MAX_RANKS_PER_CORE * (os.cpu_count() or 1)
    if cpus > limit:
        raise PlacementError(
            f"placement.pools ({', '.join(names)}) need {cpus:,g} CPUs, but this machine has {os.cpu_count()}; at most "
            f"{MAX_RANKS_PER_CORE} ranks may share one, which makes {limit:,}; lower placement.pools.*.ranks or "
            ".cpus_per_rank, or join a cluster with placement.address"
        )
    if config.placement.object_store_gb is not None:
        from rlpack.distributed.ray_connection import check_object_store  # imports Ray, which takes a third of a second

        check_object_store(config.placement)


def check_cluster(config: Config) -> None:
    """Raise if no Ray cluster answers at `placement.address`; a user's recipe may not use it.

    Raises:
        PlacementError: no process listens there, or the process that does is stopped.
    """
    if config.placement.address is not None and config.recipe.target.startswith("rlpack."):
        from rlpack.distributed import ray_connection  # imports Ray, which takes a third of a second

        ray_connection.check_cluster(config.placement)


def most_gpus(devices: Path = _DEVICES) -> float:
    """Return an upper bound on the GPUs that PyTorch can use, without importing it; infinite if unknown."""
    if any((devices / name).exists() for name in _OTHER_GPUS):
        return math.inf
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver
        return 0
    count = sum(_DEVICE.fullmatch(path.name) is not None for path in devices.iterdir())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return min(count, len([name for name in visible.split(",") if name.strip()])) if visible is not None else count

"""Roles from configuration: each in its pool, with its batching."""

from typing import Any

from rlpack.config.roles import pool_of, role_batching
from rlpack.config.schema import Config
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.host import load_class
from rlpack.distributed.worker_group import WorkerGroup


def start_roles(
    cluster: Cluster, config: Config, names: list[str], settings: tuple[Any, ...]
) -> dict[str, WorkerGroup[Any]]:
    """Start the roles `names` and return their handles.

    Each rank builds its role by `Class.from_settings(context, *settings)`. Only the actor takes optimizer steps, so
    only its batches are cut into mini-batches.

    Raises:
        PlacementError: a class can't be loaded, or the cluster is too small.
        RoleError: a rank failed to build its role.
    """
    kinds = {name: load_class(config.roles[name].target) for name in names}
    pools = cluster.open_pools(list(dict.fromkeys(pool_of(config, name) for name in names)))
    groups: dict[str, WorkerGroup[Any]] = {}
    for name in names:
        ranks = pools[pool_of(config, name)]
        ranks.start(name, config.roles[name].target, settings)
        mini_batch_size = config.trainer.mini_batch_size if name == "actor" else None
        groups[name] = WorkerGroup(name, ranks, role_batching(config, name), mini_batch_size, kinds[name])
    return groups

"""Starts the roles of a configuration, each in its pool and with its batching."""

from collections.abc import Mapping
from typing import Any

from rlpack.config.layout_sizes import layout_sizes
from rlpack.config.roles import pool_of, role_batching
from rlpack.config.schema import Config
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.column_contract import producers_of
from rlpack.distributed.dispatch import dispatched_methods
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.process import load_class
from rlpack.distributed.spread_groups import warn_of_spread_groups
from rlpack.distributed.trainable import Trainable
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Cost

# Roles that run the trained model on whole sequences: their ranks are balanced by FLOPs.
_RUN_THE_MODEL = ("actor", "critic", "reference")
# Roles that aren't trained and read a model from the run's directory.
_READ_THE_RUN = ("reference",)


def start_roles(
    cluster: Cluster,
    config: Config,
    names: list[str],
    settings: tuple[Any, ...],
    *,
    cost: Cost | None = None,
    layouts: Mapping[str, ParallelLayout] | None = None,
) -> dict[str, WorkerGroup[Any]]:
    """Start the roles `names` and return their handles.

    Each rank builds its role by `Class.from_settings(context, *settings, **arguments)`, with the role's `arguments`.

    Args:
        cluster: the cluster to start them on.
        config: the whole configuration.
        names: names of the roles.
        settings: what each rank builds its role from.
        cost: cost model of a sequence, used to balance the ranks of roles that run the model; None counts token slots.
        layouts: layouts of roles, instead of those in the configuration.

    Raises:
        PlacementError: a class can't be loaded, the cluster is too small, or a node does not share the run's directory.
        RoleError: a rank failed to build its role.
    """
    role_classes = {name: load_class(config.roles[name].target) for name in names}
    pools = cluster.open_pools(list(dict.fromkeys(pool_of(config, name) for name in names)))
    trained = {pool_of(config, name) for name in names if issubclass(role_classes[name], Trainable)}
    for name, ranks in pools.items():
        ranks.is_restartable = name not in trained
    layout_of = {
        name: (layouts or {}).get(name)
        or ParallelLayout(**layout_sizes(config, name, pools[pool_of(config, name)].num_ranks))
        for name in names
    }
    nodes = {name: ranks.nodes for name, ranks in pools.items()}
    warn_of_spread_groups(layout_of, {name: pool_of(config, name) for name in names}, nodes)
    cluster.check_run_dir(trained | {pool_of(config, name) for name in names if name in _READ_THE_RUN})
    contracts = {
        f"{name}.{method}": dispatch.columns
        for name in names
        for method, dispatch in dispatched_methods(role_classes[name]).items()
    }
    groups: dict[str, WorkerGroup[Any]] = {}
    for name in names:
        ranks = pools[pool_of(config, name)]
        ranks.start_role(name, config.roles[name].target, settings, config.roles[name].arguments, layout_of[name])
        mini_batch_size = config.trainer.mini_batch_size if issubclass(role_classes[name], Trainable) else None
        groups[name] = WorkerGroup(
            name,
            ranks,
            role_batching(config, name),
            mini_batch_size,
            role_classes[name],
            cost=cost if name in _RUN_THE_MODEL else None,
            producers=producers_of(contracts),
            layout=layout_of[name],
        )
    return groups

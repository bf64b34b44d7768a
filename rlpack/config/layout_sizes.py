"""The parallel sizes of each role, inherited from the actor where null, and whether they fit the role's pool.

Sizes are checked before any process starts: with wrong ones, ranks would wait for each other in a process group.
"""

from math import prod
from typing import Any

from rlpack.config.roles import WITH_LAYOUTS, pool_of, role_parallel
from rlpack.config.schema import Config

# Sizes whose product is the number of ranks; ranks of ep are taken from those of dp_shard and cp.
SIZES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


def layout_sizes(config: Config, role: str, ranks: int) -> dict[str, int]:
    """Return the sizes of a role's `ParallelLayout` over the ranks of its pool; without a model, all are data ranks.

    >>> layout_sizes(Config(), "actor", ranks=2)
    {'dp_replicate': 1, 'dp_shard': 2, 'cp': 1, 'tp': 1, 'pp': 1, 'ep': 1}
    """
    if role not in WITH_LAYOUTS:
        return {"dp_shard": ranks}
    parallel = role_parallel(config, role)
    sizes = {name: getattr(parallel, name) for name in SIZES}
    others = prod(size for name, size in sizes.items() if name != "dp_shard")
    return sizes | {"dp_shard": ranks // others if parallel.dp_shard == -1 else parallel.dp_shard, "ep": parallel.ep}


def layout_fits(config: Config, role: str) -> bool:
    """Return whether a role's layout fits the ranks of its pool.

    >>> layout_fits(Config(), "actor"), layout_fits(with_sizes(Config(), "actor", tp=5), "actor")
    (True, False)
    """
    ranks, parallel = config.placement.pools[pool_of(config, role)].ranks, role_parallel(config, role)
    if parallel.dp_shard == 0 or (parallel.vpp > 1 and parallel.pp == 1):
        return False
    sizes = layout_sizes(config, role, ranks)
    return prod(sizes[name] for name in SIZES) == ranks and sizes["dp_shard"] * sizes["cp"] % sizes["ep"] == 0


def with_sizes(config: Config, role: str, **sizes: Any) -> Config:
    """Return a configuration in which a role's section `parallel` has other values.

    >>> with_sizes(Config(), "critic", tp=2).critic.parallel.tp
    2
    """
    section = getattr(config, role)
    parallel = section.parallel.model_copy(update=sizes)
    return config.model_copy(update={role: section.model_copy(update={"parallel": parallel})})

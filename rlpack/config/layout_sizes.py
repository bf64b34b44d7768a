"""The parallel sizes of each role, inherited from the actor where null, and whether they fit the role's pool.

Sizes are checked before any process starts: with wrong ones, ranks would wait for each other in a process group.
"""

from collections.abc import Iterator
from math import prod

from rlpack.config.roles import WITH_LAYOUTS, chunks_of, own_parallel, pool_of, role_parallel, started_roles
from rlpack.config.schema import Config

# Sizes whose product is the number of ranks; ranks of ep are taken from those of dp_shard and cp.
_SIZES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


def layout_sizes(config: Config, role: str, ranks: int) -> dict[str, int]:
    """Return the sizes of a role's `ParallelLayout` over the ranks of its pool; without a model, all are data ranks.

    >>> layout_sizes(Config(), "actor", ranks=2)
    {'dp_replicate': 1, 'dp_shard': 2, 'cp': 1, 'tp': 1, 'pp': 1, 'ep': 1}
    """
    if role not in WITH_LAYOUTS:
        return {"dp_shard": ranks}
    parallel = role_parallel(config, role)
    sizes = {name: getattr(parallel, name) for name in _SIZES}
    others = prod(size for name, size in sizes.items() if name != "dp_shard")
    return sizes | {"dp_shard": ranks // others if parallel.dp_shard == -1 else parallel.dp_shard, "ep": parallel.ep}


def layout_problems(config: Config) -> Iterator[str]:
    """Yield the layouts of started roles that don't fit the ranks of their pools, with the reasons.

    A layout that several roles of a pool inherit from the actor is named once.
    """
    pools, seen = config.placement.pools, set()
    for role in started_roles(config) if pools else ():  # another rule refuses a run without pools
        place = pool_of(config, role), role_parallel(config, role) if role in WITH_LAYOUTS else None
        if place[1] is not None and place[0] in pools and place not in seen:
            seen.add(place)
            yield from _problems(config, role)


def cp_for(config: Config, role: str, slots: int, per_rank: int) -> int | None:
    """Return the smallest cp with at most `per_rank` of the `slots` on each rank; None if the pool allows none."""
    pools = config.placement.pools
    pool = pools.get(pool_of(config, role)) if pools else None
    if pool is None:  # another rule refuses it
        return None
    parallel = role_parallel(config, role)
    ranks = pool.ranks // (parallel.dp_replicate * parallel.tp * parallel.pp)
    sizes = [cp for cp in range(1, ranks + 1) if ranks % cp == 0]
    return next((cp for cp in sizes if cp * per_rank >= slots + -slots % chunks_of(parallel, cp)), None)


def cp_for_budget(config: Config, role: str, slots: int, budget: int) -> int | None:
    """Return the smallest cp with which a sequence fits, if a microbatch of the role has `budget` slots on all ranks.

    None if the pool allows none.
    """
    return cp_for(config, role, slots, budget // role_parallel(config, role).cp)


def nearest_size(config: Config, role: str, name: str, *multiples: int) -> int:
    """Return the `cp` or `tp` nearest to the role's that divides all `multiples` and fits the ranks of its pool."""
    parallel, ranks = role_parallel(config, role), config.placement.pools[pool_of(config, role)].ranks
    others = prod(getattr(parallel, other) for other in _SIZES if other not in {name, "dp_shard"})
    fitting = [
        size
        for size in range(1, min(multiples) + 1)
        if all(multiple % size == 0 for multiple in multiples) and ranks % (size * others) == 0
    ]
    return min(fitting, key=lambda size: abs(size - getattr(parallel, name)), default=1)


def nearest_ep(config: Config, role: str, num_experts: int = 0) -> int:
    """Return the `ep` nearest to the role's that fits.

    It divides dp_shard · cp, and ep · tp divides `num_experts`, which is 0 while the model isn't known.
    """
    sizes = layout_sizes(config, role, config.placement.pools[pool_of(config, role)].ranks)
    ranks = sizes["dp_shard"] * sizes["cp"]
    fitting = [ep for ep in range(1, ranks + 1) if ranks % ep == 0 and num_experts % (ep * sizes["tp"]) == 0]
    return min(fitting, key=lambda ep: abs(ep - sizes["ep"]), default=1)


def most_stages(config: Config, role: str, num_layers: int) -> int:
    """Return the largest `pp` of a role with a layer for each stage that fits the ranks of its pool."""
    parallel, ranks = role_parallel(config, role), config.placement.pools[pool_of(config, role)].ranks
    others = prod(getattr(parallel, name) for name in _SIZES if name not in {"pp", "dp_shard"})
    return max(pp for pp in range(1, num_layers + 1) if pp == 1 or ranks % (pp * others) == 0)


def _problems(config: Config, role: str) -> Iterator[str]:
    """Yield why a role's layout doesn't fit, and the nearest one that does."""
    pool, parallel = pool_of(config, role), role_parallel(config, role)
    ranks = config.placement.pools[pool].ranks
    key = _key(config, role, "dp_shard")
    if parallel.dp_shard == 0:
        yield f"{key} is 0; set the number of ranks that share the weights, or -1 for the ranks that are left"
        return
    if parallel.vpp > 1 and parallel.pp == 1:
        yield (
            f"{_key(config, role, 'vpp')} is {parallel.vpp}, but the {role} has no pipeline stages "
            f"({_key(config, role, 'pp')}=1); set {role}.parallel.vpp=1, or {role}.parallel.pp to 2 or more"
        )
        return
    others = {name: getattr(parallel, name) for name in _SIZES if name != "dp_shard"}
    product = prod(others.values())
    where = f"the {ranks} rank(s) of placement.pools.{pool}"
    if ranks % product:
        named = " × ".join(f"{_key(config, role, name)} ({size})" for name, size in others.items() if size > 1)
        is_or_are = "doesn't divide" if named.count("×") == 0 else f"is {product}, which doesn't divide"
        yield (
            f"{named} {is_or_are} {where}, on which the {role} runs; set {_nearest(config, role, others, ranks)}, or "
            f"placement.pools.{pool}.ranks={-(-ranks // product) * product}"
        )
    elif parallel.dp_shard not in (-1, ranks // product):
        needed = product * parallel.dp_shard
        yield (
            f"{key} is {parallel.dp_shard}, so the {role} needs {needed} ranks, and placement.pools.{pool} has "
            f"{ranks}; set {key} to {ranks // product}, or to -1 for the ranks that are left, or "
            f"placement.pools.{pool}.ranks={needed}"
        )
    elif (shards := ranks * parallel.cp // product) % parallel.ep:
        yield (
            f"{_key(config, role, 'ep')} ({parallel.ep}) doesn't divide the {shards} rank(s) of dp_shard · cp, from "
            f"which the {role} takes the ranks that share experts; set {role}.parallel.ep={nearest_ep(config, role)}"
        )


def _nearest(config: Config, role: str, sizes: dict[str, int], ranks: int) -> str:
    """Return the smallest change of a single size after which the product divides the ranks, as an override."""
    changes = []
    for name, size in sizes.items():
        rest = prod(other for one, other in sizes.items() if one != name)
        fitting = [count for count in range(1, ranks + 1) if ranks % (count * rest) == 0]
        changes += [(abs(count - size), f"{role}.parallel.{name}={count}") for count in fitting if size > 1]
    return min(changes)[1] if changes else ", ".join(f"{role}.parallel.{name}=1" for name in sizes)


def _key(config: Config, role: str, name: str) -> str:
    """Return the key that sets a size of a role: its own, or the actor's that it inherits."""
    return f"{'actor' if role == 'actor' or dict(own_parallel(config, role))[name] is None else role}.parallel.{name}"

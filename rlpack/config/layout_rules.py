"""Rules about layouts: the sizes of a role have to fit the ranks of its pool.

They are checked before any process starts: with wrong ones, ranks would wait for each other in a process group.
"""

from collections.abc import Iterator
from math import prod

from rlpack.config.layout_remedies import alternatives, more_ranks, nearest, nearest_layout, pool_ranks, remedy
from rlpack.config.layout_sizes import SIZES
from rlpack.config.roles import WITH_LAYOUTS, own_parallel, pool_of, role_parallel, started_roles
from rlpack.config.schema import Config
from rlpack.counted import counted


def layout_problems(config: Config) -> Iterator[str]:
    """Yield the layouts of started roles that don't fit the ranks of their pools, with the reasons.

    A layout that several roles of a pool inherit from the actor is named once.
    """
    pools, seen = config.placement.pools, set()
    for role in started_roles(config) if pools else ():  # another rule refuses a run without pools
        place = pool_of(config, role), role_parallel(config, role) if role in WITH_LAYOUTS else None
        if place[1] is not None and place[0] in pools and place not in seen:
            seen.add(place)
            if problem := _problem(config, role):
                yield problem


def _problem(config: Config, role: str) -> str | None:
    """Return why a role's layout doesn't fit, and the nearest ones that do; None if it fits."""
    parallel, ranks, pool = role_parallel(config, role), pool_ranks(config, role), pool_of(config, role)
    key = _key(config, role, "dp_shard")
    if parallel.dp_shard == 0:
        return f"{key} is 0; set the number of ranks that share the weights, or -1 for the ranks that are left"
    others = {name: getattr(parallel, name) for name in SIZES if name != "dp_shard"}
    product = prod(others.values())
    # Only where every remedy breaks the layout or the token budget of another role.
    elsewhere = f"the sizes of {role}.parallel so that their product, without ep and vpp, is {ranks}"
    if ranks % product:
        named = " × ".join(f"{_key(config, role, name)} ({size})" for name, size in others.items() if size > 1)
        is_or_are = "doesn't divide" if named.count("×") == 0 else f"is {product}, which doesn't divide"
        way_out = alternatives(nearest_layout(config, role), more_ranks(config, role))
        return (
            f"{named} {is_or_are} the {counted(ranks, 'rank')} of placement.pools.{pool}, on which the {role} runs; "
            f"set {way_out or elsewhere}"
        )
    if parallel.dp_shard not in (-1, ranks // product):
        sizes = (remedy(config, role, [{"dp_shard": size}]) for size in (ranks // product, -1))
        way_out = alternatives(*sizes, more_ranks(config, role))
        return (
            f"{key} is {parallel.dp_shard}, so the {role} needs {product * parallel.dp_shard} ranks, but "
            f"placement.pools.{pool} has {ranks}; set {way_out or elsewhere}"
        )
    if parallel.vpp > 1 and parallel.pp == 1:
        remedies = remedy(config, role, [{"vpp": 1}]), remedy(config, role, [{"pp": pp} for pp in range(2, ranks + 1)])
        return (
            f"{_key(config, role, 'vpp')} is {parallel.vpp}, but the {role} has no pipeline stages "
            f"({_key(config, role, 'pp')}=1); set {alternatives(*remedies) or elsewhere}"
        )
    if (shards := ranks * parallel.cp // product) % parallel.ep:
        way_out = remedy(config, role, [{"ep": ep} for ep in nearest(parallel.ep, range(1, shards + 1))])
        return (
            f"{_key(config, role, 'ep')} ({parallel.ep}) doesn't divide the {counted(shards, 'rank')} of dp_shard · "
            f"cp, from which the {role} takes the ranks that share experts; set {way_out or elsewhere}"
        )
    return None


def _key(config: Config, role: str, name: str) -> str:
    """Return the key that sets a size of a role: its own, or the actor's that it inherits."""
    return f"{'actor' if role == 'actor' or dict(own_parallel(config, role))[name] is None else role}.parallel.{name}"

"""Remedies for layouts: changes of sizes, each tried on the configuration before a message names it.

Invariant: a remedy makes the role's layout fit the ranks of its pool and the sizes in its model's configuration, where
they are known. It breaks no layout and no token budget of any role that was valid without it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from math import prod

from rlpack.config.compile_rules import compile_problems
from rlpack.config.errors import ConfigError
from rlpack.config.layout_sizes import SIZES, layout_fits, with_sizes
from rlpack.config.model_sizes import model_fits
from rlpack.config.roles import WITH_LAYOUTS, gpus_per_rank, pool_of, role_parallel, started_roles
from rlpack.config.schema import Config
from rlpack.config.token_budgets import batchings, holds, roles_over_budget

# Values of a role's `parallel`, by name.
Change = Mapping[str, int | str]
# Sizes that follow from the others by default, and these defaults.
_DEFAULTS = {"dp_shard": -1, "ep": 1, "vpp": 1}
# The most ranks that are proposed to share a sequence.
_MOST_CP = 64


def remedy(
    config: Config, role: str, changes: Iterable[Change], accepts: Callable[[Config], bool] = lambda _: True
) -> str | None:
    """Return the first change that works, as overrides; None if none does.

    Where no change works alone, each is tried together with the defaults of dp_shard, ep and vpp.

    Args:
        config: the whole configuration.
        role: whose sizes are changed.
        changes: of single sizes, best first.
        accepts: whether the model can be run with a changed configuration.
    """
    refused = _refused(config)
    for change in _with_defaults(config, role, list(changes)):
        changed = with_sizes(config, role, **change)
        if _fits(changed, role) and _refused(changed) <= refused and accepts(changed):
            return overrides(role, change)
    return None


def overrides(role: str, change: Change) -> str:
    """Return a change as overrides.

    >>> overrides("critic", {"tp": 1, "dp_shard": -1})
    'critic.parallel.tp=1 critic.parallel.dp_shard=-1'
    """
    return " ".join(f"{role}.parallel.{name}={value}" for name, value in change.items())


def nearest(value: int, sizes: Iterable[int]) -> list[int]:
    """Return sizes in the order of their distance to a value, the smaller of two first.

    >>> nearest(3, [1, 2, 4])
    [2, 4, 1]
    """
    return sorted(sizes, key=lambda size: (abs(size - value), size))


def nearest_layout(config: Config, role: str) -> str | None:
    """Return the smallest change of a single size that works, else one of several sizes, as overrides."""
    parallel, divisors = role_parallel(config, role), _divisors(pool_ranks(config, role))
    sizes = {name: size for name in SIZES if name != "dp_shard" and (size := getattr(parallel, name)) > 1}
    nearest_first = sorted((abs(count - size), name, count) for name, size in sizes.items() for count in divisors)
    single = [{name: count} for _, name, count in nearest_first]
    return remedy(config, role, [*single, dict.fromkeys(sizes, 1)])


def more_ranks(config: Config, role: str) -> str | None:
    """Return the nearest number of ranks of the pool with which a role's layout works, upwards first."""
    return next(_with_more_ranks(config, role, _refused(config)), None)


def _with_more_ranks(
    config: Config, role: str, refused: set[object], accepts: Callable[[Config], bool] = lambda _: True
) -> Iterator[str]:
    """Yield overrides of the ranks of a role's pool with which the role's layout works and nothing else breaks.

    Args:
        config: the whole configuration.
        role: whose layout has to work.
        refused: what is refused already.
        accepts: whether a changed configuration is good enough.
    """
    pool, parallel = pool_of(config, role), role_parallel(config, role)
    ranks, product = pool_ranks(config, role), prod(getattr(parallel, name) for name in SIZES if name != "dp_shard")
    if parallel.dp_shard > 0:
        fitting = [product * parallel.dp_shard]
    else:
        first = -(-ranks // product)
        fitting = [product * count for count in range(first, first + parallel.ep)]
    for count in fitting:
        pools = config.placement.pools | {pool: config.placement.pools[pool].model_copy(update={"ranks": count})}
        changed = config.model_copy(update={"placement": config.placement.model_copy(update={"pools": pools})})
        if _fits(changed, role) and _refused(changed) <= refused and accepts(changed):
            yield f"placement.pools.{pool}.ranks={count}"


def cp_for(config: Config, role: str, tokens: int, *, forward: bool = False) -> str | None:
    """Return overrides with a small cp that lets a sequence fit the token budget; None if none is found.

    Sizes that divide the ranks of the pool come first, then sizes up to 64 with more ranks; on GPUs, multiples of the
    present ranks before others, because nodes have as many GPUs. Where the heads of the model don't divide, the
    overrides also change `cp_method`.

    Args:
        config: the whole configuration.
        role: whose microbatches hold the sequence.
        tokens: of the sequence.
        forward: whether the budget is that of passes without gradients.
    """
    if role not in WITH_LAYOUTS or pool_of(config, role) not in config.placement.pools:  # another rule refuses it
        return None

    def accepts(changed: Config) -> bool:
        return all(holds(each, tokens) for each, of in batchings(changed, role) if of == forward)

    within_pool = remedy(config, role, _shared_by(_divisors(pool_ranks(config, role))), accepts)
    if within_pool is not None:
        return within_pool
    refused, node_size = _refused(config), pool_ranks(config, role) if gpus_per_rank(config, role) else 1
    for change in _shared_by(sorted(range(2, _MOST_CP + 1), key=lambda cp: cp % node_size > 0)):
        for ranks in _with_more_ranks(with_sizes(config, role, **change), role, refused, accepts):
            return f"{overrides(role, change)} {ranks}"
    return None


def _shared_by(sizes: Iterable[int]) -> list[Change]:
    """Return changes to each cp, with the present `cp_method` and with `all_gather`, which doesn't divide heads."""
    return [change for cp in sizes for change in ({"cp": cp}, {"cp": cp, "cp_method": "all_gather"})]


def pool_ranks(config: Config, role: str) -> int:
    """Return the ranks of a role's pool."""
    return config.placement.pools[pool_of(config, role)].ranks


def alternatives(*remedies: str | None) -> str:
    """Return remedies of which one is enough.

    >>> alternatives("seed=1", None, "seed=2")
    'seed=1, or seed=2'
    """
    return ", or ".join(dict.fromkeys(text for text in remedies if text is not None))


def _with_defaults(config: Config, role: str, changes: list[Change]) -> Iterator[Change]:
    """Yield each change alone, then with as few defaults as possible."""
    parallel = role_parallel(config, role)
    differing = {name: value for name, value in _DEFAULTS.items() if getattr(parallel, name) != value}
    for count in range(len(differing) + 1):
        for names in combinations(differing, count):
            for change in changes:
                if not set(names) & set(change):
                    yield {**change, **{name: differing[name] for name in names}}


def _fits(config: Config, role: str) -> bool:
    """Return whether a role's layout fits the ranks of its pool, and its model the layout."""
    return layout_fits(config, role) and model_fits(config, role, pool_ranks(config, role))


def _refused(config: Config) -> set[object]:
    """Return what is refused in a configuration: roles whose layouts don't fit ranks or model, and broken rules."""
    pools = config.placement.pools
    roles = [role for role in started_roles(config) if role in WITH_LAYOUTS and pool_of(config, role) in pools]
    refused: set[object] = {role for role in roles if not _fits(config, role)}
    refused |= {compile_problems} if any(compile_problems(config)) else set()
    try:
        refused |= {("budget", role) for role in roles_over_budget(config)}
    except ConfigError:  # a role's batching conflicts with its layout
        refused.add(roles_over_budget)
    return refused


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]

"""The text of a dry run."""

from collections.abc import Iterator, Mapping

from rlpack.cli.tables import table
from rlpack.config.layout_sizes import SIZES, layout_sizes
from rlpack.config.roles import WITH_LAYOUTS, pool_of, role_parallel
from rlpack.config.schema import Config
from rlpack.counted import counted
from rlpack.distributed.errors import in_units
from rlpack.models.live_bytes import Use
from rlpack.recipes.dry_run.batch_plan import RolePlan, TypicalBatch
from rlpack.recipes.dry_run.role_memory import is_trained
from rlpack.recipes.dry_run.run_memory import CONTEXT_BYTES, PROCESS_BYTES, PoolMemory, RunMemory

# Memory of a microbatch, in addition to what a role keeps.
_PARTS: Mapping[Use, str] = {
    "activations": "activations of a microbatch",
    "output_layer": "output layer",
    "gathered": "gathered weights",
    "backward": "backward pass",
}


def batch_lines(config: Config, batch: TypicalBatch, plans: Mapping[str, RolePlan]) -> Iterator[str]:
    """Yield the lines about the batch and the plans of roles."""
    for name, one in (("batch", batch), ("warm-up", batch.warm_up)):
        if one is not None:
            shortest, longest = int(one.lengths.min()), int(one.lengths.max())
            tokens = int(one.lengths.sum())
            yield (
                f"{name}: {counted(one.lengths.size, 'sequence')} of {shortest:,} to {longest:,} tokens, {tokens:,} in "
                f"all ({one.source})"
            )
    for role, each in plans.items():
        ranks = config.placement.pools[pool_of(config, role)].ranks
        sizes = _layout(config, role, ranks)
        steps, count = each.plan.num_steps, each.per_step
        unit = ("optimizer step",) if is_trained(config, role) else ("pass", "passes")
        yield (
            f"{role}: {ranks} rank{'s' * (ranks > 1)}{f' ({sizes})' if sizes else ''}; {counted(steps, *unit)} "
            f"of {count} microbatch{'es' * (count > 1)} per rank{_idle(each)}, {each.fill:.1%} of "
            f"the slots filled; memory is for the largest, of {each.microbatch.slots:,} slots"
        )


def _layout(config: Config, role: str, ranks: int) -> str:
    """Return the sizes above 1: those whose product is the number of ranks, then how ranks or layers are divided."""
    sizes = layout_sizes(config, role, ranks)
    factors = " × ".join(f"{name} {sizes[name]}" for name in SIZES if sizes.get(name, 1) > 1)
    vpp = role_parallel(config, role).vpp if role in WITH_LAYOUTS else 1
    others = [f"{name} {size}" for name, size in (("ep", sizes.get("ep", 1)), ("vpp", vpp)) if size > 1]
    return ", ".join(filter(None, [factors, *others]))


def _idle(each: RolePlan) -> str:
    """Return a note on microbatches without rows, in which a rank only takes part in collectives; "" without any."""
    plan, metrics = each.plan, each.plan.metrics
    if not metrics.dummy_microbatches:
        return ""
    total = metrics.num_microbatches + metrics.dummy_microbatches
    rows = plan.request.lengths.size // plan.num_steps
    reason = f": {counted(rows, 'row')} for {plan.num_ranks:,} data ranks" if rows < plan.num_ranks else ""
    return f" ({metrics.dummy_microbatches:,} of {total:,} in all are empty{reason})"


def memory_lines(memory: RunMemory) -> Iterator[str]:
    """Yield the tables of all pools, and the sums."""
    for pool in memory.pools:
        yield ""
        yield (
            f"pool {pool.name}: {pool.ranks} rank{'s' * (pool.ranks > 1)}, {_devices(pool)}; on the {_unit(pool)} that "
            "takes most"
        )
        yield from _pool_lines(pool)
    yield ""
    generates = any(pool.engine is not None for pool in memory.pools)
    weights = ", and weights for the engines" if generates else ""
    yield f"object store: {in_units(memory.store)} for the batch{weights}"
    limit = "" if memory.host_limit is None else f" of {in_units(memory.host_limit)}"
    yield f"host memory: {in_units(memory.host)}{limit}, all ranks and the object store together"
    if memory.uncounted:
        plural = "s" * (len(memory.uncounted) > 1)
        yield f"not counted: the role{plural} {', '.join(memory.uncounted)}"


def _devices(pool: PoolMemory) -> str:
    """Return what the ranks of a pool run on."""
    if not pool.on_gpu:
        return "on CPUs"
    if pool.gpus_per_rank == 1:
        return "a GPU each"
    return f"{pool.gpus_per_rank:g} GPUs each, {pool.ranks * pool.gpus_per_rank:g} in all"


def _unit(pool: PoolMemory) -> str:
    """Return what the sizes of a pool are those of."""
    return "GPU" if pool.gpus_per_rank > 1 else "rank"


def _pool_lines(pool: PoolMemory) -> Iterator[str]:
    if pool.roles:
        yield table(["", *pool.roles], list(_rows(pool)))
    if (engine := pool.engine) is not None:
        asleep = ", freed while other roles work" if engine.sleeps else ""
        use = "for its KV cache, kept while other roles work" if engine.keeps_cache else f"while it generates{asleep}"
        shared = f"; {in_units(engine.received)} of shared memory, in which weights arrive" if engine.received else ""
        yield f"engine: {in_units(engine.weights)} of weights, {in_units(engine.cache)} more {use}{shared}"
    outside = f"{in_units(CONTEXT_BYTES)}" if pool.on_gpu else f"{in_units(PROCESS_BYTES)}"
    what = "CUDA context and libraries" if pool.on_gpu else "Python and its libraries"
    limit = f" (limit {in_units(pool.limit)})" if pool.on_gpu and pool.limit is not None else ""
    yield (
        f"each {_unit(pool)}: {in_units(pool.kept)} at all times, {in_units(pool.peak)} at the peak{limit}, including "
        f"{outside} assumed for {what}"
    )
    if pool.on_gpu:
        whole = f", with up to {in_units(pool.whole)} for a whole model as a role starts" if pool.whole else ""
        yield f"a rank's host memory: {in_units(pool.host)}{whole}"


def _rows(pool: PoolMemory) -> Iterator[list[str]]:
    """Yield the rows of a pool's table."""
    roles = list(pool.roles.values())
    yield _row("weights", [role.model.weights for role in roles])
    yield _row("gradients", [role.model.gradients for role in roles])
    yield _row("optimizer state", [role.model.optimizer for role in roles])
    for use, name in _PARTS.items():
        yield _row(name, [role.model.most.get(use, 0) for role in roles])
    extra = [max(0, role.model.most.get("gradients", 0) - role.model.gradients) for role in roles]
    yield _row("gradients before they are summed", extra)
    yield _row("temporary in the optimizer step", [max(0, role.model.step - role.model.kept) for role in roles])
    if any(role.start for role in roles):
        yield _row("start: the whole model", [role.start for role in roles])
    if any(role.host for role in roles):
        yield _row("of these in host memory", [role.host for role in roles])
    yield _row("most at one time", [role.peak for role in roles])


def _row(name: str, sizes: list[int]) -> list[str]:
    return [name, *(in_units(size) if size else "-" for size in sizes)]


def verdict(memory: RunMemory) -> str:
    """Return as text whether a run fits and, if not, why."""
    problems = list(memory.problems())
    return f"it does not fit: {'; '.join(problems)}" if problems else "it fits"


def change_lines(memory: RunMemory, changes: list[tuple[str, RunMemory]]) -> Iterator[str]:
    """Yield the changes of single keys that make a run fit, or if there is none, those that help most."""
    fitting = [change for change in changes if change[1].excess <= 0]
    yield "each of these changes makes it fit:" if fitting else "none of these changes makes it fit by itself:"
    shown = fitting or sorted(changes, key=lambda change: change[1].excess)
    for override, changed in shown:
        yield f"  {override}  ({_size(memory, changed)})"
    if not shown:
        yield "  nothing can be changed for this model and these ranks; use more ranks or a smaller model"


def _size(before: RunMemory, after: RunMemory) -> str:
    """Describe the memory that was exceeded, as it is after a change."""
    short = [pool.name for pool in before.pools if pool.is_short]
    peaks = [pool for pool in after.pools if pool.name in short]
    return ", ".join(f"{in_units(pool.peak)} of a GPU" for pool in peaks) or f"{in_units(after.host)} of the host"

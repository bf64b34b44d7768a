"""`rlpack plan --suggest`: layouts, memory switches and token budgets that fit, fastest first.

The time of a candidate is modeled (`layout_candidates`), and the memory of each is estimated in the order of time until
a few fit (`layout_search`).
"""

import gc
import time
from collections.abc import Callable, Iterator

from rlpack.cli.tables import table
from rlpack.config.roles import gpus_per_rank, pool_of
from rlpack.config.schema import Config
from rlpack.distributed.errors import in_units
from rlpack.packing.analysis.simulation import MEMORY_MARGIN
from rlpack.recipes.dry_run.changes import ROWS_AT_ONCE, with_value
from rlpack.recipes.dry_run.estimate_run import Estimator, MemoryLimits, open_estimator
from rlpack.recipes.dry_run.layout_candidates import Candidate, candidates
from rlpack.recipes.dry_run.layout_search import LayoutSearch
from rlpack.recipes.dry_run.run_memory import RunMemory

# Defaults of the sustained speed of a device, in TFLOPS.
_GPU_TFLOPS, _CPU_TFLOPS = 400.0, 0.1


def main(
    config: Config,
    memory_gb: float | None,
    tflops: float | None,
    overhead_ms: float,
    show: Callable[[str], None],
) -> bool:
    """Show the fastest variants that fit, with their overrides; return whether there is one.

    Raises:
        ValueError: what a run would refuse before it starts.
    """
    gc.enable()  # tensors in cycles would otherwise count as live
    estimator = open_estimator(config, memory_gb)
    limits = estimator.limits
    host = None if limits.host is None else int(limits.host * (1 - MEMORY_MARGIN))
    estimator.limits = MemoryLimits(int(limits.device * (1 - MEMORY_MARGIN)), host, gpu=limits.device)
    if (reason := _why_none_fits(config, estimator)) is not None:
        show(f"none fits: {reason}")
        return False
    tflops = tflops or (_GPU_TFLOPS if gpus_per_rank(config, "actor") else _CPU_TFLOPS)
    ordered = sorted(candidates(config, estimator, tflops, overhead_ms), key=lambda each: each.order)
    ranks = config.placement.pools[pool_of(config, "actor")].ranks
    show(
        f"{len(ordered):,} variants of the actor's layout on {ranks} ranks, its memory switches and its budget; time "
        f"assumes {tflops:g} TFLOPS a device and {overhead_ms:g} ms a microbatch, and knows neither network nor "
        f"kernels: measure the best few. {MEMORY_MARGIN:.0%} of {_limit(limits, config)} stays free."
    )
    began = time.process_time()
    suggested, is_cut = LayoutSearch(ordered, estimator, began).run()
    if is_cut:
        seconds = time.process_time() - began
        show(f"the search stopped after {seconds:.0f} s of CPU time; slower variants that were not tried may fit, too")
    if not suggested:
        fewer = f", fewer rows at once ({ROWS_AT_ONCE})" if _cache_can_shrink(config, estimator) else ""
        none = "none of those that were tried fits" if is_cut else "none fits"
        show(f"{none}; use more ranks, a smaller model, adapters (actor.lora.rank){fewer} or shorter rows")
        return False
    show(table(["", "time s", "microbatches", "slots", "memory"], list(_rows(suggested))))
    for number, (candidate, _) in enumerate(suggested, 1):
        show(f"{number}: " + " ".join(f"{key}={value}" for key, value in candidate.values.items()))
    return True


def _why_none_fits(config: Config, estimator: Estimator) -> str | None:
    """Return why no variant fits with the engine, which all of them share; None if one may."""
    if estimator.engine(config) is None:
        return None
    alone = estimator.memory_without_models(config)
    problems = list(alone.problems())
    if not problems or alone.lacks_share_only:
        return "; ".join(problems) or None
    fewer = f"fewer rows at once ({ROWS_AT_ONCE}), " if _cache_can_shrink(config, estimator) else ""
    return (
        f"for generation alone, without the models of other roles, {'; '.join(problems)} ({MEMORY_MARGIN:.0%} stays "
        f"free); use {fewer}shorter rows, more ranks or a smaller model"
    )


def _cache_can_shrink(config: Config, estimator: Estimator) -> bool:
    """Return whether the engine takes less memory if fewer rows generate at once."""
    least = estimator.engine(with_value(config, ROWS_AT_ONCE, 1))
    engine = estimator.engine(config)
    return engine is not None and least is not None and least.cache < engine.cache


def _rows(suggested: list[tuple[Candidate, RunMemory]]) -> Iterator[list[str]]:
    for number, (candidate, memory) in enumerate(suggested, 1):
        pool = next(each for each in memory.pools if "actor" in each.roles)
        microbatches = candidate.plan.plan.counts.shape[1]
        size = in_units(pool.peak if pool.on_gpu else memory.host)
        slots = f"{candidate.plan.microbatch.slots:,}"
        yield [f"{number}", f"{candidate.seconds:.3g}", f"{microbatches:,}", slots, size]


def _limit(limits: MemoryLimits, config: Config) -> str:
    """Describe the memory of a device."""
    if gpus_per_rank(config, "actor"):
        return f"{in_units(limits.device)} of a GPU{' (assumed; --memory-gb)' if limits.assumed else ''}"
    return "the machine's memory" if limits.host is None else f"{in_units(limits.host)} of the machine"

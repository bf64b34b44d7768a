"""`rlpack plan --suggest`: layouts, memory switches and token budgets that fit, fastest first.

Candidates are ordered by modeled time, and the memory of each is estimated in this order, until a few fit. The time
counts FLOPs and a fixed time for each microbatch (`rlpack.packing.analysis.simulation`), and the idle time of pipeline
stages while the pipeline fills and drains. It knows neither network nor kernels, so candidates of equal time are
ordered by how much they communicate: tensor parallelism communicates most, pipeline parallelism least.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from rlpack.cli.tables import table
from rlpack.config.roles import forward_batching, gpus_per_rank, longest_planned_row, pool_of, role_batching
from rlpack.config.schema import Config
from rlpack.config.sections.parallelism import ContextMethod
from rlpack.distributed.errors import in_units
from rlpack.models.errors import ModelError
from rlpack.models.expert_parallel import expert_modules
from rlpack.models.flops import sequence_cost
from rlpack.models.text_settings import settings_of
from rlpack.packing import Cost, PackingError
from rlpack.packing.analysis.simulation import MEMORY_MARGIN, Device, forecast
from rlpack.recipes.dry_run.batch_plan import RolePlan, TypicalBatch, role_plan
from rlpack.recipes.dry_run.changes import MAX_TP, ROWS_AT_ONCE, with_value
from rlpack.recipes.dry_run.estimate_run import Estimator, MemoryLimits, open_estimator
from rlpack.recipes.dry_run.role_memory import role_layout
from rlpack.recipes.dry_run.run_memory import RunMemory

# Checkpointing and offloading from the least saved memory to the most.
_KINDS, _OFFLOADS = ("none", "selective", "full"), ("none", "optimizer", "parameters")
# The key of the token budget, and the budgets relative to the configured one.
_BUDGET = "batching.max_tokens"
_BUDGETS = (4.0, 2.0, 1.0, 0.5, 0.25)
# Maximum number of suggestions, and maximum number of memory estimates to find them.
_MOST, _TRIES = 3, 80
# CPU time limits of the search: once a variant fits, and while none does.
_SECONDS, _MOST_SECONDS = 45.0, 360.0
# Sizes of a layout that are searched; dp_shard follows from them.
_SIZES = ("dp_replicate", "cp", "tp", "pp", "ep", "vpp")
# Virtual stages that are tried with pp above 1.
_VIRTUAL = (2, 4)
# FLOPs with full recomputation, relative to those without: forward runs twice.
_RECOMPUTED = 4.0 / 3.0
# Defaults of the sustained speed of a device, in TFLOPS.
_GPU_TFLOPS, _CPU_TFLOPS = 400.0, 0.1


@dataclass(frozen=True)
class Candidate:
    """A variant of the configuration.

    Attributes:
        config: the variant.
        values: values of the keys that are set.
        plan: plan of the first batch.
        seconds: modeled time of its updates.
    """

    config: Config
    values: dict[str, Any]
    plan: RolePlan
    seconds: float

    @property
    def layout(self) -> tuple[int, ...]:
        """Return the sizes of the layout."""
        return tuple(self.values.get(f"actor.parallel.{name}", 1) for name in _SIZES)

    @property
    def order(self) -> tuple[Any, ...]:
        """Return the sort key of candidates: time, then how much they communicate and copy."""
        replicas, cp, tp, pp, ep, vpp = self.layout
        offload, kind = self.values.get("actor.offload", "none"), self.values["actor.gradient_checkpointing"]
        return round(self.seconds, 3), _OFFLOADS.index(offload), tp, ep, cp, pp, vpp, _KINDS.index(kind), -replicas

    @property
    def family(self) -> tuple[int, ...]:
        """Return the settings that change the memory in several ways; candidates are compared within a family."""
        return *self.layout[2:], _KINDS.index(self.values["actor.gradient_checkpointing"])

    @property
    def thrift(self) -> tuple[float, ...]:
        """Return numbers, each of which lowers the memory of a device as it grows, if pp, ep and vpp are equal."""
        replicas, cp, tp, *_ = self.layout
        offload, kind = self.values.get("actor.offload", "none"), self.values["actor.gradient_checkpointing"]
        slots = self.plan.microbatch.slots / cp
        return tp, _KINDS.index(kind), _OFFLOADS.index(offload), -replicas, -slots, -int(self.plan.several)

    @property
    def host_thrift(self) -> tuple[float, ...]:
        """Return the numbers of `thrift` for host memory, which holds what devices offload."""
        tp, kind, offload, *others = self.thrift
        return tp, kind, -offload, *others

    def takes_more(self, other: "Candidate", *, of_host: bool) -> bool:
        """Return whether this candidate certainly needs at least as much memory, of devices or the host, as another."""
        if self.layout[-3:] != other.layout[-3:]:
            return False
        mine, its = (self.host_thrift, other.host_thrift) if of_host else (self.thrift, other.thrift)
        return all(each <= least for each, least in zip(mine, its, strict=True))


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
    # The variants have the same engine.
    if (engine := estimator.engine(config)) is not None and (problem := engine.problem(pool_of(config, "rollout"))):
        show(f"none fits: {problem}")
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
    suggested, is_cut = _fitting(ordered, estimator, began)
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


def _cache_can_shrink(config: Config, estimator: Estimator) -> bool:
    """Return whether the engine takes less memory if fewer rows generate at once."""
    least = estimator.engine(with_value(config, ROWS_AT_ONCE, 1))
    engine = estimator.engine(config)
    return engine is not None and least is not None and least.cache < engine.cache


def candidates(config: Config, estimator: Estimator, tflops: float, overhead_ms: float) -> Iterator[Candidate]:
    """Yield all variants whose layout divides ranks and model, and whose budget holds the longest row.

    If longer rows than the configured budget are cut or run alone, the budget isn't lowered, so that no others are.
    """
    cost, batch = sequence_cost(estimator.model, longest_planned_row(config)), estimator.batch(config)
    plans, given = _Plans(batch, cost), role_batching(config, "actor")
    least = batch.longest if given.overlong == "error" else min(batch.longest, given.budget)
    seen = set()
    for layout in _layouts(config, estimator):
        for values in _variants(config, layout, estimator):
            changed = _with_values(config, values)
            plan = plans.of(changed)
            if plan is None or role_batching(changed, "actor").budget < least:
                continue
            keys = (key for key in values if key != _BUDGET)
            identity = (*(values[key] for key in keys), plan.microbatch.slots)
            if identity in seen:
                continue
            seen.add(identity)
            pp = values["actor.parallel.pp"]
            shared = values["actor.parallel.cp"] * values["actor.parallel.tp"] * pp
            more = _RECOMPUTED if values["actor.gradient_checkpointing"] == "full" else 1.0
            device = Device(flops_per_s=tflops * 1e12 * shared / more, overhead_s=overhead_ms / 1e3)
            # While the pipeline fills and drains, ranks wait for pp - 1 microbatches to pass a virtual stage.
            idle = 1 + (pp - 1) / values.get("actor.parallel.vpp", 1) / plan.per_step
            yield Candidate(changed, values, plan, idle * forecast(plan.plan, cost, device).step_s)


class _Plans:
    """Plans of the actor's batch; layouts with the same data ranks and alignment share one."""

    def __init__(self, batch: TypicalBatch, cost: Cost) -> None:
        self._batch, self._cost = batch, cost
        self._plans: dict[tuple[Any, ...], RolePlan | None] = {}

    def of(self, config: Config) -> RolePlan | None:
        """Return the plan of a configuration; None if a sequence is longer than the budget."""
        layout = role_layout(config, "actor")
        forward = forward_batching(config, "actor")
        batchings = (layout.align(each) for each in (role_batching(config, "actor"), forward) if each is not None)
        key = layout.dp_size, *map(repr, batchings)
        if key not in self._plans:
            self._plans[key] = None
            with contextlib.suppress(PackingError):
                self._plans[key] = role_plan(config, "actor", self._batch, self._cost)
        return self._plans[key]


def _layouts(config: Config, estimator: Estimator) -> Iterator[dict[str, Any]]:
    """Yield the values of the layouts that divide ranks and model.

    Ulysses moves less than gathered keys and values do, so those are tried only where it can't run. Virtual stages are
    tried only where all get equally many layers, because all ranks would wait for a larger one.
    """
    ranks = config.placement.pools[pool_of(config, "actor")].ranks
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    experts = divisors if any(True for _ in expert_modules(estimator.model)) else [1]
    num_layers = settings_of(estimator.model.config).get("num_hidden_layers") or 1
    for replicas, cp, tp, pp, ep in product(divisors, divisors, divisors, divisors, experts):
        shared = replicas * cp * tp * pp
        if tp > MAX_TP or ranks % shared or ranks // (replicas * tp * pp) % ep:
            continue
        sizes = dict(zip(_SIZES[:-1], (replicas, cp, tp, pp, ep), strict=True)) | {"dp_shard": -1}
        values = {f"actor.parallel.{name}": size for name, size in sizes.items()}
        if config.actor.parallel.vpp > 1:
            values["actor.parallel.vpp"] = 1
        yield from _with_context_method(config, estimator, values)
        for vpp in _VIRTUAL if pp > 1 else ():
            if num_layers % (pp * vpp) == 0:
                yield from _with_context_method(config, estimator, values | {"actor.parallel.vpp": vpp})


def _with_context_method(config: Config, estimator: Estimator, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the values of a layout with the first method of context parallelism that can run, if any."""
    most = _budgets(config)[0]  # a layout may need a larger budget than the configured one
    for method in get_args(ContextMethod) if values["actor.parallel.cp"] > 1 else (None,):
        chosen = values if method is None else values | {"actor.parallel.cp_method": method}
        if estimator.can_run(_with_values(config, chosen | most)):
            yield chosen
            return


def _budgets(config: Config) -> list[dict[str, Any]]:
    """Return the token budgets that are tried, the largest first, by their key; one without a key in fixed mode."""
    budget = config.batching.max_tokens if config.batching.mode != "fixed" else None
    if budget is None:
        return [{}]
    return [{_BUDGET: tokens} for tokens in sorted({max(1, int(budget * each)) for each in _BUDGETS}, reverse=True)]


def _with_values(config: Config, values: dict[str, Any]) -> Config:
    """Return a configuration in which keys have other values."""
    for key, value in values.items():
        config = with_value(config, key, value)
    return config


def _variants(config: Config, layout: dict[str, Any], estimator: Estimator) -> Iterator[dict[str, Any]]:
    """Yield the values of the keys that are searched with a layout, as far as a run would accept them."""

    def can_run(values: dict[str, Any]) -> bool:
        return estimator.can_run(_with_values(config, values))

    offloads = ("none", "optimizer") if gpus_per_rank(config, "actor") else ("none",)
    budgets = _budgets(config)
    accepted = [budget for budget in budgets if can_run(layout | budget)]
    for kind, offload in product(_KINDS, offloads):
        values = layout | {"actor.gradient_checkpointing": kind}
        values |= {"actor.offload": offload} if len(offloads) > 1 else {}
        if can_run(values | budgets[0]):
            yield from (values | budget for budget in accepted)


def _fitting(
    ordered: list[Candidate], estimator: Estimator, began: float
) -> tuple[list[tuple[Candidate, RunMemory]], bool]:
    """Return the first candidates that fit, one of each layout, and whether the search ended before all were tried.

    Of a family of candidates, the one with the least memory of a device comes first: if a device has less, none of them
    fits. If only host memory is too small for what it offloads, others may fit. One that can't run says nothing about
    the memory of others.
    """
    least = {each.family: each for each in sorted(ordered, key=lambda each: each.thrift[2:])}
    too_large: list[tuple[Candidate, bool]] = []  # and whether it is too large for the host
    layouts: set[tuple[int, ...]] = set()
    tried: dict[int, RunMemory | None] = {}
    found: list[tuple[Candidate, RunMemory]] = []
    for candidate in ordered:
        for each in (least[candidate.family], candidate):
            if candidate.layout in layouts or any(candidate.takes_more(one, of_host=host) for one, host in too_large):
                break
            is_late = time.process_time() > began + (_SECONDS if layouts else _MOST_SECONDS)
            if len(tried) == _TRIES or (len(tried) > 1 and is_late):
                return found, True
            if id(each) not in tried:
                tried[id(each)] = _memory(each, estimator)
                too_large += [(each, of_host) for of_host in _exceeded(tried[id(each)])]
            memory = tried[id(each)]
            if each is candidate and memory is not None and memory.excess <= 0:
                layouts.add(candidate.layout)
                found.append((candidate, memory))
                if len(found) == _MOST:
                    return found, False
    return found, False


def _memory(candidate: Candidate, estimator: Estimator) -> RunMemory | None:
    """Return the memory of a candidate; None if another role can't run with what it inherits."""
    try:
        return estimator.memory(candidate.config)
    except (ModelError, PackingError):
        return None


def _exceeded(memory: RunMemory | None) -> Iterator[bool]:
    """Yield False if a device has too little memory, and True if the host has; nothing for a candidate that can't run.

    The memory of ranks on CPUs is that of the host.
    """
    if memory is None:
        return
    if any(pool.on_gpu and pool.limit is not None and pool.peak > pool.limit for pool in memory.pools):
        yield False
    if memory.host_limit is not None and memory.host > memory.host_limit:
        yield True


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

"""The variants of a configuration among which `rlpack plan --suggest` searches, and the modeled time of each.

The time counts FLOPs and a fixed time for each microbatch (`rlpack.packing.analysis.simulation`), and the idle time of
pipeline stages while the pipeline fills and drains. It knows neither network nor kernels, so candidates of equal time
are ordered by how much they communicate: tensor parallelism communicates most, pipeline parallelism least.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from rlpack.config.roles import forward_batching, gpus_per_rank, longest_planned_row, pool_of, role_batching
from rlpack.config.schema import Config
from rlpack.config.sections.parallelism import ContextMethod
from rlpack.models.expert_parallel import expert_modules
from rlpack.models.flops import sequence_cost
from rlpack.models.text_settings import settings_of
from rlpack.packing import Cost, PackingError
from rlpack.packing.analysis.simulation import Device, forecast
from rlpack.recipes.dry_run.batch_plan import RolePlan, TypicalBatch, role_plan
from rlpack.recipes.dry_run.changes import MAX_TP, with_value
from rlpack.recipes.dry_run.estimate_run import Estimator
from rlpack.recipes.dry_run.role_memory import role_layout

# Checkpointing and offloading from the least saved memory to the most.
_KINDS, _OFFLOADS = ("none", "selective", "full"), ("none", "optimizer", "parameters")
# The key of the token budget, and the budgets relative to the configured one.
_BUDGET = "batching.max_tokens"
_BUDGETS = (4.0, 2.0, 1.0, 0.5, 0.25)
# Sizes of a layout that are searched; dp_shard follows from them.
_SIZES = ("dp_replicate", "cp", "tp", "pp", "ep", "vpp")
# Virtual stages that are tried with pp above 1.
_VIRTUAL = (2, 4)
# FLOPs with full recomputation, relative to those without: forward runs twice.
_RECOMPUTED = 4.0 / 3.0


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
    def slots(self) -> float:
        """Return the slots of the largest microbatch on a rank."""
        return self.plan.microbatch.slots / self.layout[1]

    @property
    def comparable(self) -> tuple[Any, ...]:
        """Return the settings that are equal in candidates that differ only in slots and replicas."""
        return *self.family, self.layout[1], self.values.get("actor.offload"), self.plan.several

    @property
    def thrift(self) -> tuple[float, ...]:
        """Return numbers, each of which lowers the memory of a device as it grows, if pp, ep and vpp are equal."""
        replicas, _, tp, *_ = self.layout
        offload, kind = self.values.get("actor.offload", "none"), self.values["actor.gradient_checkpointing"]
        return tp, _KINDS.index(kind), _OFFLOADS.index(offload), -replicas, -self.slots, -int(self.plan.several)

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

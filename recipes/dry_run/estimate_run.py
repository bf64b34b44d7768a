"""`rlpack train --dry-run`: check a configuration, plan its first batch, and estimate its memory; run nothing."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlpack.config.errors import ConfigError
from rlpack.config.layout_sizes import layout_fits
from rlpack.config.recipes import recipe_of
from rlpack.config.roles import (
    gpus_per_rank,
    is_builtin,
    longest_planned_row,
    optimizers,
    pool_of,
    role_compute,
    role_parallel,
    started_roles,
)
from rlpack.config.rules import broken_rules
from rlpack.config.schema import Config
from rlpack.counted import counted
from rlpack.data.prompts import Prompts
from rlpack.distributed.errors import PlacementError, in_units
from rlpack.models.errors import ModelError
from rlpack.models.flops import sequence_cost
from rlpack.models.memory_simulation import ModelMemory
from rlpack.models.router_choice import recorded_bytes, router_shape
from rlpack.packing import PackingError
from rlpack.recipes.driver.splits import load_sets, load_splits
from rlpack.recipes.dry_run.batch_plan import (
    RolePlan,
    TypicalBatch,
    first_batch,
    holds_demonstrations,
    plans_of,
)
from rlpack.recipes.dry_run.changes import for_the_share, smaller, with_value
from rlpack.recipes.dry_run.engine_memory import EngineMemory, engine_memory
from rlpack.recipes.dry_run.memory_report import batch_lines, change_lines, memory_lines, verdict
from rlpack.recipes.dry_run.role_memory import (
    MODEL_ROLES,
    is_trained,
    model_of,
    role_layout,
    role_memory,
    transformers_model,
)
from rlpack.recipes.dry_run.run_memory import RoleMemory, RunMemory, role_offload, run_memory
from rlpack.recipes.dry_run.whole_models import bytes_at_start
from rlpack.recipes.preflight.config_checks import check_before_start
from rlpack.recipes.preflight.split_checks import misfit
from rlpack.startup.data_epochs import with_steps
from rlpack.startup.pool_checks import check_machine

# Assumed memory of a GPU where this machine has none, as for `rlpack plan`.
ASSUMED_GPU_BYTES = 80_000_000_000


@dataclass(frozen=True)
class MemoryLimits:
    """The memory that a run may take.

    Attributes:
        device: memory of a GPU, in bytes.
        host: memory of the machine, in bytes, if all ranks run on it.
        assumed: whether the GPU's memory is assumed.
        gpu: whole memory of a GPU, in bytes, of which vLLM takes its share; None if `device` is all of it.
    """

    device: int
    host: int | None
    assumed: bool = False
    gpu: int | None = None

    @classmethod
    def of(cls, config: Config, memory_gb: float | None) -> "MemoryLimits":
        """Return the limits of a configuration; `memory_gb` is that of a GPU, or of the machine for ranks on CPUs."""
        gpus = torch.cuda.device_count()
        on_gpu = any(gpus_per_rank(config, role) for role in started_roles(config))
        host: int | None = None
        with contextlib.suppress(PlacementError):
            check_machine(config, gpus)
            host = psutil.virtual_memory().total if config.placement.address is None else None
        given = None if memory_gb is None else int(memory_gb * 1e9)
        if not on_gpu and given is not None:
            return cls(0, given)
        if given is not None:
            return cls(given, host)
        device = torch.cuda.get_device_properties(0).total_memory if gpus else ASSUMED_GPU_BYTES
        return cls(device, host, assumed=on_gpu and not gpus)


@dataclass
class Estimator:
    """Estimates a run and variants of it, which share tokenizer, data and model.

    Attributes:
        tokenizer: the policy's.
        prompts: training split.
        model: the policy without weights.
        models: for each role with a model, the model of transformers that it is built from, without weights.
        limits: limits of memory.
        problems: rules across keys that the given configuration breaks.
        evaluated: number of prompts of the largest held-out set.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts
    model: PreTrainedModel
    models: Mapping[str, PreTrainedModel]
    limits: MemoryLimits
    problems: frozenset[str] = frozenset()
    evaluated: int = 0
    _batch: TypicalBatch | None = None
    _models: dict[tuple[Any, ...], ModelMemory] = field(default_factory=dict)
    _starts: dict[tuple[str, ...], int] = field(default_factory=dict)
    _fits: dict[tuple[str, str, int], bool] = field(default_factory=dict)

    def batch(self, config: Config) -> TypicalBatch:
        """Return the first batch."""
        if self._batch is None:
            self._batch = first_batch(config, self.tokenizer, self.prompts)
        return self._batch

    def plans(self, config: Config) -> Mapping[str, RolePlan]:
        """Return the plans of all roles with models.

        Raises:
            PackingError: a sequence is longer than a token budget.
        """
        return plans_of(
            config, model_roles(config), self.batch(config), sequence_cost(self.model, longest_planned_row(config))
        )

    def memory(self, config: Config) -> RunMemory:
        """Return the memory of a run."""
        roles: dict[str, RoleMemory] = {}
        for role, each in self.plans(config).items():
            model = self._model(config, role, each)
            is_copied = config.checkpoint.asynchronous and is_trained(config, role)
            copied = model.weights + model.optimizer if is_copied else 0
            roles[role] = RoleMemory(model, role_offload(config, role), self._whole(config, role), copied)
        return self._run_memory(config, roles)

    def memory_without_models(self, config: Config) -> RunMemory:
        """Return the memory of a run without the models of its roles: the engine's, the object store's and so on."""
        return self._run_memory(config, {})

    def _run_memory(self, config: Config, roles: Mapping[str, RoleMemory]) -> RunMemory:
        tokens = int(self.batch(config).lengths.sum())
        shape = router_shape(self.model) if config.actor.moe.replay_routing else None
        routing = 0 if shape is None else recorded_bytes(shape)
        limits = {"device_limit": self.limits.device, "host_limit": self.limits.host}
        return run_memory(config, roles, self.engine(config), tokens, routing, **limits)

    def engine(self, config: Config) -> EngineMemory | None:
        """Return the memory of the engine; None for a recipe that doesn't generate, or for a user's engine."""
        if "rollout" not in started_roles(config):
            return None
        ranks = config.placement.pools[pool_of(config, "rollout")].ranks
        rows = max(self.batch(config).lengths.size, self.evaluated * config.evaluation.samples)
        return engine_memory(config, self.model, -(-rows // ranks), self.limits.device, self.limits.gpu)

    def can_run(self, config: Config) -> bool:
        """Return whether a run would accept a variant: its keys together, its layouts and its token budget.

        A role may have a separate model, which a layout that it inherits from the actor doesn't fit.
        """
        roles = model_roles(config)
        if not all(layout_fits(config, role) and self._model_fits(config, role) for role in roles):
            return False
        try:
            problems = broken_rules(config)
        except ConfigError:  # a role's batching can't be derived
            return False
        return self.problems.issuperset(problems) and holds_demonstrations(config, self.batch(config))

    def _model_fits(self, config: Config, role: str) -> bool:
        """Return whether a role's ranks can share its model; variants with the same layout share the result."""
        key = role, role_parallel(config, role).model_dump_json(), config.placement.pools[pool_of(config, role)].ranks
        if key not in self._fits:
            self._fits[key] = misfit(config, role, self.models[role]) is None
        return self._fits[key]

    def _model(self, config: Config, role: str, plan: RolePlan) -> ModelMemory:
        """Return the memory of a role's model; variants that it doesn't depend on share it."""
        read = role_layout(config, role), role_compute(config, role), role_parallel(config, role), config.actor.lora
        sizes = plan.microbatch, plan.several, plan.forward
        key = role, *map(repr, read), repr(optimizers(config).get(f"{role}.optimizer")), *sizes
        if key not in self._models:
            largest, options = plan.microbatch, {"several": plan.several, "forward": plan.forward}
            self._models[key] = role_memory(config, role, self.tokenizer, largest, **options)
        return self._models[key]

    def _whole(self, config: Config, role: str) -> int:
        """Return the bytes of a model that every rank holds as a whole before sharding; variants share the result."""
        key = role, *map(repr, model_of(config, role))
        if key not in self._starts:
            self._starts[key] = bytes_at_start(config, role, self.tokenizer)
        return self._starts[key]


def model_roles(config: Config) -> list[str]:
    """Return the started roles with models, whose classes are rlpack's own."""
    return [role for role in started_roles(config) if role in MODEL_ROLES and is_builtin(role)]


def open_estimator(config: Config, memory_gb: float | None) -> Estimator:
    """Read the data, run the preflight checks, and return an estimator.

    The devices of the pools needn't be on this machine.

    Args:
        config: the whole configuration.
        memory_gb: see `MemoryLimits.of`.

    Raises:
        ValueError: a run with this configuration would be refused before it starts.
    """
    tokenizer, prompts, held_out = load_splits(config)
    sets = load_sets(config, tokenizer)
    # An address keeps the preflight checks from comparing the pools with this machine; nothing is contacted.
    placement = config.placement.model_copy(update={"address": config.placement.address or "dry-run"})
    elsewhere = config.model_copy(update={"placement": placement})
    model = check_before_start(elsewhere, tokenizer, prompts, held_out, sets)
    problems = frozenset(broken_rules(config))
    models = {
        role: model if model_of(config, role)[0] is config.model else transformers_model(config, role, tokenizer)
        for role in model_roles(config)
    }
    evaluated = max(map(len, (held_out, *sets.values())))
    return Estimator(tokenizer, prompts, model, models, MemoryLimits.of(config, memory_gb), problems, evaluated)


def main(config: Config, memory_gb: float | None, show: Callable[[str], None]) -> bool:
    """Show the estimate of a run, and return whether it fits.

    Raises:
        ValueError: a run with this configuration would be refused before it starts.
    """
    gc.enable()  # tensors in cycles would otherwise count as live
    estimator = open_estimator(config, memory_gb)
    plans = estimator.plans(config)
    numbers = sum(weight.numel() for weight in estimator.model.parameters())
    size = f"{numbers / 1e6:,.1f} M" if numbers >= 1e6 else f"{numbers:,}"
    show(f"model: {estimator.model.config.model_type}, {size} parameters")
    show(run_line(config, len(estimator.prompts)))
    for line in batch_lines(config, estimator.batch(config), plans):
        show(line)
    memory = estimator.memory(config)
    for line in memory_lines(memory):
        show(line)
    if estimator.limits.assumed:
        show(f"there is no GPU here: {in_units(ASSUMED_GPU_BYTES)} are assumed for each (--memory-gb)")
    show(verdict(memory))
    if memory.excess <= 0:
        return True
    for line in change_lines(memory, list(_changes(config, estimator, memory))):
        show(line)
    return False


def run_line(config: Config, num_prompts: int) -> str:
    """Return the length of a run over `num_prompts` prompts.

    >>> from rlpack.config.schema import Trainer
    >>> run_line(Config(trainer=Trainer(steps=20, prompts_per_step=3)), 30)
    'run: 20 steps of 3 prompts, 2 passes over 30 prompts'
    """
    trainer = with_steps(config, num_prompts).trainer
    passes = trainer.steps * trainer.prompts_per_step / num_prompts
    recipe = recipe_of(config)
    least = "at least " if recipe.generates and not recipe.draws_once else ""  # prompts that are discarded are replaced
    return (
        f"run: {counted(trainer.steps, 'step')} of {counted(trainer.prompts_per_step, 'prompt')}, "
        f"{least}{counted(passes, 'pass', 'passes')} over {counted(num_prompts, 'prompt')}"
    )


def _changes(config: Config, estimator: Estimator, before: RunMemory) -> Iterator[tuple[str, RunMemory]]:
    """Yield single changes that lower the memory, and the memory after each; for a key, up to the first that fits."""
    enough, longest = set(), estimator.batch(config).longest
    for key, value in for_the_share(config) if before.lacks_share_only else smaller(config, longest):
        changed = with_value(config, key, value)
        if key in enough or not estimator.can_run(changed):
            continue
        with contextlib.suppress(PackingError, ModelError):
            memory = estimator.memory(changed)
            if memory.excess <= 0:
                enough.add(key)
            if memory.excess < before.excess:
                yield f"{key}={value}", memory

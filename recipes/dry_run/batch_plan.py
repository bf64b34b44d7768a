"""The plan of a run's first batch: its microbatches, and the largest one that any step may have.

Lengths come from the data. Responses don't exist yet, so each is assumed to have `rollout.max_new_tokens`, the
maximum. The longest prompt or demonstration is that of the whole split, because a later batch may have it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlpack.config.recipes import recipe_of
from rlpack.config.roles import forward_batching, gpus_per_rank, role_batching
from rlpack.config.schema import Config
from rlpack.config.token_budgets import holds
from rlpack.data.prompts import Prompts
from rlpack.data.sampler import prompt_positions
from rlpack.models.cpu_products import rounded_rows
from rlpack.models.memory_simulation import SimulatedMicrobatch
from rlpack.packing import Batching, Cost, MicrobatchPlan, make_plan
from rlpack.recipes.dry_run.role_memory import is_trained, role_layout

# Demonstrations that are tokenized at a time.
_CHUNK_ROWS = 4096


@dataclass(frozen=True)
class TypicalBatch:
    """The sequences of a step.

    Attributes:
        lengths: tokens of each sequence, int64 [B].
        source: where they come from, for the report.
        longest: maximum number of tokens of a sequence of the run, as far as it is known.
        prompts: tokens of each sequence's prompt, int64 [B]; None if no two sequences have the same prompt.
        group: number of sequences per prompt, which are adjacent.
        warm_up: the sequences of a supervised step of a recipe that generates; None if it takes none.
    """

    lengths: np.ndarray
    source: str
    longest: int
    prompts: np.ndarray | None = None
    group: int = 1
    warm_up: "TypicalBatch | None" = None

    @property
    def longest_demonstration(self) -> int:
        """Return the tokens of the longest sequence of the run's supervised steps; 0 if it takes none."""
        supervised = self if self.prompts is None else self.warm_up
        return 0 if supervised is None else supervised.longest


@dataclass(frozen=True)
class RolePlan:
    """How a role runs the batch.

    Attributes:
        plan: the plan of the batch.
        microbatch: the largest microbatch that a step may have.
        several: whether an optimizer step has several microbatches.
        forward: the largest microbatch of passes without gradients; None if they use the update's microbatches.
    """

    plan: MicrobatchPlan
    microbatch: SimulatedMicrobatch
    several: bool
    forward: SimulatedMicrobatch | None = None

    @property
    def per_step(self) -> int:
        """Return the maximum number of microbatches of a rank in an optimizer step."""
        return max(len(self.plan.microbatches(0, step)) for step in range(self.plan.num_steps))

    @property
    def fill(self) -> float:
        """Return the share of slots that hold a token."""
        return 1.0 - self.plan.metrics.waste_ratio


def first_batch(config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> TypicalBatch:
    """Return the sequences of the first step."""
    trainer, recipe = config.trainer, recipe_of(config)
    if not recipe.generates:
        return _demonstrations(config, tokenizer, prompts, trainer.prompts_per_step)
    _, rows = prompt_positions(config.seed, len(prompts), 0, trainer.prompts_per_step)
    response = config.rollout.max_new_tokens
    of_prompts = np.repeat(prompts.input_ids.select(rows).lengths.numpy(), trainer.group_size)
    source = f"prompts of the first batch, and responses of rollout.max_new_tokens ({response})"
    longest = int(prompts.input_ids.lengths.max()) + response
    warm_up = None
    if config.sft_warmup.steps > 0:
        warm_up = _demonstrations(config, tokenizer, prompts, config.sft_warmup.batch_size)
    return TypicalBatch(of_prompts + response, source, longest, of_prompts, trainer.group_size, warm_up)


def _demonstrations(config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, count: int) -> TypicalBatch:
    """Return the sequences of the first supervised step, which has `count` of them."""
    starts = range(0, len(prompts), _CHUNK_ROWS)
    chunks = (np.arange(start, min(start + _CHUNK_ROWS, len(prompts))) for start in starts)
    lengths = np.concatenate([prompts.demonstrations(rows, tokenizer)["input_ids"].lengths.numpy() for rows in chunks])
    _, rows = prompt_positions(config.seed, len(prompts), 0, count)
    longest = int(lengths.max())
    source = f"prompts and demonstrations of the first batch; the longest of all has {longest:,} tokens"
    return TypicalBatch(lengths[rows], source, longest)


def role_plan(config: Config, role: str, batch: TypicalBatch, cost: Cost | None) -> RolePlan:
    """Return a role's plan of a batch.

    Raises:
        PackingError: a sequence is longer than the token budget.
    """
    layout, trained = role_layout(config, role), is_trained(config, role)
    batching = layout.align(role_batching(config, role))
    mini_batch_size = config.trainer.mini_batch_size if trained else None
    shares = batching.share_prompts and batch.prompts is not None
    plan = make_plan(
        batch.lengths,
        batching,
        dp_size=layout.dp_size,
        mini_batch_size=mini_batch_size,
        groups=np.arange(batch.lengths.size) // batch.group if shares else None,
        split_groups=shares,
        prefixes=batch.prompts if shares else None,
        cost=cost,
    )
    on_cpu = not gpus_per_rank(config, role)
    several = _has_several(plan)
    rows = -(-min(batch.lengths.size, mini_batch_size or batch.lengths.size) // layout.dp_size)
    largest, forward = _largest_microbatch(batch, batching, rows, on_cpu=on_cpu), forward_batching(config, role)
    if role == "actor" and batch.warm_up is not None:  # the other roles don't run in the warm-up
        rows = -(-batch.warm_up.lengths.size // layout.dp_size)
        candidates = largest, _largest_microbatch(batch.warm_up, batching, rows, on_cpu=on_cpu)
        largest = max(candidates, key=lambda each: (each.slots, each.prompt, each.longest))
        several |= _has_several(make_plan(batch.warm_up.lengths, batching, dp_size=layout.dp_size, cost=cost))
    if forward is None:
        return RolePlan(plan, largest, several)
    rows = -(-batch.lengths.size // layout.dp_size)
    return RolePlan(plan, largest, several, _largest_microbatch(batch, layout.align(forward), rows, on_cpu=on_cpu))


def _has_several(plan: MicrobatchPlan) -> bool:
    """Return whether an optimizer step has several microbatches."""
    return max(len(plan.microbatches(0, step)) for step in range(plan.num_steps)) > 1


def _largest_microbatch(batch: TypicalBatch, batching: Batching, rows: int, *, on_cpu: bool) -> SimulatedMicrobatch:
    """Return the largest microbatch of a rank that has `rows` rows."""
    if batching.mode == "fixed":
        rows = min(rows, batching.micro_batch_size)
    width = -(-batch.longest // batching.alignment) * batching.alignment
    slots = min(batching.max_tokens or rows * width, rows * width)
    if batching.overlong == "own_microbatch":
        slots = max(slots, width)  # a row above the budget runs alone
    if on_cpu:
        slots = rounded_rows(slots)
    if not batching.share_prompts or batch.prompts is None:
        return SimulatedMicrobatch(slots, min(batch.longest, slots))
    # The keys of a prompt are kept for each of its rows, so the longest prompts take the most memory.
    prompt = batch.longest - int((batch.lengths - batch.prompts).max())
    return SimulatedMicrobatch(slots, min(batch.longest, slots), min(prompt, slots - 1), batch.group)


def holds_demonstrations(config: Config, batch: TypicalBatch) -> bool:
    """Return whether the actor's token budget holds every demonstration that a run trains on, or cuts it."""
    return holds(role_batching(config, "actor"), batch.longest_demonstration)


def plans_of(config: Config, roles: list[str], batch: TypicalBatch, cost: Cost) -> Mapping[str, RolePlan]:
    """Return the plans of roles; those whose model isn't the policy's balance tokens, as in a run."""
    return {role: role_plan(config, role, batch, None if role == "reward_model" else cost) for role in roles}

"""The stages of a step: what the recipes' loops are made of.

Each takes the session and the batch so far and returns the batch with more columns; its time and figures go to the
session. Row order never changes: every role gives its rows back in the order it got them.
"""

from collections.abc import Sequence
from shutil import rmtree
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recipes.resuming import reference_folder
from recipes.session import Session
from recipes.weighing import step_weights
from rlpack.algorithms.advantages import zero_group_fraction
from rlpack.algorithms.registry import row_advantages
from rlpack.data.batch import BatchedDataDict
from rlpack.data.sampler import prompt_positions, row_seeds
from rlpack.data.tokenisation import eos_id
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.rollout.engine import SamplingParams
from workers.actor import ActorWorker
from workers.reference import ReferenceWorker
from workers.reward import RewardWorker
from workers.rollout import RolloutWorker

# What a role is sent of a batch.
_GENERATE = ("input_ids", "seeds", "group_ids", "uid")
SCORED = ("input_ids", "response_mask")
_UPDATE = (*SCORED, "logprobs", "advantages", "loss_weight", "token_weight")


class Draw(NamedTuple):
    """Prompts that were drawn: their rows, the step they are for, and their positions (which fix what is sampled)."""

    prompts: BatchedDataDict
    step: int
    positions: np.ndarray


def draw_prompts(session: Session, step: int) -> Draw:
    """Return the prompts of a step, `trainer.prompts_per_step` rows, and their positions in the run.

    They follow the last ones drawn, so a resumed run may change their number and still skip and repeat none.
    """
    start, count = session.progress.prompts_seen, session.config.trainer.prompts_per_step
    epochs, rows = prompt_positions(session.config.seed, len(session.prompts), start, count)
    session.progress.prompts_seen = start + count
    session.metrics |= {"prompts_seen": start + count, "epoch": float(epochs[-1])}
    return Draw(session.prompts.batch(rows), step, np.arange(start, start + count))


def generate(session: Session, draw: Draw) -> BatchedDataDict:
    """Return the rollout batch: `group_size` responses for every prompt, B = prompts × group_size rows.

    Its columns are those of `rlpack.rollout.assemble.rollout_batch`, `completion`, and the dataset's own.
    """
    settings = session.config
    with session.run.timer("generate"):
        rollouts = respond(session, draw, settings.trainer.group_size, settings.rollout.temperature)
    counts = (rollouts["input_ids"].lengths - rollouts["prompt_lengths"]).float()
    session.metrics |= {
        "rollout/response_tokens_mean": counts.mean().item(),
        "rollout/response_tokens_max": counts.max().item(),
        "rollout/truncated_fraction": float(np.mean([reason == "length" for reason in rollouts["finish_reason"]])),
    }
    return rollouts


def respond(session: Session, draw: Draw, samples: int, temperature: float) -> BatchedDataDict:
    """Return `samples` responses for each prompt side by side, each from the random stream of its place in the run."""
    settings = session.config.rollout
    prompts = draw.prompts.repeat_interleave(samples)
    prompts["group_ids"] = torch.arange(draw.prompts.num_rows).repeat_interleave(samples)
    seeds = row_seeds(session.config.seed, draw.step, draw.positions, samples)
    prompts["seeds"] = torch.from_numpy(seeds.view(np.int64))
    eos = eos_id(session.tokenizer)
    params = SamplingParams(
        temperature=temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new_tokens,
        stop_token_ids=(*settings.stop_token_ids, *([] if eos is None else [eos])),
    )
    rollouts = session.rollout.run(RolloutWorker.generate, prompts.keep(_GENERATE), params)
    return rollouts.union(dict(prompts.drop(_GENERATE)))


def score(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `rewards`, summed over all scoring roles; rows without a finite reward are quarantined.

    A quarantined row stays in the batch, for order's sake, but none of its tokens counts: it adds to no loss, no
    denominator and no baseline.
    """
    with session.run.timer("reward"):
        rewards, valid, extras = scores(session.scorers, rollouts)
    kept = rewards[valid]
    session.metrics |= {
        "reward/mean": kept.mean().item() if kept.numel() else 0.0,
        "reward/std": kept.std(unbiased=False).item() if kept.numel() else 0.0,
        "reward/min": kept.min().item() if kept.numel() else 0.0,
        "reward/max": kept.max().item() if kept.numel() else 0.0,
        "reward/quarantined": float((~valid).sum()),
    }
    return rollouts.union({"rewards": rewards, "valid": valid}).union(extras)


class Judgement(NamedTuple):
    """Every row's reward, f32 [B]; whether all roles gave a finite one, bool [B]; and the columns that they added."""

    rewards: Tensor
    valid: Tensor
    extras: BatchedDataDict


def scores(groups: Sequence[WorkerGroup[RewardWorker]], rollouts: BatchedDataDict) -> Judgement:
    """Return what the scoring roles say together; a row without a finite reward has 0.

    The roles get all columns of texts, and `input_ids` and `response_mask`: so their batching counts tokens.
    """
    sent = rollouts.keep([*SCORED, *rollouts.names_of("list")])
    results = [_judged(group, sent) for group in groups]
    valid = torch.stack([result.valid for result in results]).all(0)
    rewards = torch.stack([result.rewards for result in results]).sum(0).where(valid, 0.0)
    extras = rollouts.keep([])
    for result in results:
        extras = extras.union(result.extras)
    return Judgement(rewards, valid, extras)


def _judged(group: WorkerGroup[Any], rollouts: BatchedDataDict) -> Judgement:
    """Return one role's rewards, and which rows it scored: none that its batching drops."""
    found = group.run(RewardWorker.score, rollouts)
    valid = ~found["quarantined"]
    valid[torch.from_numpy(group.plan(rollouts).step_of_row) < 0] = False
    return Judgement(found["rewards"], valid, found.drop(["rewards", "quarantined"]))


def old_logprobs(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `logprobs` f32 [T], the trained policy's own before its update, 0 outside responses, and `response_tokens`.

    The latter, int64 [B], counts the tokens of each response that the update's plan keeps.
    """
    with session.run.timer("logprobs"):
        old = session.actor.run(ActorWorker.logprobs, rollouts.keep([*SCORED, "rollout_logprobs"]))
    sums, tokens = (old[name].where(rollouts["valid"], 0).sum() for name in ("logprob_gap", "response_tokens"))
    session.metrics["rollout/logprob_gap"] = (sums / tokens.clamp(min=1)).item()
    return rollouts.union(old.keep(["logprobs", "response_tokens"]))


def reference_logprobs(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `reference_logprobs` f32 [T]; without a KL term there is no reference and nothing to add."""
    if session.reference is None:
        return rollouts
    with session.run.timer("reference"):
        return rollouts.union(session.reference.run(ReferenceWorker.logprobs, rollouts.keep(SCORED)))


def advantages(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `advantages`, and `loss_weight` and `token_weight` in the row's optimizer step: for all its tokens, f32 [B].

    The advantage function gets the columns of rows that it names, those that roles added among them. The figures are
    of the rows that train, quarantined ones left out.
    """
    settings = session.config.algorithm
    with session.run.timer("advantages"):
        columns = {name: rollouts[name] for name in rollouts.names_of("per-row")}
        per_row = row_advantages(settings.advantage, settings.advantage_arguments, dict(settings), columns)
        plan = session.actor.plan(rollouts, mini_batches=True)
        weights = step_weights(rollouts["response_tokens"].where(rollouts["valid"], 0), plan, settings)
    kept = per_row[rollouts["valid"]]
    session.metrics |= {
        "advantage/mean": kept.mean().item() if kept.numel() else 0.0,
        "advantage/std": kept.std(unbiased=False).item() if kept.numel() else 0.0,
        "advantage/zero_group_fraction": zero_group_fraction(per_row, rollouts["group_ids"]),
    }
    session.report_plan(plan, keep=True)
    return rollouts.union({"advantages": per_row, **weights})


def update(session: Session, rollouts: BatchedDataDict) -> None:
    """Take the optimizer steps of every mini-batch, `trainer.epochs` times over the batch."""
    names = [*_UPDATE, *(["reference_logprobs"] if session.reference else [])]
    batch = rollouts.keep(names)
    with session.run.timer("update"):
        rate = session.learning_rate
        epochs = [session.actor.run(ActorWorker.update, batch, rate) for _ in range(session.config.trainer.epochs)]
    session.took_steps([step for epoch in epochs for step in epoch])


def demonstrations(session: Session, count: int) -> BatchedDataDict:
    """Return the next `count` demonstrations, with their `loss_weight` and `token_weight`, f32 [B].

    Raises:
        DataError: an example has no demonstration.
        PackingError: one is over the token budget.
    """
    start = session.progress.demonstrations_seen
    _, rows = prompt_positions(session.config.seed, len(session.prompts), start, count)
    session.progress.demonstrations_seen = start + count
    batch = session.prompts.demonstrations(rows)
    plan = session.actor.plan(batch)
    session.report_plan(plan)
    counts = (torch.from_numpy(plan.lengths) - batch["prompt_lengths"]).clamp(min=0)
    return batch.union(step_weights(counts, plan, session.config.algorithm))


def imitate(session: Session, batch: BatchedDataDict, learning_rate: float) -> None:
    """Take one supervised step."""
    with session.run.timer("update"):
        session.took_steps(session.actor.run(ActorWorker.imitate, batch.keep([*SCORED, "loss_weight"]), learning_rate))


def forget_moments(session: Session) -> None:
    """Start the optimizer anew."""
    session.actor.run(ActorWorker.forget_moments)


def freeze_reference(session: Session) -> None:
    """Give the reference, if there is one, the policy that the recipe began with; a resumed run finds it on disk."""
    folder = reference_folder(session.run.directory)
    if not session.progress.took_recipe_steps:  # what lies there is of a run that came to no checkpoint
        rmtree(folder, ignore_errors=True)
    if session.reference is None:
        return
    if not folder.exists():
        staging = folder.with_suffix(".tmp")
        session.actor.run(ActorWorker.export_model, str(staging))
        staging.rename(folder)
    session.reference.run(ReferenceWorker.load_model, str(folder))


def load_rollout_weights(session: Session) -> None:
    """Give the newest weights to the rollout role."""
    with session.run.timer("sync"):
        session.actor.transfer(
            ActorWorker.export_weights, session.rollout, RolloutWorker.load_weights, session.progress.policy_version
        )

"""The stages of a step: what the recipes' loops are made of.

Each takes the session and the batch so far and returns the batch with more columns; its time and figures go to the
session. Row order never changes: every role gives its rows back in the order it got them.
"""

import math
from collections.abc import Callable
from shutil import rmtree
from typing import NamedTuple

import numpy as np
import torch

from rlpack.algorithms.advantages import zero_group_fraction
from rlpack.algorithms.kl import next_coefficient
from rlpack.algorithms.registry import advantage_parameters, row_advantages
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.remote import RemoteColumn
from rlpack.data.sampler import prompt_positions, row_seeds
from rlpack.data.tokenisation import eos_id
from rlpack.recipes.driver.loss_weights import step_weights
from rlpack.recipes.driver.resume import reference_folder
from rlpack.recipes.driver.reward_stages import SCORED
from rlpack.recipes.driver.session import Session
from rlpack.rollout.types import SamplingParams
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import PolicyGradientLoss, SFTLoss
from rlpack.workers.reference import ReferenceWorker
from rlpack.workers.rollout import RolloutWorker

# What a role is sent of a batch.
_GENERATE = ("input_ids", "seeds", "group_ids", "uid")


class Draw(NamedTuple):
    """Prompts that were drawn: their rows, the step they are for, and their positions (which fix what is sampled)."""

    prompts: BatchedDataDict
    step: int
    positions: np.ndarray


def draw_prompts(session: Session, step: int, count: int | None = None) -> Draw:
    """Return the prompts of a step, `count` rows or `trainer.prompts_per_step`, and their positions in the run.

    They follow the last ones drawn, so a resumed run may change their number and still skip and repeat none.
    """
    start = session.progress.prompts_seen
    count = session.config.trainer.prompts_per_step if count is None else count
    epochs, rows = prompt_positions(session.config.seed, len(session.prompts), start, count)
    session.progress.prompts_seen = start + count
    session.metrics |= {"prompts_seen": start + count, "epoch": float(epochs[-1])}
    return Draw(session.prompts.batch(rows), step, np.arange(start, start + count))


def generate(session: Session, draw: Draw, then: Callable[[BatchedDataDict], None] | None = None) -> BatchedDataDict:
    """Return the rollout batch: `group_size` responses for every prompt, B = prompts × group_size rows.

    Its columns are those of `rlpack.rollout.assemble.assemble`, `completion`, and the dataset's own. With `then`
    they are generated in parts, of whole groups, and `then` gets each part before the next is begun.
    """
    settings = session.config
    with session.run.timer("generate"):
        rollouts = respond(session, draw, settings.trainer.group_size, settings.rollout.temperature, then)
    report_lengths(session, rollouts)
    return rollouts


def report_lengths(session: Session, rollouts: BatchedDataDict) -> None:
    """Take over the figures of the responses' lengths."""
    counts = (rollouts["input_ids"].lengths - rollouts["prompt_lengths"]).float()
    session.metrics |= {
        "rollout/response_tokens_mean": counts.mean().item(),
        "rollout/response_tokens_max": counts.max().item(),
        "rollout/truncated_fraction": float(np.mean([reason == "length" for reason in rollouts["finish_reason"]])),
    }


def respond(
    session: Session,
    draw: Draw,
    samples: int,
    temperature: float,
    then: Callable[[BatchedDataDict], None] | None = None,
) -> BatchedDataDict:
    """Return `samples` responses for each prompt side by side, each from the random stream of its place in the run.

    With `then` they are generated in parts, of whole groups, and `then` gets each part before the next is begun.
    """
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
    parts: list[BatchedDataDict] = []
    for part in [prompts] if then is None else prompts.split(_part_rows(session, draw.prompts.num_rows, samples)):
        found = session.rollout.run(RolloutWorker.generate, part.keep(_GENERATE), params)
        parts.append(found.union(dict(part.drop(_GENERATE))))
        if then is not None:
            then(parts[-1])
    return BatchedDataDict.concat(parts) if len(parts) > 1 else parts[0]


def _part_rows(session: Session, prompts: int, samples: int) -> list[int]:
    """Return the rows of each part of a batch: whole groups, no more of them than the engines run at one time.

    Parts are even, so that no engine runs a few rows for themselves at the end.
    """
    at_one_time = session.rollout.num_ranks * session.config.rollout.max_num_seqs
    parts = math.ceil(prompts / max(1, at_one_time // samples))
    return [samples * len(groups) for groups in np.array_split(np.arange(prompts), max(1, parts))]


def old_logprobs(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `logprobs` f32 [T], the trained policy's own before its update, 0 outside responses, and `response_tokens`.

    The latter, int64 [B], counts the tokens of each response that the update's plan keeps.
    """
    with session.run.timer("logprobs"):
        old = session.actor.run(ActorWorker.logprobs, rollouts.keep([*SCORED, "rollout_logprobs"]))
    gap = old["logprob_gap"].sum() / old["response_tokens"].sum().clamp(min=1)
    session.metrics["rollout/logprob_gap"] = gap.item()
    return rollouts.union(old.keep(["logprobs", "response_tokens"]))


def reference_logprobs(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `reference_logprobs` f32 [T] and `kl_sum` f64 [B]; nothing without a KL term: there is no reference then."""
    if session.reference is None:
        return rollouts
    with session.run.timer("reference"):
        found = session.reference.run(ReferenceWorker.logprobs, rollouts.keep([*SCORED, "logprobs"]))
    return rollouts.union(found)


def advantages(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `advantages`, and `loss_weight` and `token_weight` in the row's optimizer step: for all its tokens, f32 [B].

    The advantage function gets the columns of rows that it names, those that roles added among them; rewards are less
    the KL term, where that is its place. The figures are of the rows that train, quarantined ones left out.
    """
    settings = session.config.algorithm
    with session.run.timer("advantages"):
        columns = dict(_columns_for_advantages(session, rollouts))
        if reward_kl_coef(session) > 0:
            columns["rewards"] = (columns["rewards"] - reward_kl_coef(session) * columns["kl_sum"]).float()
        per_row = row_advantages(settings.advantage, settings.advantage_arguments, dict(settings), columns)
    kept = per_row[rollouts["valid"]]
    session.metrics |= {
        "advantage/mean": kept.mean().item() if kept.numel() else 0.0,
        "advantage/std": kept.std(unbiased=False).item() if kept.numel() else 0.0,
        "advantage/zero_group_fraction": zero_group_fraction(per_row, rollouts["group_ids"]),
    }
    return weighed(session, rollouts.union({"advantages": per_row}))


def reward_kl_coef(session: Session) -> float:
    """Return what a nat of divergence from the reference takes off a reward: 0 where the KL term is in the loss."""
    return session.kl_coef if session.config.algorithm.kl_placement == "reward" else 0.0


def weighed(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `loss_weight` and `token_weight` of the actor's update: for all of a row's tokens, f32 [B].

    Rows that are not `valid`, or not to train (`trains`, where there is such a column), weigh nothing.
    """
    plan = session.actor.plan(rollouts, mini_batches=True)
    weighs = rollouts["valid"] & rollouts["trains"] if "trains" in rollouts else rollouts["valid"]
    counts = rollouts["response_tokens"].where(weighs, 0)
    if "kl_sum" in rollouts:
        kept = rollouts["kl_sum"][rollouts["valid"]]
        session.metrics["reference/kl"] = kept.mean().item() if kept.numel() else 0.0
        session.metrics["reference/kl_coef"] = session.kl_coef
    session.report_plan(plan, keep=True)
    return rollouts.union(step_weights(counts, plan, session.config.algorithm))


def _columns_for_advantages(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Return the columns of rows, of those that lie in the store (several numbers a row) only what is asked for."""
    offered = rollouts.keep(rollouts.names_of("per-row"))
    asked = advantage_parameters(session.config.algorithm.advantage)
    return session.store.fetch(
        offered.drop(
            [name for name, column in offered.items() if isinstance(column, RemoteColumn) and name not in asked]
        )
    )


def update(session: Session, rollouts: BatchedDataDict) -> None:
    """Take the optimizer steps of every mini-batch, `trainer.updates_per_batch` times over the batch."""
    has_kl = session.reference is not None and session.config.algorithm.kl_placement == "loss"
    loss = PolicyGradientLoss(session.config.algorithm, temperature=session.config.rollout.temperature)
    loss = loss.with_kl_coef(session.kl_coef if has_kl else 0.0)
    batch = rollouts.keep(loss.reads)
    with session.run.timer("update"):
        updates = [
            session.actor.run(ActorWorker.train_step, batch, loss, session.learning_rate)
            for _ in range(session.config.trainer.updates_per_batch)
        ]
    session.took_steps([step for update in updates for step in update])
    _adapt_kl(session, rollouts.num_rows)


def _adapt_kl(session: Session, rows: int) -> None:
    """Bring the next step's KL coefficient nearer to where the divergence has its target."""
    settings = session.config.algorithm
    if settings.kl_target is not None and session.reference is not None:
        measured, horizon = session.metrics["reference/kl"], settings.kl_horizon
        session.progress.kl_coef = next_coefficient(
            session.kl_coef, measured, target=settings.kl_target, horizon=horizon, rows=rows
        )


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


def sft_step(session: Session, batch: BatchedDataDict, learning_rate: float) -> None:
    """Take one supervised optimizer step on the whole batch."""
    loss, actor = SFTLoss(), session.actor.with_plan(session.actor.plan(batch))
    with session.run.timer("update"):
        session.took_steps(actor.run(ActorWorker.train_step, batch.keep(loss.reads), loss, learning_rate))


def reset_optimizer(session: Session) -> None:
    """Start with a new optimizer."""
    session.actor.run(ActorWorker.reset_optimizer)


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

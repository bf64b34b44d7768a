"""The stages of a step: what the recipes' loops are made of.

Each takes the session and the batch so far and returns the batch with more columns; its time and figures go to the
session. Row order never changes: every role gives its rows back in the order it got them.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recipes.session import Session
from rlpack.algorithms.advantages import group_relative, zero_group_fraction
from rlpack.algorithms.aggregation import Aggregation, count_denominators, token_weights
from rlpack.config.schema import Algorithm
from rlpack.data.batch import BatchedDataDict
from rlpack.data.ragged import Ragged
from rlpack.data.sampler import prompt_positions, row_seeds
from rlpack.data.tokenisation import eos_id
from rlpack.packing import MicrobatchPlan
from rlpack.rollout.engine import SamplingParams
from workers.actor import ActorWorker
from workers.reference import ReferenceWorker
from workers.reward import RewardWorker
from workers.rollout import RolloutWorker

# What a role is sent of a batch.
_GENERATE = ("input_ids", "seeds", "group_ids", "uid")
_SCORE = ("input_ids", "response_mask")
_UPDATE = (*_SCORE, "logprobs", "advantages", "loss_weight", "token_weight")


class Draw(NamedTuple):
    """Prompts that were drawn: their rows, the step they are for, and their positions (which fix what is sampled)."""

    prompts: BatchedDataDict
    step: int
    positions: np.ndarray


def draw_prompts(session: Session, step: int) -> Draw:
    """Return the prompts of a step and their positions in the run."""
    count = session.config.trainer.prompts_per_step
    start = (step - 1) * count
    epochs, rows = prompt_positions(session.config.seed, len(session.prompts), start, count)
    session.progress.prompts_seen = start + count
    session.metrics |= {"prompts_seen": start + count, "epoch": float(epochs[-1])}
    return Draw(session.prompts.batch(rows), step, np.arange(start, start + count))


def generate(session: Session, draw: Draw) -> BatchedDataDict:
    """Return the rollout batch: `group_size` responses for every prompt."""
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
        rewards, valid = scores(session, rollouts)
    kept = rewards[valid]
    session.metrics |= {
        "reward/mean": kept.mean().item() if kept.numel() else 0.0,
        "reward/std": kept.std(unbiased=False).item() if kept.numel() else 0.0,
        "reward/min": kept.min().item() if kept.numel() else 0.0,
        "reward/max": kept.max().item() if kept.numel() else 0.0,
        "reward/quarantined": float((~valid).sum()),
    }
    mask = rollouts["response_mask"]
    rollouts["response_mask"] = mask.with_values(mask.values & valid[mask.segment_ids])
    return rollouts.union({"rewards": rewards, "valid": valid})


def scores(session: Session, rollouts: BatchedDataDict) -> tuple[Tensor, Tensor]:
    """Return every row's reward, f32 [B], and whether all scoring roles gave a finite one, bool [B]; else it is 0."""
    texts = rollouts.keep([name for name in rollouts if isinstance(rollouts[name], list)])
    results = [group.run(RewardWorker.score, texts) for group in session.scorers]
    valid = ~torch.stack([result["quarantined"] for result in results]).any(0)
    return torch.stack([result["rewards"] for result in results]).sum(0).where(valid, 0.0), valid


def old_logprobs(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `logprobs`, the trained policy's own before its update."""
    with session.run.timer("logprobs"):
        old = session.actor.run(ActorWorker.logprobs, rollouts.keep(_SCORE))
    gap = (old["logprobs"].values - rollouts["rollout_logprobs"].values).abs()[rollouts["response_mask"].values]
    session.metrics["rollout/logprob_gap"] = gap.mean().item() if gap.numel() else 0.0
    return rollouts.union(old)


def reference_logprobs(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `reference_logprobs`; without a KL term there is no reference and nothing to add."""
    if session.reference is None:
        return rollouts
    with session.run.timer("reference"):
        return rollouts.union(session.reference.run(ReferenceWorker.logprobs, rollouts.keep(_SCORE)))


def advantages(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `advantages`, and the weights that each token has in loss and metrics of its optimizer step."""
    settings = session.config.algorithm
    with session.run.timer("advantages"):
        rewards, groups = rollouts["rewards"], rollouts["group_ids"]
        per_row = group_relative(
            rewards, groups, baseline=settings.baseline, scale=settings.scale, valid=rollouts["valid"]
        )
        mask = rollouts["response_mask"]
        per_token = mask.with_values(per_row[mask.segment_ids] * mask.values)
        plan = session.actor.plan(rollouts, mini_batches=True)
        weights = step_weights(mask, plan, settings)
    session.metrics |= {
        "advantage/mean": per_row.mean().item(),
        "advantage/std": per_row.std(unbiased=False).item(),
        "advantage/zero_group_fraction": zero_group_fraction(per_row, groups),
    }
    session.report_plan(plan, keep=True)
    return rollouts.union({"advantages": per_token, **weights})


def step_weights(mask: Ragged, plan: MicrobatchPlan, settings: Algorithm) -> dict[str, Ragged]:
    """Return `loss_weight` and `token_weight` f32 of every token; over an optimizer step the latter add up to 1.

    Denominators are counted here, over whole optimizer steps, before the first microbatch: so losses and metrics are
    plain sums wherever their rows land. Tokens that the plan truncates or drops count nowhere.
    """
    position = torch.arange(mask.values.shape[0]) - mask.offsets[:-1][mask.segment_ids]
    counted = mask.with_values(mask.values & (position < torch.from_numpy(plan.lengths)[mask.segment_ids]))
    loss_weight, token_weight = (torch.zeros(mask.values.shape[0]) for _ in range(2))
    step_of_token = torch.from_numpy(plan.step_of_row)[mask.segment_ids]
    for step in range(plan.num_steps):
        part, where = counted.select(plan.step_of_row == step), step_of_token == step
        counts = count_denominators(part, constant=settings.sequence_sum_constant)
        kinds: list[tuple[Tensor, Aggregation]] = [(loss_weight, settings.aggregation), (token_weight, "token_mean")]
        for weight, kind in kinds:
            weight[where] = token_weights(part.values, part.lengths, aggregation=kind, denominators=counts)
    return {"loss_weight": mask.with_values(loss_weight), "token_weight": mask.with_values(token_weight)}


def update(session: Session, rollouts: BatchedDataDict) -> None:
    """Take the optimizer steps of every mini-batch, `trainer.epochs` times over the batch."""
    names = [*_UPDATE, *(["reference_logprobs"] if session.reference else [])]
    batch = rollouts.keep(names)
    with session.run.timer("update"):
        epochs = [session.actor.run(ActorWorker.update, batch) for _ in range(session.config.trainer.epochs)]
    session.took_steps([step for epoch in epochs for step in epoch])


def demonstrations(session: Session, step: int, count: int) -> BatchedDataDict:
    """Return the demonstrations of a supervised step, with every token's weight in its loss."""
    _, rows = prompt_positions(session.config.seed, len(session.prompts), (step - 1) * count, count)
    batch = session.prompts.demonstrations(rows, session.tokenizer)
    plan = session.actor.plan(batch)
    session.report_plan(plan)
    return batch.union(step_weights(batch["response_mask"], plan, session.config.algorithm))


def imitate(session: Session, batch: BatchedDataDict, learning_rate: float) -> None:
    """Take one supervised step."""
    with session.run.timer("update"):
        session.took_steps(session.actor.run(ActorWorker.imitate, batch, learning_rate))


def forget_moments(session: Session) -> None:
    """Start the optimizer anew."""
    session.actor.run(ActorWorker.forget_moments)


def freeze_reference(session: Session) -> None:
    """Give the reference, if there is one, the policy that the recipe began with; a resumed run finds it on disk."""
    if session.reference is None:
        return
    folder = session.run.directory / "reference"
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

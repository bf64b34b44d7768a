"""Evaluation on held-out prompts, in a run or by `rlpack evaluate`.

A run evaluates the held-out split and the sets of `evaluation.sets`: those with `at_end` after the last step only.
Every evaluation draws from the same random streams, which no training step uses.
"""

import math
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.evaluation_sets import COLUMN
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.observe.console import Sample
from rlpack.recipes.driver.batch_lags import versions_of
from rlpack.recipes.driver.displayed_texts import displayed_texts
from rlpack.recipes.driver.engine_lifecycle import wake_engines
from rlpack.recipes.driver.evaluations import EnginesOnly
from rlpack.recipes.driver.forward_plans import forward_plan
from rlpack.recipes.driver.reward_stages import PendingRewards, RowRewards, count_failures
from rlpack.recipes.driver.rollout_stages import DrawnPrompts, SamplingSession, sample_responses
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.splits import Split
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.errors import StalenessError
from rlpack.workers.actor import ActorWorker


class EvaluatedSession(SamplingSession, Protocol):
    """What an evaluation needs: a run's session, or the roles that `rlpack evaluate` starts."""

    @property
    def held_out(self) -> Split:
        """The prompts."""
        ...

    @property
    def groups(self) -> dict[str, WorkerGroup[Any]]:
        """The started roles by name, `reward` among them."""
        ...


# Seeds are a function of the step; no training step has this number.
_STEP = 2**32


@EnginesOnly
def evaluate(session: Session, step: StepContext) -> None:
    """Record the mean reward on each set that is due: sampled, best of n, and greedy."""
    samples, temperature = session.config.evaluation.samples, session.config.rollout.temperature
    wake_engines(session, step)
    for name, split in sets_due(session).items():
        sampled, valid = _rewards(session, step, name, split, samples, temperature)
        sampled = sampled.view(-1, samples)
        greedy, _ = _rewards(session, step, name, split, 1, temperature=0.0)
        rewards = torch.cat((sampled.flatten(), greedy.flatten()))
        step.metrics |= {
            _metric(name, "reward_sampled"): sampled.mean().item(),
            _metric(name, "reward_best_of_n"): _best(sampled, valid.view(-1, samples)).mean().item(),
            _metric(name, "reward_greedy"): greedy.mean().item(),
            _metric(name, "graded_rewards"): float(((rewards != 0) & (rewards != 1)).sum()),
        }


def evaluate_loss(session: Session, step: StepContext) -> None:
    """Record the mean negative log-prob of the demonstrations' tokens of each set that is due, and its perplexity.

    The mean is over all tokens of a set, so it depends neither on batching nor on the number of ranks. It is computed
    at temperature 1, as `SFTLoss` is. Nothing is trained: a run without evaluations has the same weights, bit for bit.
    """
    for name, split in sets_due(session).items():
        batch = split.demonstrations(np.arange(len(split)))
        plan = forward_plan(session, "actor", batch) or session.actor.plan(batch)
        scored = session.actor.with_plan(plan).run(ActorWorker.logprobs, batch, temperature=1.0)
        overlong, num_tokens = plan.truncated.size + plan.dropped.size, scored["response_tokens"].sum().item()
        step.metrics[_metric(name, "overlong")] = float(overlong)
        if num_tokens:  # there are none if the plan dropped every demonstration
            loss = -scored["logprob_sum"].sum().item() / num_tokens
            step.metrics |= {_metric(name, "loss"): loss, _metric(name, "perplexity"): math.exp(min(loss, 700.0))}


def sets_due(session: Session) -> dict[str, Split]:
    """Return the sets to evaluate after the last step that was taken, by name; the held-out split's is ""."""
    progress, config = session.progress, session.config
    is_last = (progress.phase, progress.step) == ("train", config.trainer.steps)
    named = {
        name: split
        for name, split in session.evaluation_sets.items()
        if is_last or not config.evaluation.sets[name].at_end
    }
    return {"": session.held_out} | named


def _metric(set_name: str, name: str) -> str:
    """Return the name of a metric of a set."""
    return f"evaluation/{set_name}/{name}" if set_name else f"evaluation/{name}"


def sample_and_score(
    session: EvaluatedSession, drawn: DrawnPrompts, samples: int, temperature: float, metrics: dict[str, float]
) -> tuple[BatchedDataDict, RowRewards]:
    """Return `samples` adjacent responses per prompt, and the rewards of the reward role; call it within a lease.

    A streaming engine adds to `metrics`, as in `sample_responses`.
    """
    pending = PendingRewards([session.groups["reward"]])
    with pending.collecting(session.config.rollout.engine):
        rollouts = sample_responses(
            session, drawn, samples, temperature=temperature, on_part=pending.submit, metrics=metrics
        )
    return rollouts, pending.result()


def draw_held_out(session: EvaluatedSession, positions: np.ndarray) -> DrawnPrompts:
    """Return held-out prompts by position, int64; their random streams are the same in every evaluation."""
    return DrawnPrompts(session.held_out.batch(positions), _STEP, positions)


def _best(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return the highest valid reward of each prompt, f32 [prompts]; 0 for a prompt without any.

    >>> rewards, valid = torch.tensor([[-2.0, -1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([[1, 1, 0], [0, 0, 0]])
    >>> _best(rewards, valid.bool()).tolist()
    [-1.0, 0.0]

    Args:
        rewards: f32 [prompts, samples].
        valid: whether a sample has a reward, bool [prompts, samples].
    """
    return rewards.where(valid, -torch.inf).amax(1).where(valid.any(1), 0.0)


def _rewards(
    session: Session, step: StepContext, name: str, split: Split, samples: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the rewards of all samples of a set, f32 [prompts × samples], 0 if quarantined; and which are not."""
    with session.store.lease("an evaluation"):
        positions = np.arange(len(split))
        prompts = split.batch(positions)
        if name and session.config.evaluation.sets[name].reward_function is not None:
            prompts = prompts.union({COLUMN: [name] * len(split)})
        drawn = DrawnPrompts(prompts, _STEP, positions, evaluated_during=session.progress.step + 1)
        rollouts, (rewards, valid, _, counts) = sample_and_score(session, drawn, samples, temperature, step.metrics)
        if session.config.trainer.lead:
            _check_versions(session, step, rollouts)
        count_failures(step, counts)
        key = _metric(name, "quarantined")
        step.metrics[key] = step.metrics.get(key, 0.0) + float((~valid).sum())
        if temperature > 0 and not name:
            step.samples += _shown_samples(session, rollouts, rewards, valid)
    return rewards, valid


def _check_versions(session: Session, step: StepContext, rollouts: BatchedDataDict) -> None:
    """Raise if a token was sampled with weights other than the last published ones.

    Raises:
        StalenessError: one was.
    """
    versions, newest = versions_of(session, rollouts), session.rollout_weights.version
    if versions.keys() - {newest}:
        raise StalenessError(
            f"the evaluation after step {step.number} has tokens of the policy versions {min(versions)} to "
            f"{max(versions)}, and all have to be of {newest}, the newest; a recipe publishes weights by "
            "`AheadQueue.publish`, which waits for evaluations",
            policy_version=newest,
        )


def _shown_samples(session: Session, rollouts: BatchedDataDict, rewards: Tensor, valid: Tensor) -> list[Sample]:
    """Return a few samples to show, spread over the split."""
    count = min(session.config.logger.samples, rollouts.num_rows)
    rows = torch.linspace(0, rollouts.num_rows - 1, count).long().tolist() if count else []
    texts = displayed_texts(session.tokenizer, session.store, rollouts.select(rows))
    return [
        Sample(**text._asdict(), reward=rewards[row].item() if valid[row] else None)
        for row, text in zip(rows, texts, strict=True)
    ]

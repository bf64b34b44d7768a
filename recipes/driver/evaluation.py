"""Evaluation on the held-out split, in a run or by `rlpack evaluate`.

Every evaluation draws from the same random streams, which no training step uses.
"""

import math
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.data.tokenization import prompt_for_display
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.observe.console import Sample
from rlpack.recipes.driver.engine_lifecycle import wake_engines
from rlpack.recipes.driver.forward_plans import forward_plan
from rlpack.recipes.driver.reward_stages import PendingRewards, RowRewards, count_failures
from rlpack.recipes.driver.rollout_stages import DrawnPrompts, SamplingSession, sample_responses
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.splits import Split
from rlpack.recipes.driver.step_context import StepContext
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


def evaluate(session: Session, step: StepContext) -> None:
    """Record the mean reward on the held-out split: sampled, best of n, and greedy."""
    samples = session.config.evaluation.samples
    wake_engines(session, step)
    sampled = _rewards(session, step, samples, session.config.rollout.temperature).view(-1, samples)
    greedy = _rewards(session, step, 1, temperature=0.0)
    rewards = torch.cat((sampled.flatten(), greedy.flatten()))
    step.metrics |= {
        "evaluation/reward_sampled": sampled.mean().item(),
        "evaluation/reward_best_of_n": sampled.amax(1).mean().item(),
        "evaluation/reward_greedy": greedy.mean().item(),
        "evaluation/graded_rewards": float(((rewards != 0) & (rewards != 1)).sum()),
    }


def evaluate_loss(session: Session, step: StepContext) -> None:
    """Record the mean negative log-prob of the held-out demonstrations' tokens, and its perplexity."""
    batch = session.held_out.demonstrations(np.arange(len(session.held_out)))
    plan = forward_plan(session, "actor", batch) or session.actor.plan(batch)
    scored = session.actor.with_plan(plan).run(ActorWorker.logprobs, batch, temperature=1.0)
    loss = -(scored["logprob_sum"].sum() / scored["response_tokens"].sum().clamp(min=1)).item()
    step.metrics |= {"evaluation/loss": loss, "evaluation/perplexity": math.exp(min(loss, 700.0))}


def sample_and_score(
    session: EvaluatedSession, drawn: DrawnPrompts, samples: int, temperature: float
) -> tuple[BatchedDataDict, RowRewards]:
    """Return `samples` adjacent responses per prompt, and the rewards of the reward role; call it within a lease."""
    pending = PendingRewards([session.groups["reward"]])
    rollouts = sample_responses(session, drawn, samples, temperature=temperature, on_part=pending.submit)
    return rollouts, pending.result()


def draw_held_out(session: EvaluatedSession, positions: np.ndarray) -> DrawnPrompts:
    """Return held-out prompts by position, int64; their random streams are those of every evaluation."""
    return DrawnPrompts(session.held_out.batch(positions), _STEP, positions)


def _rewards(session: Session, step: StepContext, samples: int, temperature: float) -> Tensor:
    """Return the rewards of all held-out samples, f32 [prompts × samples]; 0 if quarantined."""
    with session.store.lease("an evaluation"):
        drawn = draw_held_out(session, np.arange(len(session.held_out)))
        rollouts, (rewards, valid, _, counts) = sample_and_score(session, drawn, samples, temperature)
        count_failures(step, counts)
        key = "evaluation/quarantined"
        step.metrics[key] = step.metrics.get(key, 0.0) + float((~valid).sum())
        if temperature > 0:
            _show_samples(session, rollouts, rewards, valid)
    return rewards


def _show_samples(session: Session, rollouts: BatchedDataDict, rewards: Tensor, valid: Tensor) -> None:
    """Show a few samples, spread over the split."""
    count = min(session.config.logger.samples, rollouts.num_rows)
    rows = torch.linspace(0, rollouts.num_rows - 1, count).long().tolist() if count else []
    texts = session.store.fetch(rollouts.keep(["prompt", "completion", "answer"]).select(rows))
    columns = zip(rows, texts["prompt"], texts["completion"], texts["answer"], strict=True)
    session.run.log_samples(
        [
            Sample(
                prompt=prompt_for_display(session.tokenizer, prompt),
                completion=completion,
                answer=None if answer is None else str(answer),
                reward=rewards[row].item() if valid[row] else None,
            )
            for row, prompt, completion, answer in columns
        ]
    )

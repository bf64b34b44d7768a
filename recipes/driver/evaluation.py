"""The held-out split, whole, at every evaluation."""

import math

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.observe.console import Sample
from rlpack.recipes.driver.reward_stages import SCORED, Scoring, count_failures
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.stages import Draw, respond
from rlpack.workers.actor import ActorWorker

# Evaluation draws from streams of its own, at every evaluation the same ones.
_STEP = 2**32


def evaluate(session: Session) -> None:
    """Measure the built-in role's mean reward on the held-out split: sampled (mean and best of n) and greedy."""
    samples = session.config.evaluation.samples
    sampled = _rewards(session, samples, session.config.rollout.temperature).view(-1, samples)
    session.metrics |= {
        "evaluation/accuracy_sampled": sampled.mean().item(),
        "evaluation/accuracy_best_of_n": sampled.amax(1).mean().item(),
        "evaluation/accuracy_greedy": _rewards(session, 1, temperature=0.0).mean().item(),
    }


def evaluate_loss(session: Session) -> None:
    """Measure the mean negative log-prob of the held-out demonstrations' tokens, and the perplexity it means."""
    batch = session.held_out.demonstrations(np.arange(len(session.held_out)))
    scored = session.actor.run(ActorWorker.logprobs, batch.keep(SCORED), temperature=1.0)
    loss = -(scored["logprob_sum"].sum() / scored["response_tokens"].sum().clamp(min=1)).item()
    session.metrics |= {"evaluation/loss": loss, "evaluation/perplexity": math.exp(min(loss, 700.0))}


def _rewards(session: Session, samples: int, temperature: float) -> Tensor:
    """Return the reward of every sample of every held-out prompt, f32 [prompts × samples]; a broken one counts 0."""
    positions = np.arange(len(session.held_out))
    with session.store.step():
        draw = Draw(session.held_out.batch(positions), _STEP, positions)
        scoring = Scoring([session.groups["reward"]])
        rollouts = respond(session, draw, samples, temperature, scoring.begin)
        rewards, valid, _, counts = scoring.finish()
        count_failures(session, counts)
        key = "evaluation/quarantined"
        session.metrics[key] = session.metrics.get(key, 0.0) + float((~valid).sum())
        if temperature > 0:
            _show(session, rollouts, rewards, valid)
    return rewards


def _show(session: Session, rollouts: BatchedDataDict, rewards: Tensor, valid: Tensor) -> None:
    """Show a few samples, spread over the split."""
    count = min(session.config.logger.samples, rollouts.num_rows)
    rows = torch.linspace(0, rollouts.num_rows - 1, count).long().tolist() if count else []
    texts = session.store.fetch(rollouts.keep(["prompt", "completion", "answer"]).select(rows))
    shown = zip(rows, texts["prompt"], texts["completion"], texts["answer"], strict=True)
    session.run.samples(
        [
            Sample(
                prompt=str(prompt),
                completion=completion,
                answer=None if answer is None else str(answer),
                reward=rewards[row].item() if valid[row] else None,
            )
            for row, prompt, completion, answer in shown
        ]
    )

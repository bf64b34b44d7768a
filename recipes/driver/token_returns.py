"""REINFORCE++ with a KL penalty in the rewards: returns that differ within a response, normalized over the batch."""

import math

import torch

from rlpack.algorithms.advantages import EPSILON, center_by_group
from rlpack.batch.batch import BatchedDataDict
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import Moments


def compute_token_returns(
    session: Session, step: StepContext, rollouts: BatchedDataDict, plan: MicrobatchPlan, kl_coef: float
) -> BatchedDataDict:
    """Add `advantages` f32 [T]: rewards minus `kl_coef` · KL, from each token on, normalized over the valid tokens.

    Tokens stay with the actor's ranks; the driver gets their sums. Metrics are over the tokens, before they are
    normalized.
    """
    actor, settings = session.actor.with_plan(plan), session.config.algorithm
    arguments = settings.advantage_arguments
    valid, rewards = rollouts["valid"], rollouts["rewards"]
    if arguments.get("center_groups", False):
        rewards = center_by_group(rewards, rollouts["group_ids"], valid=valid)
    counts = rollouts["response_tokens"].where(valid, 0).double()
    total = counts.sum().clamp(min=1)
    pivot = ((torch.where(valid, rewards.double(), 0.0) * counts).sum() / total).item()
    scored = rollouts.drop(["rewards"]).union({"rewards": rewards.float()})
    returns = actor.run(ActorWorker.token_returns, scored, settings, kl_coef, pivot)
    distance = (returns["return_sum"].sum() / total).item()  # distance of the mean from the pivot
    squares = returns["return_squares"].sum().item() - total.item() * distance**2
    moments = Moments(pivot + distance, math.sqrt(max(0.0, squares) / max(1.0, total.item() - 1)))
    step.metrics |= {"advantage/mean": moments.mean, "advantage/std": moments.std}
    rollouts = rollouts.union(returns.keep(["advantages"]))
    normalized = actor.run(ActorWorker.normalize_advantages, rollouts, moments, arguments.get("epsilon", EPSILON))
    return rollouts.drop(["advantages"]).union(normalized)

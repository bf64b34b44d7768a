"""The stages of a step that have to do with a critic."""

import math

from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.recipes.driver import stages
from rlpack.recipes.driver.loss_weights import step_weights
from rlpack.recipes.driver.reward_stages import SCORED
from rlpack.recipes.driver.session import Session
from rlpack.workers.actor import ActorWorker
from rlpack.workers.critic import CriticWorker
from rlpack.workers.loss import ValueLoss

_ESTIMATED = ("response_mask", "values", "rewards", "valid")


def begin_critic(session: Session) -> None:
    """Give a new critic the policy that the recipe begins with, unless it has a model of its own."""
    if not session.progress.took_recipe_steps and session.config.critic.path is None:
        version = session.progress.policy_version
        session.actor.transfer(ActorWorker.export_weights, session.critic, CriticWorker.load_weights, version)


def values(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `values` f32 [T], the critic's own before its update, and `value_tokens` int64 [B], those its plan keeps."""
    with session.run.timer("values"):
        return rollouts.union(session.critic.run(CriticWorker.values, rollouts.keep(SCORED)))


def advantages(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Add `advantages` and `returns` f32 [T] by generalised advantage estimation, and the actor's weights f32 [B].

    Whitened over the tokens of the batch that count. Tokens stay with the critic's ranks; the driver sees their sums.
    """
    settings, coefficient = session.config.critic, stages.reward_kl_coef(session)
    names = [*_ESTIMATED, *(["logprobs", "reference_logprobs"] if coefficient > 0 else [])]
    counts = rollouts["value_tokens"].where(rollouts["valid"], 0)
    with session.run.timer("advantages"):
        # The plan counts tokens of input_ids, as for all of the critic's calls.
        sent = rollouts.keep(["input_ids", *names])
        found = session.critic.run(CriticWorker.advantages, sent, coefficient)
        mean, std = _moments(found, "advantage", counts)
        estimated = rollouts.union(found.keep(["advantages", "returns"]))
        if settings.normalize_advantages:
            sent = estimated.keep(["input_ids", "response_mask", "advantages"])
            whitened = session.critic.run(CriticWorker.normalize_advantages, sent, mean, std)
            estimated = estimated.drop(["advantages"]).union(whitened)
    errors, returns = _moments(found, "error", counts), _moments(found, "return", counts)
    session.metrics |= {
        "advantage/mean": mean,
        "advantage/std": std,
        "critic/return_mean": returns[0],
        "critic/explained_variance": 1.0 - (errors[1] / returns[1]) ** 2 if returns[1] > 0 else 0.0,
    }
    return stages.weighed(session, estimated)


def update_critic(session: Session, rollouts: BatchedDataDict) -> None:
    """Take the critic's optimizer steps of every mini-batch, `trainer.updates_per_batch` times over the batch."""
    plan = session.critic.plan(rollouts, mini_batches=True)
    weights = step_weights(rollouts["value_tokens"].where(rollouts["valid"], 0), plan, session.config.algorithm)
    loss = ValueLoss(session.config.critic.value_clip)
    columns = [name for name in loss.reads if name != "loss_weight"]  # there, it is the actor's
    batch = rollouts.keep(columns).union({"loss_weight": weights["token_weight"]})
    with session.run.timer("update_critic"):
        rate = session.critic_learning_rate
        updates = [
            session.critic.run(CriticWorker.train_step, batch, loss, rate)
            for _ in range(session.config.trainer.updates_per_batch)
        ]
    session.took_steps([step for update in updates for step in update])


def _moments(found: BatchedDataDict, name: str, counts: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation over the tokens that count, from their sums of each row."""
    tokens = counts.sum().clamp(min=1)
    mean = (found[f"{name}_sum"].sum() / tokens).item()
    square = (found[f"{name}_squares"].sum() / tokens).item()
    return mean, math.sqrt(max(0.0, square - mean * mean))

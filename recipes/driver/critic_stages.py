"""Critic stages: values, token advantages and the critic's update (PPO)."""

import math

from torch import Tensor

from rlpack.batch.batch import BatchedDataDict
from rlpack.distributed.weights import WeightChannel
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver import policy_stages
from rlpack.recipes.driver.batch_passes import passes
from rlpack.recipes.driver.forward_plans import forward_plan
from rlpack.recipes.driver.learning_rate import learning_rate
from rlpack.recipes.driver.loss_weights import has_tokens, step_weights
from rlpack.recipes.driver.reward_stages import check_scored
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.workers.critic import CriticWorker
from rlpack.workers.loss import Moments, ValueLoss


def initialize_critic(session: Session) -> None:
    """Copy the initial policy into a new critic, unless `critic.path` is set."""
    if not session.progress.recipe_started and session.config.critic.path is None:
        WeightChannel(session.actor, session.critic).transfer()


def compute_values(
    session: Session, step: StepContext, rollouts: BatchedDataDict, plan: MicrobatchPlan
) -> BatchedDataDict:
    """Add the critic's `values` f32 [T] before its update, and `value_tokens` int64 [B].

    `value_tokens` counts the response tokens of each row that the critic's `plan` keeps.
    """
    with step.timer("values"):
        forward = forward_plan(session, "critic", rollouts) or plan
        values = session.critic.with_plan(forward).run(CriticWorker.values, rollouts)
    session.performance.count("critic", CriticWorker.values, plan, values["value_tokens"])
    return rollouts.union(values)


def compute_token_advantages(
    session: Session, step: StepContext, rollouts: BatchedDataDict, plan: MicrobatchPlan
) -> tuple[BatchedDataDict, Moments | None]:
    """Add `advantages` and `returns` f32 [T] by generalized advantage estimation; `plan` is the critic's.

    Tokens stay with the critic's ranks; the driver gets their sums. The second result holds the mean and standard
    deviation over the counted tokens, by which the actor's update normalizes the advantages; None without
    `critic.normalize_advantages`.

    Raises:
        AlgorithmError: the batch isn't scored yet.
    """
    check_scored(rollouts, compute_token_advantages.__name__)
    coefficient = policy_stages.reward_kl_coef(session)
    counts = _value_tokens(rollouts)
    with step.timer("advantages"):
        estimates = session.critic.with_plan(plan).run(CriticWorker.advantages, rollouts, coefficient)
    advantages, errors, returns = (_moments(estimates, name, counts) for name in ("advantage", "error", "return"))
    step.metrics |= {
        "advantage/mean": advantages.mean,
        "advantage/std": advantages.std,
        "critic/return_mean": returns.mean,
        "critic/explained_variance": 1.0 - (errors.std / returns.std) ** 2 if returns.std > 0 else 0.0,
    }
    estimated = rollouts.union(estimates.keep(["advantages", "returns"]))
    moments = advantages if session.config.critic.normalize_advantages else None
    return estimated, moments


def update_critic(session: Session, step: StepContext, rollouts: BatchedDataDict, plan: MicrobatchPlan) -> None:
    """Take one optimizer step of the critic per mini-batch, `trainer.updates_per_batch` times over the batch.

    With `trainer.shuffle_mini_batches`, later passes reorder the rows; see `passes`.
    """
    trainer, loss = session.config.trainer, ValueLoss(session.config.critic.value_clip)

    def weigh(rows: BatchedDataDict, own: MicrobatchPlan) -> dict[str, Tensor]:
        return {"loss_weight": step_weights(_value_tokens(rows), own, session.config.algorithm)["token_weight"]}

    # The batch's own `loss_weight` belongs to the actor's loss.
    batch = rollouts.drop(["loss_weight"]).union(weigh(rollouts, plan))
    with step.timer("update_critic"):
        rate = learning_rate(session.config.critic.optimizer, step.number, trainer.steps)
        updates, trained = [], []
        for rows, own in passes(session, step, "critic", batch, plan, weigh):
            trained += has_tokens(_value_tokens(rows), own)
            updates += session.critic.with_plan(own).run(CriticWorker.train_step, rows, loss, rate)
            session.performance.count("critic", CriticWorker.train_step, own, rows["value_tokens"])
    step.record_optimizer_steps(updates, trained)


def update_actor_after_warmup(
    session: Session,
    step: StepContext,
    rollouts: BatchedDataDict,
    plan: MicrobatchPlan,
    advantage_moments: Moments | None,
) -> None:
    """Update the actor once the first `critic.warmup_steps` steps, which train only the critic, are over.

    The schedule of the actor's learning rate begins with its first update.
    """
    warmup = session.config.critic.warmup_steps
    if step.number > warmup:
        policy_stages.update_actor(session, step, rollouts, plan, advantage_moments, untrained_steps=warmup)
    else:
        step.record_pending_metrics(rollouts)


def _value_tokens(rows: BatchedDataDict) -> Tensor:
    """Return the tokens of each row that enter the critic's loss, int64 [B]."""
    return rows["value_tokens"].where(rows["valid"], 0)


def _moments(estimates: BatchedDataDict, name: str, counts: Tensor) -> Moments:
    """Return mean and standard deviation over the counted tokens, from the sums of each row."""
    tokens = counts.sum().clamp(min=1)
    mean = (estimates[f"{name}_sum"].sum() / tokens).item()
    square = (estimates[f"{name}_squares"].sum() / tokens).item()
    return Moments(mean, math.sqrt(max(0.0, square - mean * mean)))

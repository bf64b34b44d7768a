"""Supervised stages: draw demonstrations and train on them."""

from rlpack.batch.batch import BatchedDataDict
from rlpack.data.sampler import prompt_positions
from rlpack.recipes.driver.loss_weights import planned_response_lengths, step_weights
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import SFTLoss


def draw_demonstrations(session: Session, step: StepContext, count: int) -> BatchedDataDict:
    """Return the next `count` demonstrations, with `loss_weight` and `token_weight`, f32 [B].

    Raises:
        DataError: an example has no demonstration.
        PackingError: one exceeds the token budget.
    """
    start = step.progress.demonstrations_trained
    _, rows = prompt_positions(session.config.seed, len(session.prompts), start, count)
    step.advance(demonstrations_trained=start + count)
    batch = session.prompts.demonstrations(rows)
    plan = session.actor.plan(batch)
    step.report_plan(plan)
    counts = planned_response_lengths(batch, plan, session.store)
    return batch.union(step_weights(counts, plan, session.config.algorithm))


def sft_step(session: Session, step: StepContext, batch: BatchedDataDict, learning_rate: float) -> None:
    """Take one supervised optimizer step."""
    loss, actor = SFTLoss(), session.actor.with_plan(session.actor.plan(batch))
    with step.timer("update"):
        step.record_optimizer_steps(actor.run(ActorWorker.train_step, batch, loss, learning_rate))


def reset_optimizer(session: Session) -> None:
    """Start the actor's optimizer again from an empty state."""
    session.actor.run(ActorWorker.reset_optimizer)

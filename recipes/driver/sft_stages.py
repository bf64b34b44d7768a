"""Supervised stages: draw demonstrations and train on them."""

from rlpack.batch.batch import BatchedDataDict
from rlpack.data.sampler import prompt_positions
from rlpack.recipes.driver.loss_weights import planned_response_lengths, step_weights
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import SFTLoss


def draw_demonstrations(session: Session, step: StepContext, count: int) -> BatchedDataDict:
    """Return the next `count` demonstrations.

    Raises:
        DataError: an example has no demonstration.
    """
    start = step.progress.demonstrations_trained
    _, rows = prompt_positions(session.config.seed, len(session.prompts), start, count)
    step.advance(demonstrations_trained=start + count)
    return session.prompts.demonstrations(rows)


def sft_step(session: Session, step: StepContext, batch: BatchedDataDict, learning_rate: float) -> None:
    """Take one supervised optimizer step.

    Raises:
        PackingError: a demonstration exceeds the token budget.
    """
    plan = session.actor.plan(batch)
    step.report_plan(plan, keep=step.progress.phase == "train")  # a warm-up's lengths are not the run's
    counts = planned_response_lengths(batch, plan, session.store)
    batch = batch.union(step_weights(counts, plan, session.config.algorithm))
    with step.timer("update"):
        metrics = session.actor.with_plan(plan).run(ActorWorker.train_step, batch, SFTLoss(), learning_rate)
    session.performance.count("actor", ActorWorker.train_step, plan, counts)
    step.record_optimizer_steps(metrics)


def reset_optimizer(session: Session) -> None:
    """Start the actor's optimizer again from an empty state."""
    session.actor.run(ActorWorker.reset_optimizer)

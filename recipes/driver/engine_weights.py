"""The actor's weights in the generation engines."""

import math

from rlpack.recipes.driver.engine_restarts import replace_failed_engines
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.canary import canary_tokens
from rlpack.rollout.engine import STREAMING_ENGINES


def sync_weights(session: Session, step: StepContext | None = None) -> None:
    """Send the actor's weights to the rollout role; if `step` left them unchanged, only to engines that failed.

    Engines that failed are replaced first. One that dies meanwhile or fails the canary is replaced once.

    Raises:
        RoleError: a rank raised, died or missed its deadline, or an engine failed the canary again.
    """
    if step is not None and step.progress.optimizer_steps == session.progress.optimizer_steps:
        if session.engine_access.failed:
            with step.timer("sync"), session.publication():
                session.replace_engines()
        return
    timer = session.run.timer if step is None else step.timer
    with timer("sync"), session.publication():
        if session.config.rollout.engine in STREAMING_ENGINES:
            replace_failed_engines(session.rollout, session.engine_access)
        gap = session.rollout_weights.publish(canary_tokens(len(session.tokenizer)))
        if math.isinf(gap):
            gap = session.replace_engines()
    # A recipe may leave out the step in progress.
    session.engine_access.optimizer_steps = (step or session.step or session).progress.optimizer_steps
    if step is not None:
        step.metrics["rollout/canary_gap"] = gap


def check_published(session: Session) -> None:
    """Check that engines have the actor's weights after the step that was committed last.

    Raises:
        ValueError: the step updated the actor and published nothing: later batches and evaluations would have the
            tokens of older weights than their versions say.
    """
    published, taken = session.engine_access.optimizer_steps, session.progress.optimizer_steps
    if published is not None and taken > published:
        place = f"step {session.progress.step} of {session.progress.phase}"
        raise ValueError(
            f"{place} ended without publishing weights: the actor has taken {taken} optimizer steps, and the engines "
            f"have its weights after {published} of them; call batches.publish(step) at the end of each step"
        )

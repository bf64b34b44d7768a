"""Limits on how far the trainer's policy and the sampler's may differ: a warning, and the end of the run."""

import logging

from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.errors import MismatchError

logger = logging.getLogger(__name__)

_ADVICE = "correct it with algorithm.correction.weights or reject, or lower the learning rate or trainer.lead"


def check_mismatch(session: Session, step: StepContext) -> None:
    """Compare the metrics `mismatch/*` of a step with their limits; a metric that the step lacks has none.

    `algorithm.correction.warn_above` warns once per metric, `stop_above` ends the run; NaN exceeds every limit. With a
    lead, the mean gap of tokens of lag 0 has the limit of `rollout.max_logprob_gap`, too.

    Raises:
        MismatchError: names metric, value, limit and key.
        LogprobGapError: the gap of lag 0 exceeds ten times its limit.
    """
    settings = session.config.algorithm.correction
    for key, limits in (("stop_above", settings.stop_above), ("warn_above", settings.warn_above)):
        for name, limit in limits.items():
            value = step.metrics.get(f"mismatch/{name}")
            if value is None or value <= limit:
                continue
            text = (
                f"step {step.number}: mismatch/{name} is {value:.3g}, over algorithm.correction.{key}.{name}={limit:g}"
            )
            if key == "stop_above":
                raise MismatchError(f"{text}; {_ADVICE}, or raise the limit")
            if name not in session.warned_mismatch:
                session.warned_mismatch.add(name)
                logger.warning("%s; %s. Later steps don't repeat this.", text, _ADVICE)
    fresh = step.metrics.get("mismatch/lag_0/gap")
    if step.lag > 0 and fresh is not None:
        session.logprob_gap_limit.check(fresh, None, session.store, step.number)

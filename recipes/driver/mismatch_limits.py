"""Limits on how far the trainer's policy and the sampler's may differ: a warning, and the end of the run."""

import logging

from rlpack.config.schema import Config
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.rollout.errors import MismatchError

logger = logging.getLogger(__name__)


def check_mismatch(session: Session, step: StepContext) -> None:
    """Compare the metrics `mismatch/*` of a step with their limits; a metric that the step lacks has none.

    `algorithm.correction.warn_above` and `warn_below` warn once per metric, `stop_above` and `stop_below` end the run;
    NaN is beyond every limit. With a lead, the mean gap of tokens of lag 0 has the limit of `rollout.max_logprob_gap`,
    too.

    Raises:
        MismatchError: names metric, value, limit and key.
        LogprobGapError: the gap of lag 0 exceeds ten times its limit.
    """
    for key, limits in session.config.algorithm.correction.limits:
        is_lower, ends_run = key.endswith("below"), key.startswith("stop")
        for name, limit in limits.items():
            value = step.metrics.get(f"mismatch/{name}")
            if value is None or (value >= limit if is_lower else value <= limit):
                continue
            text = (
                f"step {step.number}: mismatch/{name} is {value:.3g}, {'below' if is_lower else 'over'} "
                f"algorithm.correction.{key}.{name}={limit:g}"
            )
            advice = _advice(session.config, name)
            if ends_run:
                raise MismatchError(f"{text}; {advice}, or {'lower' if is_lower else 'raise'} the limit")
            if name not in session.warned_mismatch:
                session.warned_mismatch.add(name)
                logger.warning("%s; %s. Later steps don't repeat this.", text, advice)
    fresh = step.metrics.get("mismatch/lag_0/gap")
    if step.lag > 0 and fresh is not None:
        session.logprob_gap_limit.check(fresh, None, session.store, step.number)


def _advice(config: Config, name: str) -> str:
    """Return what brings a metric `mismatch/*` closer to its limit."""
    correction, (lag, _, kind) = config.algorithm.correction, name.rpartition("/")
    if lag == "lag_0" or not config.trainer.lead:  # sampled with the weights that it is compared with
        of_engine = "" if config.rollout.engine == "hf" else "rollout.dtype=fp32 and "  # hf always generates in fp32
        closer = f"sample and train in the same precision (such as {of_engine}actor.precision=fp32)"
    else:
        closer = "lower the learning rate or trainer.lead"
    match kind:
        case "rejected_tokens" | "rejected_rows":
            return f"{closer}, or widen the limits of algorithm.correction.reject"
        case "weights_bounded":
            widen = "" if correction.lower is None else " and lower algorithm.correction.lower"
            return f"{closer}, or raise algorithm.correction.upper{widen}"
        case "effective_share":
            return closer if correction.weights == "none" else f"{closer}, or lower algorithm.correction.upper"
    if correction.weights == "none" and not correction.reject and not correction.bypass:
        return f"{closer} (algorithm.correction.weights corrects the loss, but doesn't change this metric)"
    return closer

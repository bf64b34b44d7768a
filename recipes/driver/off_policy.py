"""The driver's part of off-policy correction: which tokens count, how much, and how far the policies are apart."""

import torch

from rlpack.algorithms.correction import mismatch_metrics
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.fields import Column
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.workers.actor import ActorWorker


def correct_off_policy(
    session: Session, step: StepContext, rollouts: BatchedDataDict, plan: MicrobatchPlan
) -> BatchedDataDict:
    """Add what `algorithm.correction` needs, before any denominator is fixed; nothing if it is off.

    - `importance_weights` f32 [T], if tokens are weighted;
    - `kept_mask` bool [T] and `kept_tokens` int64 [B], if some are rejected: the response tokens that train.

    The metrics `mismatch/*` compare the old log-probs with the sampler's.

    Args:
        session: the run.
        step: the step in progress.
        rollouts: the batch, with `logprobs` of the actor before its update.
        plan: the actor's plan of these rows.
    """
    settings = session.config.algorithm.correction
    if not settings.measures or "logprobs" not in rollouts:
        return rollouts
    with step.timer("correction"):
        found = session.actor.with_plan(plan).run(ActorWorker.correct, rollouts, settings)
    tokens = rollouts["response_tokens"]
    sums = {name: column for name, column in found.items() if name.startswith("mismatch_")}
    step.metrics |= mismatch_metrics(sums, tokens)
    added: dict[str, Column] = {}
    if settings.weights != "none":
        total, squares = found["weight_sum"].sum(), found["weight_squares"].sum()
        count = tokens.sum().clamp(min=1)
        step.metrics["mismatch/weight_mean"] = (total / count).item()
        # Kish's effective sample size, as a share of the tokens.
        step.metrics["mismatch/effective_share"] = (total.square() / (squares * count)).item() if squares > 0 else 0.0
        step.metrics["mismatch/weights_bounded"] = (found["weights_bounded"].sum() / count).item()
        added["importance_weights"] = found["importance_weights"]
    if settings.reject:
        kept = torch.minimum(found["kept_tokens"], tokens)
        step.metrics["mismatch/rejected_tokens"] = float((tokens - kept).sum())
        step.metrics["mismatch/rejected_rows"] = float(((kept == 0) & (tokens > 0)).sum())
        added |= {"kept_mask": found["kept_mask"], "kept_tokens": kept}
    return rollouts.union(added)

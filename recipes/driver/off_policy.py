"""The driver's part of off-policy correction: which tokens count, how much, and how far the policies are apart."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlpack.algorithms.correction import mismatch_metrics
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.fields import Column
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver.mismatch_limits import check_mismatch
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.workers.actor import ActorWorker


def correct_off_policy(
    session: Session, step: StepContext, rollouts: BatchedDataDict, plan: MicrobatchPlan
) -> BatchedDataDict:
    """Add what `algorithm.correction` needs, before any denominator is fixed; nothing if it is off.

    - `importance_weights` f32 [T], if tokens are weighted;
    - `kept_mask` bool [T] and `kept_tokens` int64 [B], if some are rejected: the response tokens that train.

    The metrics `mismatch/*` compare the old log-probs with the sampler's; with `trainer.lead`, `mismatch/lag_<k>/*` do
    so for the tokens of each lag. Tokens of lag 0 were sampled with the weights that the trainer has, so the limit on
    the gap of log-probs (`rollout.max_logprob_gap`) applies to them.

    Args:
        session: the run.
        step: the step in progress.
        rollouts: the batch, with `logprobs` of the actor before its update.
        plan: the actor's plan of these rows.

    Raises:
        MismatchError: a metric exceeds its limit in `algorithm.correction.stop_above`.
        LogprobGapError: the gap of tokens of lag 0 exceeds ten times its limit.
    """
    settings, lead = session.config.algorithm.correction, session.config.trainer.lead
    lags = session.config.trainer.measured_lags if lead else range(0)
    if "logprobs" not in rollouts or settings.bypass or not (settings.measures or (lead and not _is_filtered(session))):
        return rollouts
    with step.timer("correction"):
        newest = session.rollout_weights.version if lead else 0
        found = session.actor.with_plan(plan).run(
            ActorWorker.correct, rollouts, settings, newest=newest, lead=lags[-1] if lags else None
        )
    tokens = rollouts["response_tokens"]
    step.metrics |= mismatch_metrics(_sums(found, ""), tokens)
    for lag in lags:
        sums = _sums(found, f"lag{lag}_")
        own = mismatch_metrics(sums, sums["mismatch_tokens"])
        step.metrics |= {name.replace("mismatch/", f"mismatch/lag_{lag}/"): value for name, value in own.items()}
    check_mismatch(session, step)
    added: dict[str, Column] = {}
    if settings.weights != "none":
        added["importance_weights"] = found["importance_weights"]
    if settings.reject:
        kept = torch.minimum(found["kept_tokens"], tokens)
        added |= {"kept_mask": found["kept_mask"], "kept_tokens": kept}
    return rollouts.union(added)


def _sums(found: Mapping[str, Column], prefix: str) -> dict[str, Tensor]:
    """Return the sums of some tokens by their names without the prefix."""
    start = f"{prefix}mismatch_"
    return {name.removeprefix(prefix): column for name, column in found.items() if name.startswith(start)}  # pyright: ignore[reportReturnType]  # per-row numbers


def _is_filtered(session: Session) -> bool:
    """Return whether the sampler's log-probs are those of a part of the vocabulary."""
    return session.config.rollout.top_k > 0 or session.config.rollout.top_p < 1

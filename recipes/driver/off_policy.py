"""The driver's part of off-policy correction: which tokens count, how much, and how far the policies are apart."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rlpack.algorithms.correction import mean_weight, mismatch_metrics, mismatch_totals
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.fields import Column
from rlpack.config.sections.correction_settings import Correction
from rlpack.distributed.calls import Pending
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver.mismatch_limits import check_mismatch
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.workers.actor import ActorWorker

# Prefix of the names of sums and totals in `rlpack.algorithms.correction`.
_TOTAL = "mismatch_"
# Weights with a smaller mean are not normalized, as in verl's `rollout_corr_helper`.
_LEAST_MEAN = 1e-8


def correct_off_policy(
    session: Session, step: StepContext, rollouts: BatchedDataDict, plan: MicrobatchPlan
) -> BatchedDataDict:
    """Add what `algorithm.correction` needs, before any denominator is fixed; nothing if it is off.

    - `importance_weights` f32 [T], if tokens are weighted, and, if they are normalized (`importance_scale`),
      `importance_sum` f64 [B], their sum over the response;
    - `kept_mask` bool [T] and `kept_tokens` int64 [B], if some are rejected: the response tokens that train.

    The metrics `mismatch/*` compare the old log-probs with the sampler's; with `trainer.lead`, `mismatch/lag_<k>/*` do
    so for the tokens of each lag. With a lead, and without log-probs from before the update, the update itself measures
    them (`record_mismatch_of_update`). Tokens of lag 0 were sampled with the weights that the trainer has, so the limit
    on the gap of log-probs (`rollout.max_logprob_gap`) applies to them. If only these metrics need the comparison,
    `update_actor` has it computed and records them, so that the update doesn't wait for it; a recipe with another
    update calls `StepContext.record_pending_metrics`.

    Args:
        session: the run.
        step: the step in progress.
        rollouts: the batch, with `logprobs` of the actor before its update.
        plan: the actor's plan of these rows.

    Raises:
        MismatchError: a metric is beyond its limit in `algorithm.correction.stop_above` or `stop_below`.
        LogprobGapError: the gap of tokens of lag 0 exceeds ten times its limit; raised once it is recorded.
    """
    settings, lags = session.config.algorithm.correction, measured_lags(session)
    if "logprobs" not in rollouts or settings.skips_old_logprobs or not (settings.measures or lags):
        return rollouts
    tokens, newest = rollouts["response_tokens"], session.rollout_weights.version if lags else 0
    actor = session.actor.with_plan(plan)
    lead = lags[-1] if lags else None

    def submit() -> Pending[BatchedDataDict]:
        return actor.submit(ActorWorker.correct, rollouts, settings, newest=newest, lead=lead)

    if not settings.measures:
        step.measure_later(submit, lambda found, _: _record(session, step, _totals_by_lag(found, tokens, lags)))
        return rollouts
    with step.timer("correction"):
        found = submit().result()
    _record(session, step, _totals_by_lag(found, tokens, lags))
    if int(tokens.sum()):
        step.excluded_by = _excludes_all(settings, found)
    added: dict[str, Column] = {}
    if settings.weights != "none":
        added["importance_weights"] = found["importance_weights"]
    if settings.normalizes:
        added["importance_sum"] = found["mismatch_weight"]
    if settings.reject:
        kept = torch.minimum(found["kept_tokens"], tokens)
        added |= {"kept_mask": found["kept_mask"], "kept_tokens": kept}
    return rollouts.union(added)


def _excludes_all(settings: Correction, found: BatchedDataDict) -> str | None:
    """Return the keys that exclude every token of a batch, alone or together; None if some are left."""
    if "weighted_tokens" not in found or int(found["weighted_tokens"].sum()):
        return None
    names = [name for name, value in (("reject", settings.reject), ("lower", settings.lower)) if value]
    return " and ".join(f"algorithm.correction.{name}" for name in names or ["weights"])


def importance_scale(rollouts: BatchedDataDict, settings: Correction) -> dict[str, Tensor]:
    """Return `importance_scale` f32 [B], the factor that gives importance weights a mean of 1; nothing without sums.

    The mean is over the valid rows, which are known once the batch is scored, and the factor is the same in every row.
    """
    if settings.weights == "none" or "importance_sum" not in rollouts:
        return {}
    tokens = rollouts["response_tokens"].where(rollouts["valid"], 0)
    mean = mean_weight(rollouts["importance_sum"], tokens, settings.weights)
    return {"importance_scale": torch.full((rollouts.num_rows,), 1 / mean if mean > _LEAST_MEAN else 1.0)}


def measured_lags(session: Session) -> range:
    """Return the lags whose tokens have separate metrics; none without a lead, or if the sampler filters."""
    is_filtered = session.config.rollout.top_k > 0 or session.config.rollout.top_p < 1
    has_lags = session.config.trainer.lead > 0 and not is_filtered
    return session.config.trainer.measured_lags if has_lags else range(0)


def record_mismatch_of_update(session: Session, step: StepContext) -> None:
    """Turn the mismatch totals of an update that measures lags into metrics `mismatch/*`.

    Raises:
        LogprobGapError: the gap of tokens of lag 0 exceeds ten times its limit.
    """
    prefixes = tuple(f"actor/{lag}{_TOTAL}" for lag in ("", *(f"lag{lag}_" for lag in measured_lags(session))))
    measured = [name for name in step.metrics if name.startswith(prefixes)]
    _record(session, step, {name.removeprefix("actor/"): step.metrics.pop(name) for name in measured})


def _record(session: Session, step: StepContext, totals: Mapping[str, float]) -> None:
    """Record the metrics of all tokens and of each lag, and check their limits."""
    for lag in (None, *measured_lags(session)):
        prefix, place = ("", "mismatch/") if lag is None else (f"lag{lag}_", f"mismatch/lag_{lag}/")
        own = {name.removeprefix(prefix): value for name, value in totals.items() if name.startswith(prefix + _TOTAL)}
        if own:  # an update measures only the lags of its tokens
            step.metrics |= {name.replace("mismatch/", place): value for name, value in mismatch_metrics(own).items()}
    check_mismatch(session, step)


def _totals_by_lag(found: BatchedDataDict, tokens: Tensor, lags: Iterable[int]) -> dict[str, float]:
    """Return the totals over all tokens and over those of each lag."""
    totals = _totals(_sums(found, ""), tokens, "")
    for lag in lags:
        sums = _sums(found, f"lag{lag}_")
        totals |= _totals(sums, sums["mismatch_tokens"], f"lag{lag}_")
    return totals


def _totals(sums: Mapping[str, Tensor], tokens: Tensor, prefix: str) -> dict[str, float]:
    """Return the totals over rows, their names preceded by `prefix`."""
    return {f"{prefix}{name}": total.item() for name, total in mismatch_totals(sums, tokens).items()}


def _sums(found: Mapping[str, Column], prefix: str) -> dict[str, Tensor]:
    """Return the sums of some tokens by their names without the prefix."""
    start = prefix + _TOTAL
    return {name.removeprefix(prefix): column for name, column in found.items() if name.startswith(start)}  # pyright: ignore[reportReturnType]  # per-row numbers

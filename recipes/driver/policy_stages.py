"""Policy stages: log-probs, advantages, the actor's update, and the weights that other roles get.

Each stage takes the session, the step and the batch so far, and returns the batch with more columns. Row order never
changes: every role returns its rows in the order it got them.
"""

from functools import partial

from torch import Tensor

from rlpack.algorithms.advantages import zero_group_fraction
from rlpack.algorithms.kl import next_kl_coef
from rlpack.algorithms.registry import advantage_parameters, row_advantages
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.remote import RemoteColumn
from rlpack.config.schema import Algorithm
from rlpack.distributed.calls import Pending
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver.batch_passes import passes
from rlpack.recipes.driver.forward_plans import forward_plan
from rlpack.recipes.driver.learning_rate import learning_rate
from rlpack.recipes.driver.loss_weights import has_tokens, planned_response_lengths, step_weights
from rlpack.recipes.driver.off_policy import importance_scale, measured_lags, record_mismatch_of_update
from rlpack.recipes.driver.reference_policy import reference_model, remove_reference, store_reference
from rlpack.recipes.driver.reward_stages import check_scored
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from rlpack.recipes.driver.token_returns import compute_token_returns
from rlpack.worker import Trainable
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import Moments, PolicyGradientLoss
from rlpack.workers.reference import ReferenceWorker

# Columns of the pass before the update that the update or the driver reads.
_OF_OLD_POLICY = ("logprobs", "response_tokens", "routed_experts")
# Metrics that the update measures if no log-probs were computed before it, and the names they are logged under.
_MEASURED_IN_UPDATE = {"actor/logprob_gap": "rollout/logprob_gap", "actor/response_kl": "reference/kl"}


def compute_old_logprobs(
    session: Session, step: StepContext, rollouts: BatchedDataDict, plan: MicrobatchPlan
) -> BatchedDataDict:
    """Add the policy's `logprobs` f32 [T] before its update, and `response_tokens` int64 [B].

    Log-probs are 0 outside responses, and left out where the update doesn't need them: see `needs_old_logprobs`. With
    `actor.moe.replay_routing`, their pass also gives `routed_experts`, integers [T, L, k].
    `response_tokens` counts the tokens of each response that the update's plan keeps.

    Args:
        session: the run.
        step: the step in progress.
        rollouts: the batch.
        plan: the actor's plan for these rows, in mini-batches, which the update follows. Without
            `actor.forward_batching` both share microbatches.
    """
    if session.config.algorithm.correction.skips_old_logprobs:
        tokens = planned_response_lengths(rollouts, plan, session.store)
        return rollouts.union({"logprobs": rollouts["rollout_logprobs"], "response_tokens": tokens})
    if not needs_old_logprobs(session, rollouts, plan):
        return rollouts.union({"response_tokens": planned_response_lengths(rollouts, plan, session.store)})
    with step.timer("logprobs"):
        forward = forward_plan(session, "actor", rollouts) or plan
        old = session.actor.with_plan(forward).run(ActorWorker.logprobs, rollouts)
    session.performance.count("actor", ActorWorker.logprobs, plan, old["response_tokens"])
    gap = (old["logprob_gap"].sum() / old["response_tokens"].sum().clamp(min=1)).item()
    step.metrics["rollout/logprob_gap"] = gap
    if "entropy_sum" in old:  # a user's actor may not measure it
        tokens = old["response_tokens"].sum().clamp(min=1)
        step.metrics["actor/old_entropy"] = (old["entropy_sum"].sum() / tokens).item()
    if step.lag == 0:  # an older policy has other log-probs
        session.logprob_gap_limit.check(gap, rollouts.union(old), session.store, step.number)
    else:
        session.logprob_gap_limit.check_lagged(gap, step.number, step.lag)
    return rollouts.union(old.keep([name for name in _OF_OLD_POLICY if name in old]))


def needs_old_logprobs(session: Session, rollouts: BatchedDataDict, plan: MicrobatchPlan) -> bool:
    """Return whether log-probs have to be computed in a pass before the update.

    A batch with several optimizer steps needs the pass, and so does off-policy correction. With a single step, the
    step's own log-probs are the old ones and the ratio is 1. The pass is then needed only if the KL term is in the
    rewards, an advantage function reads `kl_sum`, the KL is measured on responses that are not trained on, or adapters
    have dropout, which is off in the pass. Without the pass, the step's own routing is the old one, too.
    """
    config = session.config
    return (
        plan.num_steps > 1
        or config.trainer.updates_per_batch > 1
        or config.algorithm.correction.measures
        or config.actor.lora.dropout > 0
        or reward_kl_coef(session) > 0
        or (session.reference is not None and ("trains" in rollouts or _reads_kl_sum(config.algorithm)))
    )


def _reads_kl_sum(settings: Algorithm) -> bool:
    return "kl_sum" in advantage_parameters(settings.advantage)


def submit_reference_logprobs(session: Session, rollouts: BatchedDataDict) -> Pending[BatchedDataDict] | None:
    """Start the reference on the batch; None without a KL term."""
    if session.reference is None:
        return None
    return session.reference.submit(ReferenceWorker.logprobs, rollouts)


def collect_reference_logprobs(
    session: Session,
    step: StepContext,
    rollouts: BatchedDataDict,
    plan: MicrobatchPlan,
    pending: Pending[BatchedDataDict] | None,
) -> BatchedDataDict:
    """Add `reference_logprobs` f32 [T]; nothing without a KL term.

    If the batch has `logprobs`, and the rewards or the advantage function need the KL divergence, also `kl_sum` f64
    [B], and `kl_bounded` f64 [B] with `algorithm.k3_bound`. If only metrics need it, `update_actor` has it computed,
    so that the update doesn't wait for it.
    """
    if pending is None:
        return rollouts
    with step.timer("reference"):
        rollouts = rollouts.union(pending.result())
        scored = rollouts["response_tokens"]
        session.performance.count("reference", ReferenceWorker.logprobs, plan, scored)
        if "logprobs" not in rollouts:
            return rollouts
        actor, settings = session.actor.with_plan(plan), session.config.algorithm

        def submit() -> Pending[BatchedDataDict]:
            return actor.submit(ActorWorker.kl_sums, rollouts, settings.kl_estimator, settings.k3_bound)

        if reward_kl_coef(session) > 0 or _reads_kl_sum(settings):
            return rollouts.union(submit().result())
        step.measure_later(submit, lambda kl, scored: _record_kl(step, scored, kl))
        return rollouts


def compute_advantages(
    session: Session, step: StepContext, rollouts: BatchedDataDict, plan: MicrobatchPlan
) -> BatchedDataDict:
    """Add `advantages`, and `loss_weight` and `token_weight` of the row's optimizer step, all f32 [B].

    The advantage function gets the per-row columns that it names, including those that roles added. With
    `algorithm.kl_placement=reward`, the KL term is subtracted from the rewards first: summed over the response, or per
    token by `reinforce_pp`, whose `advantages` are then [T]. Metrics are over the rows that are trained on.

    Raises:
        AlgorithmError: the batch isn't scored yet, or the advantage function fails or returns something else.
    """
    check_scored(rollouts, compute_advantages.__name__)
    settings, kl_coef = session.config.algorithm, reward_kl_coef(session)
    if settings.advantage == "reinforce_pp" and kl_coef > 0:
        with step.timer("advantages"):
            rollouts = compute_token_returns(session, step, rollouts, plan, kl_coef)
        return add_loss_weights(session, step, rollouts, plan)
    with step.timer("advantages"):
        columns = dict(_columns_for_advantages(session, rollouts))
        if kl_coef > 0:
            columns["rewards"] = (columns["rewards"] - kl_coef * columns["kl_sum"]).float()
        per_row = row_advantages(settings.advantage, settings.advantage_arguments, dict(settings), columns)
    trained = per_row[trained_tokens(rollouts) > 0]
    step.metrics |= {
        "advantage/mean": trained.mean().item() if trained.numel() else 0.0,
        "advantage/std": trained.std(unbiased=False).item() if trained.numel() else 0.0,
        "advantage/zero_group_fraction": zero_group_fraction(per_row, rollouts["group_ids"]),
    }
    return add_loss_weights(session, step, rollouts.union({"advantages": per_row}), plan)


def reward_kl_coef(session: Session) -> float:
    """Return the weight of the KL term in the rewards; 0 if it is in the loss."""
    return session.kl_coef if session.config.algorithm.kl_placement == "reward" else 0.0


def add_loss_weights(
    session: Session, step: StepContext, rollouts: BatchedDataDict, plan: MicrobatchPlan
) -> BatchedDataDict:
    """Add `loss_weight` and `token_weight` f32 [B] of the actor's update, which follows `plan`.

    If importance weights are normalized, also add `importance_scale`.

    Rows that are not `valid`, or excluded by `trains` (if there is such a column), have weight 0. Prompts with a row
    that counts are added to `prompts_trained`.
    """
    counts = trained_tokens(rollouts)
    prompts = rollouts["group_ids"][counts > 0].unique().numel()
    step.advance(prompts_trained=step.progress.prompts_trained + prompts)
    step.metrics["prompts_trained"] = step.progress.prompts_trained
    if session.reference is not None:
        step.metrics["reference/kl_coef"] = session.kl_coef
    if "kl_sum" in rollouts:
        _record_kl(step, rollouts, rollouts)
    # A recipe may train on rows that it made itself, without the columns of generation.
    responses = rollouts.get("response_lengths")
    step.report_plan(plan, keep=True, responses=responses)
    scale = importance_scale(rollouts, session.config.algorithm.correction)
    return rollouts.union(_weights(session, rollouts, plan) | scale)


def _record_kl(step: StepContext, rollouts: BatchedDataDict, kl: BatchedDataDict) -> None:
    """Record the mean of `kl_sum` over valid rows, and the share of their tokens that `kl_bounded` counts."""
    valid = rollouts["valid"]
    kl_sums = kl["kl_sum"][valid]
    step.metrics["reference/kl"] = kl_sums.mean().item() if kl_sums.numel() else 0.0
    if "kl_bounded" in kl:
        bounded, tokens = (column.where(valid, 0).sum() for column in (kl["kl_bounded"], rollouts["response_tokens"]))
        step.metrics["reference/kl_bounded_fraction"] = (bounded / tokens.clamp(min=1)).item()


def trained_tokens(rollouts: BatchedDataDict) -> Tensor:
    """Return the tokens of each row that enter the actor's loss, int64 [B]."""
    trains = rollouts["valid"] & rollouts["trains"] if "trains" in rollouts else rollouts["valid"]
    return rollouts["kept_tokens" if "kept_tokens" in rollouts else "response_tokens"].where(trains, 0)


def _columns_for_advantages(session: Session, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Return the per-row columns that are offered to the advantage function.

    Columns with several numbers per row are in the store and are fetched only if the function names them.
    """
    offered = rollouts.keep(rollouts.names_of("per-row"))
    named = advantage_parameters(session.config.algorithm.advantage)
    return session.store.fetch(
        offered.drop(
            [name for name, column in offered.items() if isinstance(column, RemoteColumn) and name not in named]
        )
    )


def update_actor(
    session: Session,
    step: StepContext,
    rollouts: BatchedDataDict,
    plan: MicrobatchPlan,
    advantage_moments: Moments | None = None,
    untrained_steps: int = 0,
) -> None:
    """Take one optimizer step per mini-batch, `trainer.updates_per_batch` times over the batch (see `passes`).

    Per-token advantages are normalized by `advantage_moments`, if given. The learning rate's schedule begins after the
    recipe's first `untrained_steps` steps, which don't update the actor.
    """
    trainer, optimizer = session.config.trainer, session.config.actor.optimizer
    if "kept_mask" in rollouts:  # rejected tokens don't train; all else was computed over the whole responses
        rollouts = rollouts.drop(["response_mask"]).union({"response_mask": rollouts["kept_mask"]})
    if session.config.algorithm.correction.bypass:  # the pass, if there was one, only measured and rejected
        rollouts = rollouts.drop(["logprobs"]).union({"logprobs": rollouts["rollout_logprobs"]})
    has_kl = session.reference is not None and session.config.algorithm.kl_placement == "loss"
    lags = measured_lags(session)
    loss = PolicyGradientLoss(
        session.config.algorithm,
        temperature=session.config.rollout.temperature,
        advantage_moments=advantage_moments,
        on_policy="logprobs" not in rollouts,
        replays_routing="routed_experts" in rollouts,
        responses=max(1, int(rollouts["valid"].sum())),
        lags=len(lags),
        newest=session.rollout_weights.version if lags else 0,
    ).with_kl_coef(session.kl_coef if has_kl else 0.0)
    with step.timer("update"):
        rate = learning_rate(optimizer, step.number - untrained_steps, trainer.steps - untrained_steps)
        updates, trained, weigh = list[dict[str, float]](), list[bool](), partial(_weights, session)
        for rows, own in passes(session, step, "actor", rollouts, plan, weigh):
            trained += has_tokens(trained_tokens(rows), own)
            update = session.actor.with_plan(own).submit(ActorWorker.train_step, rows, loss, rate)
            step.submit_measurements()  # ranks run them after the update
            updates += update.result()
            session.performance.count("actor", ActorWorker.train_step, own, rows["response_tokens"])
    step.record_pending_metrics(rollouts)
    for later in updates[1 + trained.index(True) if any(trained) else 1 :]:  # the weights have changed since then
        later.pop("actor/logprob_gap", None)
    step.record_optimizer_steps(updates, trained)
    for name, logged in _MEASURED_IN_UPDATE.items():
        if name in step.metrics:
            step.metrics[logged] = step.metrics.pop(name)
    if loss.on_policy and lags:
        record_mismatch_of_update(session, step)
    if loss.measures_gap and session.config.actor.lora.dropout == 0:  # dropout, too, changes log-probs of the update
        _check_gap_of_update(session, step, rollouts, plan)
    if rollouts["valid"].any():  # otherwise no divergence was measured
        _adapt_kl(session, step, rollouts.num_rows)


def _check_gap_of_update(session: Session, step: StepContext, rollouts: BatchedDataDict, plan: MicrobatchPlan) -> None:
    """Check the gap between the trainer's and the sampler's log-probs that the update's first step has measured.

    Raises:
        LogprobGapError: the responses are of the newest policy, and the gap exceeds ten times its limit.
    """
    gap, limit = step.metrics.get("rollout/logprob_gap"), session.logprob_gap_limit
    if gap is None:
        return
    if step.lag > 0:
        limit.check_lagged(gap, step.number, step.lag)
        return
    scored = None
    if limit.is_fatal(gap):  # measured again, after the update, to name rows and tokens
        measured = session.actor.with_plan(plan).run(ActorWorker.logprobs, rollouts)
        found = measured.keep(["logprobs", "logprob_gap"])
        scored = rollouts.drop([name for name in found if name in rollouts]).union(found)
    limit.check(gap, scored, session.store, step.number, when="after the update, ")


def _weights(session: Session, rollouts: BatchedDataDict, plan: MicrobatchPlan) -> dict[str, Tensor]:
    """Return `loss_weight` and `token_weight` f32 [B] of an update that follows `plan`."""
    return step_weights(trained_tokens(rollouts), plan, session.config.algorithm)


def _adapt_kl(session: Session, step: StepContext, rows: int) -> None:
    """Move the next step's KL coefficient so that the divergence comes closer to its target."""
    settings = session.config.algorithm
    if settings.kl_target is not None and session.reference is not None:
        measured, horizon = step.metrics["reference/kl"], settings.kl_horizon
        step.advance(
            kl_coef=next_kl_coef(session.kl_coef, measured, target=settings.kl_target, horizon=horizon, rows=rows)
        )


def initialize_reference(session: Session) -> None:
    """Load the recipe's initial policy into the reference, if there is one.

    The policy is stored in the run directory, where a resumed run finds it.
    """
    directory = session.run.run_dir
    if not session.progress.recipe_started:  # a run that wrote no checkpoint may have left a reference behind
        remove_reference(directory)
        if session.reference is not None:
            export = partial(session.actor.run, Trainable.export_reference)
            session.reference_hashes = store_reference(directory, export)
    if session.reference is not None:
        session.reference.run_at_every_start(ReferenceWorker.load_model, str(reference_model(directory)))

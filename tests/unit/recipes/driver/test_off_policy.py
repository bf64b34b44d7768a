"""Off-policy correction from the driver's columns to the loss, against the sums over kept tokens."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlpack.algorithms.metric_reduction import merge_metrics
from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Algorithm, Trainer
from rlpack.config.sections.correction_settings import Correction
from rlpack.models.policy import TokenScores
from rlpack.recipes.driver.off_policy import correct_off_policy
from rlpack.recipes.driver.policy_stages import compute_advantages, compute_old_logprobs, update_actor
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.session import Session
from rlpack.rollout.errors import LogprobGapError, MismatchError
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import PolicyGradientLoss
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.sessions import session_of, set_group

SIZES = [(2, 4), (3, 9), (1, 2), (2, 5)]
LENGTHS = [prompt + response for prompt, response in SIZES]
NEWEST = 7


class Updates:
    """An actor whose old log-probs are given, and which keeps what its update gets."""

    def __init__(self, folder: Path, correction: Correction, old: torch.Tensor, lead: int = 0) -> None:
        algorithm = Algorithm(correction=correction, aggregation="token_mean")
        trainer = Trainer(updates_per_batch=1, lead=lead)
        self.session: Session = session_of(folder, algorithm=algorithm, trainer=trainer)
        self.session.progress = Progress(phase="train")
        self.session.__dict__["rollout_weights"] = SimpleNamespace(version=NEWEST)
        self.old = old
        self.batches: list[tuple[BatchedDataDict, PolicyGradientLoss]] = []
        self.scored = self.lag = 0
        set_group(self.session, "actor", logprobs=self.logprobs, correct=self.correct, train_step=self.train_step)

    def logprobs(self, batch: BatchedDataDict) -> BatchedDataDict:
        self.scored += 1
        mask = batch["response_mask"]
        rows = {"response_tokens": mask.count_nonzero(), "logprob_gap": torch.zeros(len(SIZES)).double()}
        return batch.keep([]).union({"logprobs": mask.with_values(self.old), **rows})

    def correct(self, batch: BatchedDataDict, settings: Correction, **versions: Any) -> BatchedDataDict:
        actor: Any = None  # the method reads no state
        return ActorWorker.correct(actor, batch, settings, **versions)

    def train_step(self, batch: BatchedDataDict, loss: PolicyGradientLoss, rate: float) -> list[dict[str, float]]:
        self.batches.append((batch, loss))
        if not loss.on_policy:
            return [{"actor/skipped_steps": 0.0}]
        batch, parts = batch.union({"own": batch["response_mask"].with_values(self.old)}), []
        for microbatch in (batch.select([0, 2]), batch.select([3, 1]), batch.select([])):
            own = microbatch["own"].values
            metrics = loss(TokenScores(own, torch.zeros_like(own)), microbatch).metrics
            parts.append({f"actor/{name}": value.item() for name, value in metrics.items()})
        return [{"actor/skipped_steps": 0.0} | merge_metrics(parts)]

    def run(self, rollouts: BatchedDataDict) -> dict[str, float]:
        """Take one step; return its metrics. As in a recipe without a lead, rows are scored after the correction."""
        scored, rollouts = rollouts.keep(["rewards", "valid"]), rollouts.drop(["rewards", "valid"])
        step = self.session.begin_step(1)
        step.lag = self.lag
        plan = self.session.actor.plan(rollouts, mini_batches=True)
        rollouts = compute_old_logprobs(self.session, step, rollouts, plan)
        rollouts = correct_off_policy(self.session, step, rollouts, plan).union(scored)
        rollouts = compute_advantages(self.session, step, rollouts, plan)
        update_actor(self.session, step, rollouts, plan)
        return step.metrics

    def loss(self, logprobs: torch.Tensor) -> float:
        """Return the loss of the last update for these log-probs of the policy."""
        batch, loss = self.batches[-1]
        scores = TokenScores(logprobs, torch.zeros_like(logprobs))
        return loss(scores, batch).value.item()


def rollouts_and_old() -> tuple[BatchedDataDict, torch.Tensor]:
    """Return scored rollouts, and old log-probs that differ from the sampler's by up to 0.5."""
    rollouts = tiny_rollouts(SIZES).union(
        {"rewards": torch.tensor([0.0, 1.0, 3.0, 0.5]), "valid": torch.ones(len(SIZES), dtype=torch.bool)}
    )
    sampled = rollouts["rollout_logprobs"].values
    noise = torch.rand(sampled.shape, generator=torch.Generator().manual_seed(3)) - 0.5
    return rollouts, torch.where(rollouts["response_mask"].values, sampled + noise, 0.0)


def test_without_correction_nothing_is_added(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    updates = Updates(tmp_path, Correction(), old)
    metrics = updates.run(rollouts)
    assert not [name for name in metrics if name.startswith("mismatch/")]
    assert updates.scored == 0  # the single update needs no pass before it
    assert not {"importance_weights", "kept_mask"} & set(updates.batches[0][0])


@pytest.mark.parametrize(
    ("correction", "key"),
    [
        ({"reject": {"token_k3": 1e-9}}, "algorithm.correction.reject"),
        ({"weights": "token", "lower": 0.999999, "upper": 1.000001}, "algorithm.correction.lower"),
        (
            {"weights": "token", "lower": 0.999999, "upper": 1.1, "reject": {"token_k1": [0.1, 1.000001]}},
            "algorithm.correction.reject and algorithm.correction.lower",
        ),
        ({"weights": "token", "lower": 0.5, "reject": {"token_k3": 1.0}}, None),
    ],
)
def test_a_correction_that_excludes_every_token_is_noted(tmp_path: Path, correction: dict[str, Any], key: str | None):
    rollouts, old = rollouts_and_old()
    updates = Updates(tmp_path, Correction(**correction), old)
    updates.run(rollouts)
    assert updates.session.step is not None
    assert updates.session.step.excluded_by == key


TOKENS, ROWS = {"token_k1": [0.8, 1.25]}, {"seq_mean_k1": [0.99, 1.1]}


@pytest.mark.parametrize(
    ("weights", "reject"),
    [
        *(("token", {}), ("token", TOKENS), ("token", ROWS)),
        *(("sequence", {}), ("sequence", TOKENS), ("sequence", ROWS)),
        *(("none", TOKENS), ("none", ROWS)),
    ],
)
def test_the_loss_is_the_weighted_mean_over_kept_tokens(tmp_path: Path, weights: Any, reject: dict[str, Any]):
    rollouts, old = rollouts_and_old()
    updates = Updates(tmp_path, Correction(weights=weights, upper=1.2, reject=reject), old)
    metrics = updates.run(rollouts)
    mask, sampled = rollouts["response_mask"], rollouts["rollout_logprobs"].values
    new = torch.where(mask.values, old + 0.1, 0.0)
    advantages = updates.batches[0][0]["advantages"]
    total, count, rejected = 0.0, 0, 0
    for row, tokens in enumerate(mask.rows()):
        inside = slice(int(mask.offsets[row]), int(mask.offsets[row + 1]))
        d = (old - sampled)[inside][tokens].double()
        weight = {"none": torch.ones_like(d), "token": d.exp(), "sequence": d.sum().exp().expand_as(d)}[weights]
        weight = weight if weights == "none" else weight.clamp(max=1.2)
        ratio = (new - old)[inside][tokens].double().exp()
        advantage = advantages[row].double()
        losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        kept = torch.ones_like(d, dtype=torch.bool)
        if "token_k1" in reject:
            kept = ((-d).exp() >= 0.8) & ((-d).exp() <= 1.25)
        elif reject:
            kept = kept & (0.99 <= (-d.mean()).exp() <= 1.1)
        total += (weight * losses)[kept].sum().item()
        count += int(kept.sum())
        rejected += int((~kept).sum())
    assert updates.loss(new) == pytest.approx(total / count, rel=1e-5, abs=1e-7)
    if reject:
        assert metrics["mismatch/rejected_tokens"] == rejected > 0
        assert count > 0
    elif weights != "none":
        assert 0 < metrics["mismatch/weights_bounded"] < 1


@pytest.mark.parametrize("weights", ["token", "sequence"])
def test_normalized_weights_have_a_mean_of_one_over_valid_tokens_or_rows(tmp_path: Path, weights: Any):
    rollouts, old = rollouts_and_old()
    valid = torch.tensor([True, True, False, True])
    rollouts = rollouts.drop(["valid"]).union({"valid": valid})
    losses = {}
    for normalize in (False, True):
        updates = Updates(tmp_path, Correction(weights=weights, upper=1.2, normalize=normalize), old)
        updates.run(rollouts)
        losses[normalize] = updates.loss(torch.where(rollouts["response_mask"].values, old + 0.1, 0.0))
    d = (old - rollouts["rollout_logprobs"].values).double()
    rows = [d[rollouts["response_mask"].values & (rollouts["response_mask"].segment_ids == row)] for row in (0, 1, 3)]
    if weights == "token":
        mean = torch.cat(rows).exp().clamp(max=1.2).mean()
    else:
        mean = torch.stack([row.sum().exp().clamp(max=1.2) for row in rows]).mean()
    assert losses[True] == pytest.approx(losses[False] / mean.item(), rel=1e-5)
    assert abs(mean.item() - 1) > 0.01


def test_weights_that_are_all_zero_are_not_normalized(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    updates = Updates(tmp_path, Correction(weights="sequence", lower=50.0, upper=60.0, normalize=True), old)
    updates.run(rollouts)
    assert updates.loss(old) == 0.0


def test_weights_that_are_all_at_their_least_are_not_normalized(tmp_path: Path):
    # verl divides only by means above 1e-8 (verl/trainer/ppo/rollout_corr_helper.py)
    rollouts, old = rollouts_and_old()
    losses = []
    for normalize in (False, True):
        updates = Updates(tmp_path, Correction(weights="sequence", normalize=normalize), old - 100.0)
        updates.run(rollouts)
        losses.append(updates.loss(old - 100.0))
    assert losses[0] == losses[1] != 0.0


def test_a_batch_that_is_rejected_whole_has_a_loss_of_zero(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    updates = Updates(tmp_path, Correction(reject={"seq_max_k2": 1e-9}), old)
    metrics = updates.run(rollouts)
    assert updates.loss(old) == 0.0
    assert (metrics["mismatch/rejected_rows"], metrics["prompts_trained"]) == (4.0, 0)


def test_bypass_clips_against_the_sampler_and_skips_the_pass(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    updates = Updates(tmp_path, Correction(bypass=True), old)
    updates.run(rollouts)
    assert updates.scored == 0
    batch, loss = updates.batches[0]
    assert torch.equal(batch["logprobs"].values, rollouts["rollout_logprobs"].values)
    assert not loss.on_policy


def test_bypass_rejects_by_the_old_policy_and_clips_against_the_sampler(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    updates = Updates(tmp_path, Correction(bypass=True, reject=TOKENS), old)
    metrics = updates.run(rollouts)
    assert updates.scored == 1
    mask, sampled = rollouts["response_mask"].values, rollouts["rollout_logprobs"].values
    new = torch.where(mask, old + 0.1, 0.0)
    kept = mask & ((sampled - old).exp() >= 0.8) & ((sampled - old).exp() <= 1.25)
    ratio = (new - sampled)[kept].double().exp()
    advantage = updates.batches[0][0]["advantages"].double()[rollouts["response_mask"].segment_ids][kept]
    losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    assert updates.loss(new) == pytest.approx(losses.mean().item(), rel=1e-5, abs=1e-7)
    assert metrics["mismatch/rejected_tokens"] == (mask & ~kept).sum() > 0
    assert metrics["rollout/logprob_gap"] == 0.0  # the pass measured it, not the update


def test_a_limit_with_bypass_turns_the_pass_on(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    updates = Updates(tmp_path, Correction(bypass=True, stop_above={"gap": 0.01}), old)
    with pytest.raises(MismatchError, match="gap"):
        updates.run(rollouts)
    assert (updates.scored, updates.batches) == (1, [])


def test_responses_of_an_older_policy_have_no_limit_on_the_gap(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    updates = Updates(tmp_path, Correction(weights="token"), old)
    gaps = {"logprob_gap": torch.full((len(SIZES),), 1e3).double()}
    given = updates.logprobs
    set_group(updates.session, "actor", logprobs=lambda batch: given(batch).drop(["logprob_gap"]).union(gaps))
    step = updates.session.begin_step(1)
    plan = updates.session.actor.plan(rollouts, mini_batches=True)
    with pytest.raises(LogprobGapError):
        compute_old_logprobs(updates.session, step, rollouts, plan)
    step.lag = 1
    compute_old_logprobs(updates.session, step, rollouts, plan)
    assert step.metrics["rollout/logprob_gap"] > 100


def with_versions(rollouts: BatchedDataDict) -> BatchedDataDict:
    """Return rollouts whose tokens are of the versions 5, 6 and 7, in turn."""
    mask = rollouts["response_mask"]
    versions = NEWEST - 2 + torch.arange(mask.values.shape[0], dtype=torch.int32) % 3
    return rollouts.drop(["policy_version"]).union(
        {"policy_version": mask.with_values(torch.where(mask.values, versions, -1))}
    )


def test_metrics_of_a_lag_are_those_of_its_tokens(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    rollouts = with_versions(rollouts)
    correction = Correction(weights="token", upper=1.2, reject={"token_k1": [0.8, 1.25]})
    metrics = Updates(tmp_path, correction, old, lead=2).run(rollouts)
    d, versions = (old - rollouts["rollout_logprobs"].values).double(), rollouts["policy_version"].values
    for lag in range(3):
        own = d[versions == NEWEST - lag]
        weights = own.exp().clamp(max=1.2)
        expected = {
            "kl": -own.mean(),
            "k3": (own.exp() - 1 - own).mean(),
            "chi2": (2 * own).exp().mean() - 1,
            "gap": own.abs().mean(),
            "largest_gap": own.abs().max(),
            "weight_mean": weights.mean(),
            "effective_share": weights.sum() ** 2 / (weights.square().sum() * own.numel()),
            "weights_bounded": (own.exp() > 1.2).double().mean(),
            "rejected_tokens": (((-own).exp() < 0.8) | ((-own).exp() > 1.25)).sum(),
        }
        found = {name: metrics[f"mismatch/lag_{lag}/{name}"] for name in expected}
        assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)


def test_an_update_without_old_log_probs_measures_lags_itself(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    rollouts = with_versions(rollouts)
    updates = Updates(tmp_path, Correction(), old, lead=2)
    metrics = updates.run(rollouts)
    assert updates.scored == 0
    d, versions = (old - rollouts["rollout_logprobs"].values).double(), rollouts["policy_version"].values
    masks = {"": rollouts["response_mask"].values, **{f"lag_{lag}/": versions == NEWEST - lag for lag in range(3)}}
    for place, mask in masks.items():
        rows = [own[inside].mean() for own, inside in zip(d.split(LENGTHS), mask.split(LENGTHS), strict=True)]
        expected = {
            "kl": -d[mask].mean(),
            "k3": (d[mask].exp() - 1 - d[mask]).mean(),
            "chi2": (2 * d[mask]).exp().mean() - 1,
            "gap": d[mask].abs().mean(),
            "largest_gap": d[mask].abs().max(),
            "perplexity_ratio": torch.stack([(-row).exp() for row in rows if not row.isnan()]).mean(),
            "effective_share": d[mask].exp().sum() ** 2 / ((2 * d[mask]).exp().sum() * mask.sum()),
        }
        found = {name: metrics[f"mismatch/{place}{name}"] for name in expected}
        assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)
    assert not [name for name in metrics if name.startswith("actor/") and "mismatch" in name]
    assert not [name for name in Updates(tmp_path, Correction(), old).run(rollouts) if name.startswith("mismatch/")]


def test_an_update_measures_only_rows_that_train(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    valid = torch.tensor([True, False, True, True])
    rollouts = with_versions(rollouts).drop(["valid"]).union({"valid": valid})
    metrics = Updates(tmp_path, Correction(), old, lead=2).run(rollouts)
    mask = rollouts["response_mask"]
    trains = mask.values & valid[mask.segment_ids]
    gaps = (old - rollouts["rollout_logprobs"].values).abs()[trains]
    assert metrics["mismatch/gap"] == pytest.approx(gaps.mean().item(), rel=1e-5)


def test_an_update_without_old_log_probs_ends_the_run_if_an_engine_is_wrong(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    rollouts = with_versions(rollouts)
    newest = rollouts["policy_version"].values == NEWEST
    updates = Updates(tmp_path, Correction(), old + newest * 3.0, lead=2)
    updates.lag = 2
    with pytest.raises(LogprobGapError, match="over 10 times the limit"):
        updates.run(rollouts)
    updates = Updates(tmp_path, Correction(), old + ~newest * 3.0, lead=2)
    updates.lag, updates.session.logprob_gap_limit.limit = 2, 0.5
    updates.run(rollouts)  # older versions may be any distance away


def test_lags_that_no_step_of_the_run_reaches_cost_nothing(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    updates = Updates(tmp_path, Correction(weights="token"), old, lead=64)
    updates.session.config.trainer.__dict__["steps"] = 3
    asked = []

    def correct(batch: BatchedDataDict, settings: Correction, **versions: Any) -> BatchedDataDict:
        asked.append(versions["lead"])
        return updates.correct(batch, settings, **versions)

    set_group(updates.session, "actor", logprobs=updates.logprobs, correct=correct, train_step=updates.train_step)
    updates.run(rollouts)
    assert asked == [2]


def test_a_lag_without_tokens_has_no_metrics(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    rollouts = with_versions(rollouts)
    metrics = Updates(tmp_path, Correction(weights="token"), old, lead=3).run(rollouts)
    assert "mismatch/lag_2/kl" in metrics
    assert "mismatch/lag_3/kl" not in metrics


def test_limits_warn_once_and_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rollouts, old = rollouts_and_old()
    rollouts = with_versions(rollouts)
    updates = Updates(tmp_path, Correction(warn_above={"lag_1/gap": 0.01, "k3": 9.0}), old, lead=2)
    with caplog.at_level(logging.WARNING):
        updates.run(rollouts)
        updates.run(rollouts)
    (warning,) = [one.getMessage() for one in caplog.records if "mismatch" in one.getMessage()]
    assert "over algorithm.correction.warn_above.lag_1/gap=0.01; lower the learning rate or trainer.lead (" in warning
    updates = Updates(tmp_path, Correction(stop_above={"gap": 0.01}), old)
    with pytest.raises(
        MismatchError,
        match=r"step 1: mismatch/gap is 0\.\d+, over algorithm.correction.stop_above.gap=0.01; sample and train in the",
    ):
        updates.run(rollouts)


def test_limits_apply_to_bounded_weights_and_rejected_tokens_of_a_lag(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    rollouts = with_versions(rollouts)
    limits = {"lag_1/rejected_tokens": 0.5}
    updates = Updates(tmp_path, Correction(reject={"token_k2": 1e-6}, stop_above=limits), old, lead=2)
    with pytest.raises(
        MismatchError,
        match=r"mismatch/lag_1/rejected_tokens is \d+, over .*=0.5; .* widen the limits of .*reject, or raise",
    ):
        updates.run(rollouts)
    bounded = Correction(weights="token", upper=1.0, stop_above={"weights_bounded": 1e-9})
    with pytest.raises(
        MismatchError, match=r"mismatch/weights_bounded is 0\.\d+, .* or raise .*upper, or raise the limit"
    ):
        Updates(tmp_path, bounded, old).run(rollouts)
    Updates(tmp_path, bounded.model_copy(update={"stop_above": {"weights_bounded": 1.0}}), old).run(rollouts)


def test_a_run_warns_or_ends_if_the_effective_sample_is_too_small(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rollouts, old = rollouts_and_old()
    rollouts = with_versions(rollouts)
    share = float(Updates(tmp_path, Correction(weights="token"), old).run(rollouts)["mismatch/effective_share"])
    assert 0 < share < 0.999
    for limit, is_below in ((0.999 * share, False), (1.001 * share, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            Updates(tmp_path, Correction(warn_below={"effective_share": limit}), old).run(rollouts)
        assert ("mismatch/effective_share is" in caplog.text) == is_below
    low = Correction(stop_below={"lag_1/effective_share": 1.0})
    with pytest.raises(
        MismatchError,
        match=r"effective_share is 0\.\d+, below .*stop_below.lag_1/effective_share=1; .* lower the limit",
    ):
        Updates(tmp_path, low, old, lead=2).run(rollouts)


def test_the_limit_of_the_gap_applies_to_tokens_of_the_newest_version_alone(tmp_path: Path):
    rollouts, old = rollouts_and_old()
    rollouts = with_versions(rollouts)
    newest = rollouts["policy_version"].values == NEWEST
    updates = Updates(tmp_path, Correction(weights="token"), old + newest * 3.0, lead=2)
    step = updates.session.begin_step(1)
    step.lag = 2
    plan = updates.session.actor.plan(rollouts, mini_batches=True)
    scored = compute_old_logprobs(updates.session, step, rollouts, plan)
    with pytest.raises(LogprobGapError, match="over 10 times the limit"):
        correct_off_policy(updates.session, step, scored, plan)
    updates = Updates(tmp_path, Correction(weights="token"), old + ~newest * 3.0, lead=2)
    updates.session.logprob_gap_limit.limit = 0.5
    step = updates.session.begin_step(1)
    step.lag = 2
    scored = compute_old_logprobs(updates.session, step, rollouts, plan)
    correct_off_policy(updates.session, step, scored, plan)  # older versions may be any distance away

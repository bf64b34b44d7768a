"""Log-probs, advantages and loss weights, over roles that answer as told."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpack.algorithms.errors import AlgorithmError
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import offload
from rlpack.batch.remote import RemoteColumn
from rlpack.batch.store import LocalStore
from rlpack.config.schema import Actor, Algorithm, Trainer
from rlpack.config.sections.correction_settings import Correction
from rlpack.config.sections.optimization import Lora, Optimizer
from rlpack.config.sections.value_models import Critic
from rlpack.packing import Batching, MicrobatchPlan
from rlpack.recipes.driver.critic_stages import compute_token_advantages, update_actor_after_warmup
from rlpack.recipes.driver.policy_stages import (
    collect_reference_logprobs,
    compute_advantages,
    compute_old_logprobs,
    initialize_reference,
    needs_old_logprobs,
    submit_reference_logprobs,
    update_actor,
)
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.reference_policy import reference_model
from rlpack.recipes.driver.session import Session
from rlpack.rollout.errors import LogprobGapError
from rlpack.workers.loss import PolicyGradientLoss
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.sessions import session_of, set_group

ONE_UPDATE, TWO_UPDATES = Trainer(updates_per_batch=1), Trainer(updates_per_batch=2)
TO_REWARD = Algorithm(kl_coef=0.1, kl_placement="reward")
READS_KL = Algorithm(kl_coef=0.1, advantage=f"{__name__}:by_divergence")


def test_the_reference_of_a_run_without_checkpoints_is_not_reused(tmp_path: Path):
    loaded: list[str] = []

    def freeze(progress: Progress, weights: str) -> Session:
        def export(folder: str) -> None:
            Path(folder).mkdir()
            Path(folder, "model.safetensors").write_text(weights)

        session = session_of(tmp_path)
        session.progress = progress
        set_group(session, "actor", export_reference=export)
        read = lambda folder: loaded.append(Path(folder, "model.safetensors").read_text())  # noqa: E731
        set_group(session, "reference", load_model=read)
        initialize_reference(session)
        return session

    before = freeze(Progress(phase="sft_warmup", step=4), "old")
    after = freeze(Progress(phase="sft_warmup", step=4), "new")
    freeze(Progress(phase="train", step=1), "trained")
    assert loaded == ["old", "new", "new"]
    assert before.reference_hashes != after.reference_hashes == {"model/model.safetensors": sha256(b"new").hexdigest()}
    assert reference_model(tmp_path).parent.joinpath("COMMITTED").exists()


def test_the_gap_to_the_sampler_is_a_mean_over_tokens(tmp_path: Path):
    session, rollouts = session_of(tmp_path, trainer=TWO_UPDATES), tiny_rollouts([(2, 4), (3, 9), (1, 2)])

    def logprobs(batch: BatchedDataDict) -> BatchedDataDict:
        sums = {"logprob_sum": torch.zeros(3).double(), "logprob_gap": torch.tensor([2.0, 2.5, 1.0]).double()}
        figures = {"response_tokens": torch.tensor([4, 5, 2]), **sums}
        return batch.keep([]).union({"logprobs": batch["rollout_logprobs"], **figures})

    set_group(session, "actor", logprobs=logprobs)
    step = session.begin_step(1)
    assert "response_tokens" in compute_old_logprobs(session, step, rollouts, plan_of(session, rollouts))
    assert step.metrics["rollout/logprob_gap"] == pytest.approx(0.5)


def test_a_gap_of_ten_times_the_limit_ends_the_step_before_its_update(tmp_path: Path):
    session, rollouts = session_of(tmp_path, trainer=TWO_UPDATES), tiny_rollouts([(2, 4), (3, 9)])

    def logprobs(batch: BatchedDataDict) -> BatchedDataDict:
        sums = {"logprob_sum": torch.zeros(2).double(), "logprob_gap": torch.tensor([4.0, 9.0]).double()}
        figures = {"response_tokens": torch.tensor([4, 9]), **sums}
        return batch.keep([]).union({"logprobs": batch["rollout_logprobs"], **figures})

    set_group(session, "actor", logprobs=logprobs)
    with pytest.raises(LogprobGapError, match=r"differ by 1 nats on average, over 10 times the limit of 0\.05"):
        compute_old_logprobs(session, session.begin_step(1), rollouts, plan_of(session, rollouts))


def test_the_gap_that_a_single_update_measures_has_the_same_limit(tmp_path: Path):
    session, rollouts = session_of(tmp_path, trainer=ONE_UPDATE), tiny_rollouts([(2, 4), (3, 9)])
    session.progress, tokens = Progress(phase="train"), torch.tensor([4, 9])

    def logprobs(batch: BatchedDataDict) -> BatchedDataDict:
        gaps = torch.tensor([0.0, 13.0]).double()
        return batch.keep([]).union({"logprobs": batch["rollout_logprobs"], "logprob_gap": gaps})

    metrics = [{"actor/logprob_gap": 1.0, "actor/skipped_steps": 0.0}]
    set_group(session, "actor", logprobs=logprobs, train_step=metrics)
    rollouts = rollouts.union({"valid": torch.ones(2, dtype=torch.bool), "response_tokens": tokens})
    with pytest.raises(LogprobGapError, match=r"differ by 1 nats on average.*most in row 1 "):
        update_actor(session, session.begin_step(1), rollouts, plan_of(session, rollouts))


def test_the_actors_rate_warms_up_from_its_first_update_after_the_critics_warm_up(tmp_path: Path):
    actor, critic = Actor(optimizer=Optimizer(learning_rate=3.0, warmup_steps=2)), Critic(warmup_steps=3)
    session = session_of(tmp_path, recipe="ppo", trainer=Trainer(steps=9), actor=actor, critic=critic)
    session.progress, rates = Progress(phase="train"), list[float]()

    def train_step(batch: BatchedDataDict, loss: Any, rate: float) -> list[dict[str, float]]:
        rates.append(rate)
        return [{"actor/skipped_steps": 0.0}]

    set_group(session, "actor", train_step=train_step)
    rollouts = tiny_rollouts([(2, 4), (3, 9)])
    rollouts = rollouts.union({"valid": torch.ones(2, dtype=torch.bool), "response_tokens": torch.tensor([4, 9])})
    rollouts = rollouts.union({"logprobs": rollouts["rollout_logprobs"]})
    for number in range(1, 8):
        update_actor_after_warmup(session, session.begin_step(number), rollouts, plan_of(session, rollouts), None)
    assert rates == pytest.approx([1.0, 2.0, 3.0, 3.0])


@pytest.mark.parametrize(("valid", "coefficient"), [((True, True), 0.08), ((True, False), 0.08), ((False, False), 0.1)])
def test_the_kl_coefficient_stays_if_no_row_measures_a_divergence(
    tmp_path: Path, valid: tuple[bool, bool], coefficient: float
):
    settings = Algorithm(kl_coef=0.1, kl_target=5.0, kl_horizon=2.0)  # without a divergence, 20 % less
    session, rollouts = session_of(tmp_path, trainer=ONE_UPDATE, algorithm=settings), tiny_rollouts([(2, 4), (3, 9)])
    session.progress = Progress(phase="train")
    metrics = {"actor/skipped_steps": float(not any(valid)), "actor/response_kl": 0.0, "actor/logprob_gap": 0.0}
    set_group(session, "actor", train_step=[metrics])
    set_group(session, "reference")
    rollouts = rollouts.union({"valid": torch.tensor(valid), "response_tokens": torch.tensor([4, 9])})
    step = session.begin_step(1)
    update_actor(session, step, rollouts, plan_of(session, rollouts))
    session.progress = step.progress
    assert session.kl_coef == pytest.approx(coefficient)


def test_an_optimizer_step_without_tokens_measures_no_gap(tmp_path: Path):
    session = session_of(tmp_path, algorithm=BYPASS, trainer=Trainer(mini_batch_size=1))
    session.progress, rollouts = Progress(phase="train"), tiny_rollouts([(2, 4), (3, 9), (1, 2)])
    gaps = [{"actor/logprob_gap": gap, "actor/skipped_steps": float(gap == 0)} for gap in (0.0, 0.01, 3.0)]
    set_group(session, "actor", train_step=gaps).mini_batch_size = 1
    step = session.begin_step(1)
    rollouts = rollouts.union({"valid": torch.tensor([False, True, True])})
    rollouts = compute_old_logprobs(session, step, rollouts, plan_of(session, rollouts))
    update_actor(session, step, rollouts, plan_of(session, rollouts))
    assert step.metrics["rollout/logprob_gap"] == pytest.approx(0.01)


BYPASS = Algorithm(correction=Correction(bypass=True))


def test_with_bypass_the_first_optimizer_step_measures_the_gap(tmp_path: Path):
    session, rollouts = session_of(tmp_path, algorithm=BYPASS), tiny_rollouts([(2, 4), (3, 9)])
    session.progress = Progress(phase="train")
    gaps = [{"actor/logprob_gap": gap, "actor/skipped_steps": 0.0} for gap in (0.01, 3.0, 4.0)]
    actor = set_group(session, "actor", train_step=gaps)
    step = session.begin_step(1)
    rollouts = rollouts.union({"valid": torch.ones(2, dtype=torch.bool)})
    rollouts = compute_old_logprobs(session, step, rollouts, plan_of(session, rollouts))
    update_actor(session, step, rollouts, plan_of(session, rollouts))
    assert actor.called == ["train_step"]
    assert step.metrics["rollout/logprob_gap"] == pytest.approx(0.01)


def test_with_bypass_a_gap_of_ten_times_the_limit_ends_the_step(tmp_path: Path):
    session, rollouts = session_of(tmp_path, algorithm=BYPASS), tiny_rollouts([(2, 4), (3, 9)])
    session.progress = Progress(phase="train")

    def logprobs(batch: BatchedDataDict) -> BatchedDataDict:
        gaps = torch.tensor([0.0, 13.0]).double()
        return batch.keep([]).union({"logprobs": batch["rollout_logprobs"], "logprob_gap": gaps})

    metrics = [{"actor/logprob_gap": 1.0, "actor/skipped_steps": 0.0}]
    set_group(session, "actor", logprobs=logprobs, train_step=metrics)
    step = session.begin_step(1)
    rollouts = rollouts.union({"valid": torch.ones(2, dtype=torch.bool)})
    rollouts = compute_old_logprobs(session, step, rollouts, plan_of(session, rollouts))
    with pytest.raises(LogprobGapError, match=r"differ by 1 nats on average.*; after the update, most in row 1 "):
        update_actor(session, step, rollouts, plan_of(session, rollouts))


def test_with_bypass_and_dropout_the_gap_has_no_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Dropout changes the log-probs of the update, and the sampler has none."""
    actor = Actor(lora=Lora(rank=2, dropout=0.1))
    session, rollouts = session_of(tmp_path, algorithm=BYPASS, actor=actor), tiny_rollouts([(2, 4), (3, 9)])
    session.progress = Progress(phase="train")
    set_group(session, "actor", train_step=[{"actor/logprob_gap": 1.0, "actor/skipped_steps": 0.0}])
    step = session.begin_step(1)
    rollouts = rollouts.union({"valid": torch.ones(2, dtype=torch.bool)})
    rollouts = compute_old_logprobs(session, step, rollouts, plan_of(session, rollouts))
    update_actor(session, step, rollouts, plan_of(session, rollouts))
    assert step.metrics["rollout/logprob_gap"] == 1.0
    assert "log-probs" not in caplog.text


def plan_of(session: Session, rollouts: BatchedDataDict) -> MicrobatchPlan:
    return session.actor.plan(rollouts, mini_batches=True)


def by_divergence(rewards: torch.Tensor, kl_sum: torch.Tensor) -> torch.Tensor:
    """Return advantages from the divergence of whole responses."""
    return rewards - kl_sum


@pytest.mark.parametrize(
    ("needed", "sections"),
    [
        (False, {"trainer": ONE_UPDATE}),
        (False, {"trainer": ONE_UPDATE, "algorithm": Algorithm(kl_coef=0.1)}),
        (True, {"trainer": TWO_UPDATES}),
        (True, {"trainer": ONE_UPDATE, "algorithm": TO_REWARD}),
        (True, {"trainer": ONE_UPDATE, "algorithm": READS_KL}),
        (True, {"trainer": ONE_UPDATE, "actor": Actor(lora=Lora(rank=2, dropout=0.1))}),
    ],
)
def test_log_probs_before_the_update_are_computed_only_where_they_are_needed(
    tmp_path: Path, needed: bool, sections: dict[str, Any]
):
    session = session_of(tmp_path, **sections)
    set_group(session, "actor")
    if session.config.algorithm.kl_coef > 0:
        set_group(session, "reference")
    rollouts = tiny_rollouts([(2, 4), (3, 9)])
    assert needs_old_logprobs(session, rollouts, plan_of(session, rollouts)) == needed


def test_several_optimizer_steps_need_log_probs_before_the_update(tmp_path: Path):
    session, rollouts = session_of(tmp_path, trainer=ONE_UPDATE), tiny_rollouts([(2, 4), (3, 9)])
    set_group(session, "actor").mini_batch_size = 1
    assert needs_old_logprobs(session, rollouts, plan_of(session, rollouts))


def test_without_log_probs_the_counted_tokens_are_those_that_the_plan_keeps(tmp_path: Path):
    session, rollouts = session_of(tmp_path, trainer=ONE_UPDATE), tiny_rollouts([(2, 4), (3, 9)])
    set_group(session, "actor", Batching(max_tokens=8, overlong="truncate"))
    counted = compute_old_logprobs(session, session.begin_step(1), rollouts, plan_of(session, rollouts))
    assert counted["response_tokens"].tolist() == [4, 5]


def test_without_log_probs_the_update_is_on_policy_and_measures_gap_and_divergence(tmp_path: Path):
    session, rollouts = session_of(tmp_path, algorithm=Algorithm(kl_coef=0.1)), tiny_rollouts([(2, 4), (3, 9)])
    session.progress = Progress(phase="train")
    losses: list[PolicyGradientLoss] = []

    def train_step(batch: BatchedDataDict, loss: PolicyGradientLoss, rate: float) -> list[dict[str, float]]:
        losses.append(loss)
        return [{"actor/skipped_steps": 0.0, "actor/logprob_gap": 0.25, "actor/response_kl": 0.5}]

    actor = set_group(session, "actor", train_step=train_step)
    column = rollouts["rollout_logprobs"]
    reference = rollouts.keep([]).union({"reference_logprobs": column})
    set_group(session, "reference", logprobs=reference)
    step = session.begin_step(1)
    pending = submit_reference_logprobs(session, rollouts)
    rollouts = compute_old_logprobs(session, step, rollouts, plan_of(session, rollouts))
    rollouts = collect_reference_logprobs(session, step, rollouts, plan_of(session, rollouts), pending)
    assert rollouts["response_tokens"].tolist() == [4, 9]
    scored = {"rewards": torch.tensor([0.0, 1.0]), "valid": torch.tensor([True, False])}
    plan = plan_of(session, rollouts)
    update_actor(session, step, compute_advantages(session, step, rollouts.union(scored), plan), plan)
    assert actor.called == ["train_step"]
    assert (losses[0].on_policy, losses[0].responses) == (True, 1)
    assert (step.metrics["rollout/logprob_gap"], step.metrics["reference/kl"]) == (0.25, 0.5)


def test_advantages_are_reported_of_the_rows_that_train(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4)] * 4, group=4)
    set_group(session, "actor")
    valid, rewards = torch.tensor([True, True, False, False]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    columns = {"rewards": rewards, "valid": valid, "response_tokens": torch.full((4,), 4)}
    step = session.begin_step(1)
    compute_advantages(session, step, rollouts.union(columns), plan_of(session, rollouts))
    assert step.metrics["advantage/std"] == pytest.approx(0.5**0.5, rel=1e-3)


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_the_divergence_over_valid_rows_is_reported_whether_the_rewards_need_it_or_not(tmp_path: Path, placement: Any):
    settings = Algorithm(kl_coef=0.1, kl_placement=placement)
    session, rollouts = session_of(tmp_path, algorithm=settings), tiny_rollouts([(2, 4), (2, 6), (2, 8)])
    session.progress = Progress(phase="train")
    column = rollouts["rollout_logprobs"]
    kl = {"kl_sum": torch.tensor([1.0, 2.0, 90.0]).double(), "kl_bounded": torch.tensor([1.0, 0.0, 8.0]).double()}
    actor = set_group(session, "actor", kl_sums=rollouts.keep([]).union(kl), train_step=[{"actor/skipped_steps": 0.0}])
    set_group(session, "reference", logprobs=rollouts.keep([]).union({"reference_logprobs": column}))
    columns = {"logprobs": column, "response_tokens": torch.tensor([4, 6, 8])}
    scored = {"rewards": torch.tensor([0.0, 1.0, 0.0]), "valid": torch.tensor([True, True, False])}
    step, plan = session.begin_step(1), plan_of(session, rollouts)
    pending = submit_reference_logprobs(session, rollouts)
    rollouts = collect_reference_logprobs(session, step, rollouts.union(columns), plan, pending)
    rollouts = compute_advantages(session, step, rollouts.union(scored), plan)
    update_actor(session, step, rollouts, plan)
    assert step.responses == [4, 6, 8]
    # Only the rewards need the divergence before the update.
    assert actor.called == (["train_step", "kl_sums"] if placement == "loss" else ["kl_sums", "train_step"])
    assert ("kl_sum" in rollouts) == (placement == "reward")
    assert step.metrics["reference/kl"] == pytest.approx(1.5)
    assert step.metrics["reference/kl_bounded_fraction"] == pytest.approx(0.1)


BEFORE_SCORE = r"no column rewards, valid; call rollouts = score\(step, rollouts\), which adds them, before "


@pytest.mark.parametrize(
    "settings",
    [Algorithm(), TO_REWARD, TO_REWARD.model_copy(update={"advantage": "reinforce_pp"})],
    ids=["without KL", "KL in rewards", "KL in the rewards of tokens"],
)
def test_advantages_of_rollouts_without_rewards_name_the_stage_that_adds_them(tmp_path: Path, settings: Algorithm):
    session, rollouts = session_of(tmp_path, algorithm=settings), tiny_rollouts([(2, 4)] * 4, group=4)
    set_group(session, "actor")
    session.progress = Progress(phase="train")
    rollouts = rollouts.union({"kl_sum": torch.zeros(4, dtype=torch.float64)})
    with pytest.raises(AlgorithmError, match=BEFORE_SCORE + "compute_advantages"):
        compute_advantages(session, session.begin_step(1), rollouts, plan_of(session, rollouts))
    with pytest.raises(AlgorithmError, match=BEFORE_SCORE + "compute_token_advantages"):
        compute_token_advantages(session, session.begin_step(1), rollouts, plan_of(session, rollouts))


class OffloadingStore(LocalStore):
    """Records the columns that are fetched."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.fetched: list[str] = []

    def offload(self, batch: BatchedDataDict) -> BatchedDataDict:
        offloaded, self.parts = offload(batch)
        return offloaded.with_handles(range(len(self.parts)))

    def fetch(self, batch: BatchedDataDict) -> BatchedDataDict:
        here = batch.copy()
        here.reader = lambda parts: [self.parts[int(str(part))] for part in parts]
        self.fetched += [name for name in batch if isinstance(batch[name], RemoteColumn)]
        return BatchedDataDict(dict(here), row_ids=here.row_ids)


def against_scores(rewards: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return advantages from a column of several numbers a row."""
    return rewards - scores.sum(1)


def test_an_advantage_function_gets_columns_of_several_numbers_per_row_only_if_it_names_them(tmp_path: Path):
    algorithm = Algorithm(advantage=f"{__name__}:against_scores")
    session, rollouts = session_of(tmp_path, algorithm=algorithm), tiny_rollouts([(2, 4)] * 2, group=2)
    set_group(session, "actor")
    store = session.store = OffloadingStore()
    rows = {"rewards": torch.tensor([0.0, 1.0]), "valid": torch.ones(2, dtype=torch.bool)}
    away = store.offload(
        BatchedDataDict({"scores": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "unasked": torch.ones(2, 9)})
    )
    rollouts = rollouts.union({**rows, **away, "response_tokens": torch.full((2,), 4)})
    estimated = compute_advantages(session, session.begin_step(1), rollouts, plan_of(session, rollouts))
    assert estimated["advantages"].tolist() == [-3.0, -6.0]
    assert store.fetched == ["scores"]


def test_quarantined_rows_have_no_weight_and_do_not_change_the_weights_of_others(tmp_path: Path):
    session, rollouts = session_of(tmp_path), tiny_rollouts([(2, 4), (2, 6), (2, 8), (2, 3)], group=4)
    set_group(session, "actor")
    counts = torch.tensor([4, 6, 8, 3])
    columns = {"rewards": torch.tensor([0.0, 1.0, 0.0, 1.0]), "valid": torch.tensor([True, True, False, True])}
    rollouts = rollouts.union({**columns, "response_tokens": counts})
    weighted = compute_advantages(session, session.begin_step(1), rollouts, plan_of(session, rollouts))
    for name in ("loss_weight", "token_weight"):
        assert weighted[name][2] == 0
        assert (weighted[name] * counts).sum().item() == pytest.approx(1.0)
        assert weighted[name][0] == pytest.approx(1 / 13)
    assert weighted["advantages"][2] == 0

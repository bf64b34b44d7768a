"""Passes without gradients with microbatches of their own, over an actor and a critic in this process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Actor, Critic, Optimizer, Rollout, Trainer
from rlpack.config.sections.role_batching import ForwardBatching
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching, MicrobatchPlan
from rlpack.recipes.driver.critic_stages import compute_values
from rlpack.recipes.driver.evaluation import evaluate_loss
from rlpack.recipes.driver.forward_plans import forward_plan
from rlpack.recipes.driver.policy_stages import compute_old_logprobs
from rlpack.testing.local_ranks import LocalRanks
from rlpack.workers.actor import ActorWorker
from rlpack.workers.critic import CriticWorker
from tests.builders import tiny_rollouts, tiny_tokenizer
from tests.distributed.definition import plain_model, row_scores
from tests.unit.recipes.driver.sessions import SavingSession, session_of

# A long tail: the update's budget holds little more than the longest row.
SIZES = [(3, 59), (2, 4), (3, 2), (2, 7), (4, 3), (3, 11), (2, 2), (3, 5)]
TEMPERATURE = 0.8
UPDATE, WIDE = Batching(max_tokens=64), ForwardBatching(max_tokens=256)


class Planned(WorkerGroup[Any]):
    """A role in this process that keeps the plans of its calls."""

    plans: list[MicrobatchPlan]

    def with_plan(self, plan: MicrobatchPlan) -> Any:
        self.plans.append(plan)
        return super().with_plan(plan)


def session_with(folder: Path, role: str, forward: ForwardBatching, *, of_data: bool = False) -> SavingSession:
    """Return a session whose role runs its model, with the tests' vocabulary or that of the data."""
    actor = Actor(optimizer=Optimizer(max_grad_norm=1e9), isolation_check=False)
    sections: dict[str, Any] = {"actor": actor, "critic": Critic()}
    sections[role] = sections[role].model_copy(update={"forward_batching": forward})
    trainer, rollout = Trainer(updates_per_batch=2, mini_batch_size=4), Rollout(temperature=TEMPERATURE)
    session = session_of(folder, trainer=trainer, rollout=rollout, batching=UPDATE, **sections)
    worker = ActorWorker if role == "actor" else CriticWorker
    config, tokenizer = session.config, session.tokenizer if of_data else tiny_tokenizer()
    ranks = LocalRanks([lambda context: worker.from_settings(context, config, tokenizer)])
    group = Planned(role, ranks, UPDATE, trainer.mini_batch_size)
    group.plans = []
    session.groups[role] = group
    return session


def old_logprobs(folder: Path, forward: ForwardBatching) -> tuple[BatchedDataDict, list[MicrobatchPlan]]:
    session = session_with(folder, "actor", forward)
    rollouts = tiny_rollouts(SIZES).drop(["rollout_logprobs"])
    plan = session.actor.plan(rollouts, mini_batches=True)
    scored = compute_old_logprobs(session, session.begin_step(1), rollouts, plan)
    return scored, [plan, *session.groups["actor"].plans]  # pyright: ignore[reportAttributeAccessIssue]


def microbatches(plan: MicrobatchPlan) -> int:
    return int((plan.counts > 0).sum())


@pytest.mark.usefixtures("process_group")
def test_log_probs_with_a_budget_of_their_own_are_those_of_the_update_and_of_the_definition(tmp_path: Path):
    narrow, (update, same) = old_logprobs(tmp_path, ForwardBatching())
    assert same is update
    wide, (_, forward) = old_logprobs(tmp_path, WIDE)
    assert (update.num_steps, forward.num_steps) == (2, 1)
    assert microbatches(forward) < microbatches(update)
    assert forward.batching.max_tokens == 256
    mask = narrow["response_mask"].values
    assert (wide["logprobs"].values - narrow["logprobs"].values).abs().max() <= 1e-6
    assert wide["response_tokens"].tolist() == narrow["response_tokens"].tolist() == [size[1] for size in SIZES]
    model = plain_model()
    with torch.no_grad():
        truth = torch.cat([row_scores(model, row, TEMPERATURE)[0] for row in wide["input_ids"].rows()]) * mask
    assert (wide["logprobs"].values - truth).abs().max() <= 1e-5


@pytest.mark.usefixtures("process_group")
def test_values_with_a_budget_of_their_own_are_those_of_the_update(tmp_path: Path):
    found = []
    for forward in (ForwardBatching(), WIDE):
        session, rollouts = session_with(tmp_path, "critic", forward), tiny_rollouts(SIZES)
        head = session.critic.ranks._workers[0]._critic.head  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():  # a new head gives zeros
            head.weight.to_local().normal_(generator=torch.Generator().manual_seed(1))
        plan = session.critic.plan(rollouts, mini_batches=True)
        found.append(compute_values(session, session.begin_step(1), rollouts, plan))
    assert (found[0]["values"].values - found[1]["values"].values).abs().max() <= 1e-6
    assert found[0]["values"].values.abs().max() > 0
    assert found[0]["value_tokens"].tolist() == found[1]["value_tokens"].tolist()


@pytest.mark.usefixtures("process_group")
def test_the_loss_on_held_out_demonstrations_is_computed_with_the_same_budget(tmp_path: Path):
    losses = []
    for forward in (ForwardBatching(), WIDE):
        session = session_with(tmp_path, "actor", forward, of_data=True)
        step = session.begin_step(1)
        evaluate_loss(session, step)
        losses.append(step.metrics["evaluation/loss"])
        (plan,) = session.groups["actor"].plans  # pyright: ignore[reportAttributeAccessIssue]
        assert plan.batching.max_tokens == (64 if forward == ForwardBatching() else 256)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.usefixtures("process_group")
def test_a_plan_of_its_own_keeps_every_row(tmp_path: Path):
    session, rollouts = session_with(tmp_path, "actor", WIDE), tiny_rollouts(SIZES)
    plan = forward_plan(session, "actor", rollouts)
    assert plan is not None
    assert np.sort(plan.order).tolist() == list(range(len(SIZES)))
    assert plan.padded_lengths.max() <= 256

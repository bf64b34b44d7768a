"""Passes over a rollout batch: which rows each mini-batch holds, and the weights that they get."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Algorithm, Trainer
from rlpack.packing import MicrobatchPlan
from rlpack.recipes.driver.critic_stages import update_critic
from rlpack.recipes.driver.policy_stages import add_loss_weights, update_actor
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.sessions import SavingSession, session_of, set_group

SIZES = [(2, 3), (3, 9), (2, 1), (4, 5), (2, 7), (3, 2), (2, 4)]
TOKENS = torch.tensor([size[1] for size in SIZES])
MINI_BATCH = 3


class Passes:
    """An update whose role records the rows and the plan of each pass."""

    def __init__(self, folder: Path, *, shuffle: bool = True, passes: int = 3, step: int = 1, seed: int = 1) -> None:
        trainer = Trainer(updates_per_batch=passes, mini_batch_size=MINI_BATCH, shuffle_mini_batches=shuffle)
        self.rows: list[BatchedDataDict] = []
        self.plans: list[MicrobatchPlan] = []
        self.session: SavingSession = session_of(folder, trainer=trainer, seed=seed, algorithm=Algorithm())
        for role in ("actor", "critic"):
            group = set_group(self.session, role, train_step=self.train_step)
            group.mini_batch_size = MINI_BATCH
            group.with_plan = self.with_plan(group)
        self.step = self.session.begin_step(step)
        tokens, valid = TOKENS, torch.arange(len(SIZES)) != 4
        rollouts = tiny_rollouts(SIZES).union({"valid": valid, "response_tokens": tokens, "value_tokens": tokens})
        self.rollouts = rollouts.rename({"rollout_logprobs": "logprobs"})
        self.plan = self.session.actor.plan(self.rollouts, mini_batches=True)

    def with_plan(self, group: Any) -> Any:
        def remember(plan: MicrobatchPlan) -> Any:
            self.plans.append(plan)
            return group

        return remember

    def train_step(self, rows: BatchedDataDict, loss: Any, rate: float) -> list[dict[str, float]]:
        self.rows.append(rows)
        return [{"actor/skipped_steps": 0.0}]

    def update(self) -> "Passes":
        rollouts = add_loss_weights(self.session, self.step, self.rollouts, self.plan)
        update_actor(self.session, self.step, rollouts, self.plan)
        return self

    def update_critic(self) -> "Passes":
        rollouts = add_loss_weights(self.session, self.step, self.rollouts, self.plan)
        update_critic(self.session, self.step, rollouts, self.plan)
        return self

    @property
    def orders(self) -> list[list[int]]:
        """Return the rows of each pass, by their responses' lengths, which are all different."""
        return [[TOKENS.tolist().index(count) for count in rows["response_tokens"].tolist()] for rows in self.rows]


def test_every_pass_after_the_first_has_all_rows_in_an_order_of_its_own(tmp_path: Path):
    orders = Passes(tmp_path).update().orders
    assert orders[0] == list(range(7))
    assert [sorted(order) for order in orders] == [list(range(7))] * 3
    assert orders[1] != orders[0]
    assert orders[2] not in (orders[0], orders[1])


def test_without_shuffling_every_pass_is_the_first(tmp_path: Path):
    passes = Passes(tmp_path, shuffle=False).update()
    assert passes.orders == [list(range(7))] * 3
    assert all(rows is passes.rows[0] for rows in passes.rows)


def test_a_repeated_step_has_the_same_passes_and_another_step_or_seed_others(tmp_path: Path):
    first = Passes(tmp_path).update().orders
    assert Passes(tmp_path).update().orders == first
    assert Passes(tmp_path, step=2).update().orders[1:] != first[1:]
    assert Passes(tmp_path, seed=2).update().orders[1:] != first[1:]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_weights_of_every_mini_batch_add_up_over_its_own_rows(tmp_path: Path, role: str):
    passes = Passes(tmp_path)
    passes = passes.update() if role == "actor" else passes.update_critic()
    for rows in passes.rows:
        valid, tokens = rows["valid"], rows["response_tokens"]
        for start in range(0, len(SIZES), MINI_BATCH):
            own = slice(start, start + MINI_BATCH)
            # The mean over the tokens of valid rows, by definition.
            expected = torch.where(valid[own], 1.0 / tokens[own][valid[own]].sum(), 0.0)
            assert torch.allclose(rows["loss_weight"][own], expected)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_each_pass_follows_a_plan_of_its_own_rows(tmp_path: Path, role: str):
    passes = Passes(tmp_path)
    passes = passes.update() if role == "actor" else passes.update_critic()
    for rows, plan in zip(passes.rows, passes.plans[-3:], strict=True):
        assert plan.request.lengths.tolist() == rows["input_ids"].lengths.tolist()
        assert plan.step_of_row.tolist() == [0, 0, 0, 1, 1, 1, 2]

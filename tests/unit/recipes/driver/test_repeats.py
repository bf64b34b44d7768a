"""Repeats in the order of Tunix's queue: `sample_repeat` is `trainer.group_size`, `batch_repeat` `updates_per_batch`.

Tunix repeats each prompt of a batch n times, side by side, and gives the trainer each such batch μ times in a row.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Algorithm, Trainer
from rlpack.recipes.driver import ahead
from rlpack.recipes.driver.ahead import AheadQueue
from rlpack.recipes.driver.draws import Batch, as_scored
from rlpack.recipes.driver.policy_stages import add_loss_weights, update_actor
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.sessions import session_of, set_group

PROMPTS, SAMPLES, PASSES = 2, 5, 3


def draw(session: Session, step: StepContext) -> Batch:
    """Return the prompts of a step by number, each as often as it is sampled."""
    start = step.progress.prompts_consumed
    step.advance(prompts_consumed=start + PROMPTS)
    prompts = BatchedDataDict({"uid": [str(start + number) for number in range(PROMPTS)]})
    rows = prompts.repeat_interleave(session.config.trainer.group_size)
    rollouts = tiny_rollouts([(2, 3)] * rows.num_rows, group=SAMPLES).rename({"rollout_logprobs": "logprobs"})
    count = torch.full((rows.num_rows,), 3)
    columns = {"valid": torch.ones(rows.num_rows, dtype=torch.bool), "response_tokens": count, "uid": rows["uid"]}
    version = rollouts["policy_version"]
    versions = Ragged(torch.full_like(version.values, session.rollout_weights.version), version.lengths)
    return Batch(rollouts.drop(["uid", "policy_version"]).union(columns | {"policy_version": versions}), as_scored)


@pytest.mark.parametrize("lead", [0, 1])
def test_every_prompt_is_repeated_n_times_side_by_side_and_every_batch_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lead: int
):
    trainer = Trainer(
        steps=2, lead=lead, prompts_per_step=PROMPTS, group_size=SAMPLES, updates_per_batch=PASSES, mini_batch_size=None
    )
    session = session_of(tmp_path, trainer=trainer, algorithm=Algorithm())
    session.__dict__["rollout_weights"] = SimpleNamespace(version=1)
    monkeypatch.setattr(ahead, "sync_weights", lambda session, step: None)
    stream: list[list[str]] = []

    def train_step(rows: BatchedDataDict, loss: Any, rate: float) -> list[dict[str, float]]:
        stream.append(list(rows["uid"]))
        return [{"actor/skipped_steps": 0.0}]

    set_group(session, "actor", train_step=train_step)
    queue = AheadQueue(session, draw)
    for step in session.steps("train", 2):
        rollouts = queue.take(step).rollouts
        plan = session.actor.plan(rollouts, mini_batches=True)
        update_actor(session, step, add_loss_weights(session, step, rollouts, plan), plan)
        queue.publish(step)
    # [0×5, 1×5] three times, then [2×5, 3×5] three times.
    assert stream == [["0"] * 5 + ["1"] * 5] * 3 + [["2"] * 5 + ["3"] * 5] * 3

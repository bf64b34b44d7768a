"""Supervised steps: which demonstrations they draw, and the loss on the held-out ones."""

from pathlib import Path

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import SFTWarmup
from rlpack.recipes import sft
from rlpack.recipes.driver.evaluation import evaluate_loss
from rlpack.recipes.driver.progress import Progress
from rlpack.recipes.driver.sft_stages import draw_demonstrations, sft_step
from rlpack.workers.actor import ActorWorker
from tests.unit.recipes.driver.sessions import session_of, set_group


def test_the_next_demonstrations_follow_the_last_ones_drawn(tmp_path: Path):
    session = session_of(tmp_path)
    set_group(session, "actor")
    whole = draw_demonstrations(session, session.begin_step(1), 6)
    other = session_of(tmp_path)
    set_group(other, "actor")
    step = other.begin_step(1)
    parts = [draw_demonstrations(other, step, count) for count in (2, 4)]
    assert torch.equal(torch.cat([part["input_ids"].values for part in parts]), whole["input_ids"].values)
    assert step.progress.demonstrations_trained == 6


def test_supervised_runs_report_the_loss_of_held_out_demonstrations(tmp_path: Path):
    session = session_of(tmp_path)

    def logprobs(batch: BatchedDataDict, *, temperature: float) -> BatchedDataDict:
        assert temperature == 1.0
        counts = torch.tensor([int(row.sum()) for row in batch["response_mask"].rows()])
        return batch.keep([]).union({"response_tokens": counts, "logprob_sum": counts.double() * -0.25})

    actor = set_group(session, "actor", logprobs=logprobs)
    step = session.begin_step(0)
    evaluate_loss(session, step)
    assert actor.called == [ActorWorker.logprobs.__name__]
    expected = {"evaluation/loss": 0.25, "evaluation/perplexity": 1.2840254, "evaluation/overlong": 0}
    assert step.metrics == pytest.approx(expected)


def test_a_warm_up_takes_its_steps_and_resets_the_optimizer_at_its_end(tmp_path: Path):
    session = session_of(tmp_path, sft_warmup=SFTWarmup(steps=2, batch_size=3))
    answers = {"train_step": [{"actor/skipped_steps": 0.0}], "reset_optimizer": None}
    actor = set_group(session, "actor", **answers)
    sft.sft_warmup(session)
    assert actor.called == ["train_step", "train_step", "reset_optimizer"]
    assert (session.saved, session.progress.demonstrations_trained) == ((2,), 6)


def test_supervised_fine_tuning_keeps_its_plan_for_the_report_and_a_warm_up_does_not(tmp_path: Path):
    session = session_of(tmp_path)
    set_group(session, "actor", train_step=[{"actor/skipped_steps": 0.0}])
    for phase in ("sft_warmup", "train"):
        session.progress = Progress(phase)
        step = session.begin_step(1)
        batch = draw_demonstrations(session, step, 6)
        sft_step(session, step, batch, 1e-3)
        assert (step.plan is not None) == (phase == "train")
        if step.plan is not None:
            assert step.plan.lengths.tolist() == batch["input_ids"].lengths.tolist()

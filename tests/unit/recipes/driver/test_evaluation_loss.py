"""The loss on held-out demonstrations: transformers' own in every batching mode, and without effect on training."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from rlpack.config.schema import Evaluation, Rollout, Trainer
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.models.loading import build_causal_lm
from rlpack.packing import Batching
from rlpack.recipes import sft
from rlpack.recipes.driver.evaluation import evaluate_loss
from rlpack.recipes.driver.learning_rate import learning_rate
from rlpack.recipes.driver.sft_stages import draw_demonstrations, sft_step
from rlpack.testing.local_ranks import LocalRanks
from rlpack.workers.actor import ActorWorker
from tests.unit.recipes.driver.sessions import SavingSession, run_of, session_of

BATCHINGS = {
    "packed": Batching(max_tokens=96),
    "dynamic": Batching(mode="dynamic", max_tokens=96),
    "fixed": Batching(mode="fixed", micro_batch_size=3, max_tokens=None),
}
STEPS, ROWS = 3, 4

pytestmark = pytest.mark.usefixtures("process_group")


def session_with(folder: Path, batching: Batching = BATCHINGS["packed"], **sections: Any) -> SavingSession:
    """Return a supervised session whose actor runs its model in this process."""
    folder.mkdir(exist_ok=True)
    # A temperature that must have no effect on the loss.
    defaults = {"trainer": Trainer(steps=STEPS, prompts_per_step=ROWS), "rollout": Rollout(temperature=0.5)}
    session = session_of(folder, recipe="sft", batching=batching, **(defaults | sections))
    config, tokenizer = session.config, session.tokenizer
    ranks = LocalRanks([lambda context: ActorWorker.from_settings(context, config, tokenizer)])
    session.groups["actor"] = WorkerGroup("actor", ranks, batching, None, ActorWorker)
    return session


def loss_of_transformers(session: SavingSession) -> float:
    """Return the loss that the initial model in transformers computes from labels, over all held-out rows at once."""
    tokenizer: Any = session.tokenizer
    config = session.config
    model = build_causal_lm(
        config.model,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=config.seed,
        attention_name="eager",
    )
    batch = session.held_out.demonstrations(np.arange(len(session.held_out)))
    columns = (batch[name].rows() for name in ("input_ids", "response_mask"))
    rows: list[tuple[Tensor, Tensor]] = [*zip(*columns, strict=True)]
    assert len({len(tokens) for tokens, _ in rows}) > 1  # a mean of the rows' means would be another number
    arguments = {
        "input_ids": [tokens for tokens, _ in rows],
        "attention_mask": [torch.ones_like(tokens) for tokens, _ in rows],
        "labels": [tokens.where(mask, -100) for tokens, mask in rows],
    }
    padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    with torch.no_grad():
        padded = {name: pad_sequence(of, True, padding[name]) for name, of in arguments.items()}
        return model(**padded).loss.item()


def state_of(session: SavingSession) -> list[Tensor]:
    """Return the actor's weights, and the tensors of its optimizer's state."""
    stepper = session.actor.ranks._workers[0]._stepper  # pyright: ignore[reportAttributeAccessIssue]
    moments = [value for of_weight in stepper._optimizer.state.values() for value in of_weight.values()]
    return [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in (*stepper.model.parameters(), *moments)
    ]


@pytest.mark.parametrize("name", BATCHINGS)
def test_the_loss_is_that_of_transformers(tmp_path: Path, name: str):
    session = session_with(tmp_path, BATCHINGS[name])
    step = session.begin_step(0)
    evaluate_loss(session, step)
    loss = step.metrics["evaluation/loss"]
    assert loss == pytest.approx(loss_of_transformers(session), rel=1e-6)
    assert step.metrics["evaluation/perplexity"] == pytest.approx(math.exp(loss))
    assert step.metrics["evaluation/overlong"] == 0


def test_evaluating_leaves_no_trace_in_weights_and_optimizer(tmp_path: Path):
    evaluated = session_with(tmp_path / "evaluated", evaluation=Evaluation(every=1))
    sft.train(evaluated)
    alone = session_with(tmp_path / "alone")
    for step in alone.steps("train", STEPS):
        rate = learning_rate(alone.config.actor.optimizer, step.number, STEPS)
        sft_step(alone, step, draw_demonstrations(alone, step, ROWS), rate)
    phases = [phase for phase, _ in run_of(evaluated).logged]
    assert phases == ["evaluation", *["train", "evaluation"] * STEPS]
    states = zip(state_of(evaluated), state_of(alone), strict=True)
    assert all(torch.equal(one, other) for one, other in states)
    assert len(state_of(alone)) > 3 * 10  # weights and two moments of each
    losses = [record["evaluation/loss"] for record in run_of(evaluated).records if "evaluation/loss" in record]
    assert len(set(losses)) == STEPS + 1


def test_demonstrations_over_the_budget_are_counted_and_a_loss_of_none_is_not_invented(tmp_path: Path):
    session = session_with(tmp_path, Batching(max_tokens=4, overlong="drop"))
    step = session.begin_step(0)
    evaluate_loss(session, step)
    assert step.metrics == {"evaluation/overlong": len(session.held_out)}

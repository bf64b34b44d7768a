"""Drawn groups and their rewards stay together, in whatever order groups end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.recipes.driver import draws
from rlpack.recipes.driver.draws import Batch, draw_groups
from tests.builders import tiny_rollouts
from tests.unit.recipes.driver.sessions import session_of, set_group


def test_rows_of_groups_that_ended_out_of_order_get_their_own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = tiny_rollouts([(2, 4)] * 6).union({"completion": [*"012345"]})
    ended = rows.select([4, 5, 0, 1, 2, 3])  # the last of three groups ended first

    def generate(session: Any, step: Any, prompts: Any, submit: Callable[[BatchedDataDict], None]) -> None:
        submit(ended)

    def score(batch: BatchedDataDict) -> BatchedDataDict:
        rewards = torch.tensor([float(text) for text in batch["completion"]])
        return batch.keep([]).union({"rewards": rewards, "quarantined": rewards < 0})

    monkeypatch.setattr(draws, "generate", generate)
    session = session_of(tmp_path)
    set_group(session, "reward", score=score)
    batches: list[Batch] = []
    step = session.begin_step(1)
    draw_groups(session, step, batches.append)
    scored = batches[0].score(step, batches[0].rollouts)
    assert scored["rewards"].tolist() == [float(text) for text in scored["completion"]]
    assert sorted(scored["rewards"].tolist()) == [0, 1, 2, 3, 4, 5]

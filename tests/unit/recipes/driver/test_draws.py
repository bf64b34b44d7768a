"""Drawn groups and their rewards stay together, in whatever order groups end."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.recipes.driver import draws
from rlpack.recipes.driver.draws import Batch, as_scored, check_drawn, draw_groups
from rlpack.recipes.driver.groups_by_end import GroupsByEnd
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext
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


@pytest.mark.parametrize(
    ("drawn", "what"),
    [
        (tiny_rollouts([(2, 3)]), "BatchedDataDict"),
        ((1, "a", 2.0), "(int, str, float)"),
        ((tiny_rollouts([(2, 3)]), None), "(BatchedDataDict, NoneType)"),
        (None, "NoneType"),
    ],
)
def test_a_draw_that_returns_something_else_is_named(drawn: Any, what: str):
    def draw_twice(session: Session, step: StepContext) -> Any:
        return drawn

    with pytest.raises(TypeError, match=rf"draw_twice of .* returned {re.escape(what)}; return Batch\(rollouts, score"):
        check_drawn(drawn, partial(draw_twice))
    rollouts = tiny_rollouts([(2, 3)])
    assert check_drawn((rollouts, as_scored), draw_twice) == (rollouts, as_scored)


SCORED = {"rewards": torch.ones(4), "valid": torch.ones(4, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        (lambda rows: None, TypeError, "returned None; return"),
        (lambda rows: rows["rewards"], TypeError, "returned a Tensor; return"),
        (lambda rows: rows.select([0, 1, 3]), DataError, "returned 3 of 4 rows; return"),
        (lambda rows: rows.select([1, 0, 2, 3]), DataError, "returned rows with other ids or in another order; return"),
        (lambda rows: rows.drop(["rewards"]), DataError, "returned no column rewards; return"),
        (lambda rows: rows.drop(["valid", "rewards"]), DataError, "returned no column rewards, valid; return"),
    ],
)
@pytest.mark.parametrize("by_group", [False, True])
def test_a_score_that_returns_something_else_is_named(
    tmp_path: Path, by_group: bool, change: Callable[[BatchedDataDict], Any], error: type[Exception], what: str
):
    def probe(step: StepContext, rollouts: BatchedDataDict) -> Any:
        return change(rollouts.union(SCORED))

    step, rollouts = session_of(tmp_path).begin_step(1), tiny_rollouts([(2, 3)] * 4)

    def score() -> None:
        if by_group:
            groups = GroupsByEnd(step)
            groups.add(Batch(rollouts, partial(probe)))
            groups.all_scored()
        else:
            check_drawn((rollouts, partial(probe)), probe).score(step, rollouts)

    with pytest.raises(error, match=rf"probe of tests\..* {what} all rows .*, and set valid=False to leave one out"):
        score()


def test_a_score_that_keeps_the_rows_passes_though_other_columns_change(tmp_path: Path):
    def score(step: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
        return rollouts.drop(["uid"]).union(SCORED)

    step, rollouts = session_of(tmp_path).begin_step(1), tiny_rollouts([(2, 3)] * 4)
    batch = check_drawn((rollouts, score), score)
    for rows in (rollouts, rollouts.select([2, 3, 0, 1])):  # a later stage may have reordered them
        scored = batch.score(step, rows)
        assert scored["rewards"].tolist() == [1.0] * 4
        assert scored.row_ids.tolist() == rows.row_ids.tolist()

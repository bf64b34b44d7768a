"""What a recipe draws for one step: rollouts, and their pending rewards."""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.recipes.driver.engine_lifecycle import engines_awake
from rlpack.recipes.driver.reward_stages import PendingRewards, collect_rewards
from rlpack.recipes.driver.rollout_stages import draw_prompts, generate
from rlpack.recipes.driver.session import Session
from rlpack.recipes.driver.step_context import StepContext

# Adds rewards to rollouts.
Score = Callable[[StepContext, BatchedDataDict], BatchedDataDict]


class Batch(NamedTuple):
    """What a recipe draws for one step.

    Attributes:
        rollouts: the rollout batch.
        score: waits for the rewards of `rollouts`, and adds them as `rewards` f32 [B] and `valid` bool [B], which is
            False for rows to leave out; it keeps all rows, in their order. Call it once.
    """

    rollouts: BatchedDataDict
    score: Score


class WithoutEngines:
    """A score that doesn't call the engines.

    With `trainer.lead`, engines may therefore get new weights, and generate the next batch, before it returns.
    """

    def __init__(self, score: Score) -> None:
        """Mark a score; use it as a decorator."""
        self.score = score

    def __call__(self, step: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
        """Score rollouts."""
        return self.score(step, rollouts)


Draw = Callable[[Session, StepContext], Batch]
# Draws the batch of a step, and calls a function with whole groups as they end.
DrawGroups = Callable[[Session, StepContext, Callable[[Batch], None]], None]


def check_drawn(drawn: Any, draw: Callable) -> Batch:
    """Return the result of a recipe's draw as a `Batch`; a tuple (rollouts, score) is accepted, too.

    Its `score` checks its result, see `scored_rows`.

    Raises:
        TypeError: it is something else; the message names the function.
    """
    if isinstance(drawn, tuple) and len(drawn) == 2 and isinstance(drawn[0], BatchedDataDict) and callable(drawn[1]):
        rollouts, score = drawn
        if score is as_scored:
            return Batch(rollouts, score)
        checked = partial(scored_rows, score)
        return Batch(rollouts, WithoutEngines(checked) if isinstance(score, WithoutEngines) else checked)
    what = type(drawn).__name__
    if isinstance(drawn, tuple):
        what = f"({', '.join(type(value).__name__ for value in drawn)})"
    raise TypeError(
        f"{_name_of(draw)} returned {what}; return Batch(rollouts, score), with a BatchedDataDict and a function that "
        "adds rewards to it"
    )


def scored_rows(score: Score, step: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Return what a recipe's `score` returns for rollouts: the same rows in the same order, with rewards.

    Later stages use the plan of `rollouts`, which doesn't fit other rows or another order.

    Raises:
        TypeError: it is something else; the message names the function.
        DataError: rows are missing or in another order, or there is no column `rewards` or `valid`.
    """
    scored: Any = score(step, rollouts)
    if score is as_scored:  # a recipe that computes its own advantages may have no rewards
        return scored
    if not isinstance(scored, BatchedDataDict):
        raise TypeError(_score_problem(score, "None" if scored is None else f"a {type(scored).__name__}"))
    if scored.num_rows != rollouts.num_rows:
        raise DataError(_score_problem(score, f"{scored.num_rows} of {rollouts.num_rows} rows"))
    if not np.array_equal(scored.row_ids, rollouts.row_ids):
        raise DataError(_score_problem(score, "rows with other ids or in another order"))
    if missing := [name for name in ("rewards", "valid") if name not in scored]:
        raise DataError(_score_problem(score, f"no column {', '.join(missing)}"))
    return scored


def _score_problem(score: Score, what: str) -> str:
    return (
        f"{_name_of(score)} returned {what}; return all rows of the batch that it gets, in the same order, with the "
        "columns rewards and valid, and set valid=False to leave one out"
    )


def _name_of(function: Callable) -> str:
    """Return the name and the module of a function, or of the one in a partial or a `WithoutEngines`."""
    while isinstance(function, partial | WithoutEngines):
        function = function.func if isinstance(function, partial) else function.score
    is_function = isinstance(function, FunctionType)
    return f"{function.__qualname__} of {function.__module__}" if is_function else repr(function)


def check_late_draw(draw: Draw, by_group: DrawGroups) -> None:
    """Check that a recipe that draws group by group does so with its own draw.

    Raises:
        TypeError: the recipe has its own `draw`, but `by_group` is the default, which would replace it.
    """
    if draw is not draw_rollouts and by_group is draw_groups:
        raise TypeError(
            "with trainer.late_groups.window above 1, batches are drawn group by group, and the recipe's draw isn't "
            "called; pass draw_groups, which does the same, to AheadQueue (or grpo.train), or set "
            "takes_late_groups=False in the recipe's SPEC"
        )


def draw_rollouts(session: Session, step: StepContext) -> Batch:
    """Generate the responses of one step; their rewards are computed in the background."""
    prompts = draw_prompts(session, step)
    rewards = PendingRewards(session.scorers)
    with engines_awake(session, step), rewards.collecting(session.config.rollout.engine):
        rollouts = generate(session, step, prompts, rewards.submit)
    return Batch(rollouts, WithoutEngines(partial(collect_rewards, session, pending=rewards)))


def draw_groups(session: Session, step: StepContext, on_groups: Callable[[Batch], None]) -> None:
    """Generate the same responses as `draw_rollouts`, and report groups as soon as they end."""
    prompts = draw_prompts(session, step)

    def submit(part: BatchedDataDict) -> None:
        # Rewards come in the order of row ids; groups of a part come in the order in which they ended.
        rows = part.select(np.argsort(part.row_ids))
        rewards = PendingRewards(session.scorers)
        rewards.submit(rows)
        on_groups(Batch(rows, partial(collect_rewards, session, pending=rewards)))

    with engines_awake(session, step):
        generate(session, step, prompts, submit)


def as_scored(step: StepContext, rollouts: BatchedDataDict) -> BatchedDataDict:
    """Return rollouts that already have rewards."""
    return rollouts

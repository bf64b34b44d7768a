"""The result of a reward function on one row: a finite number, or the reason why there is none."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

# Larger rewards would overflow to infinity in the batch's float32 column.
MAX_REWARD = 3.4028234663852886e38

Problem = Literal["none", "nan", "infinite", "timeout", "error", "killed", "invalid"]
PROBLEMS: tuple[Problem, ...] = get_args(Problem)
# Problems that count as a failure of the function; `none`, `nan` and `infinite` are values that it returned.
FAILURES: tuple[Problem, ...] = ("timeout", "error", "killed", "invalid")
# Ends the detail of rows that were skipped.
SKIPPED = "because too many rows failed before"


@dataclass(frozen=True)
class RewardResult:
    """The result of a reward function on one row.

    Attributes:
        value: the reward; 0 if there is a problem.
        problem: why the row has no usable reward. `none`, `nan` and `infinite`: the function returned that; `timeout`:
            it took too long; `error`: it raised; `killed`: its process died; `invalid`: it returned something that is
            not a number, or not one per row.
        detail: what happened, for failures.
    """

    value: float = 0.0
    problem: Problem | None = None
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether the function failed on the row."""
        return self.problem in FAILURES


def parse_reward(reward: object) -> RewardResult:
    """Convert what a function returned for one row; True and False are 1 and 0.

    >>> parse_reward(True), parse_reward(float("nan")).problem, parse_reward("1").detail
    (RewardResult(value=1.0, problem=None, detail=''), 'nan', 'gave a str; a reward is a number or None')
    """
    if reward is None:
        return RewardResult(problem="none")
    if not isinstance(reward, Real) and not _is_numpy_bool(reward):
        return RewardResult(problem="invalid", detail=f"gave a {type(reward).__name__}; a reward is a number or None")
    try:
        value = float(reward)  # pyright: ignore[reportArgumentType]
    except OverflowError:  # an int beyond float64
        return RewardResult(problem="infinite")
    if math.isnan(value):
        return RewardResult(problem="nan")
    return RewardResult(problem="infinite") if abs(value) > MAX_REWARD else RewardResult(value)


def parse_rewards(rewards: object, num_rows: int) -> list[RewardResult]:
    """Convert what a batched function returned for `num_rows` rows.

    >>> parse_rewards([1.0], 2)[0].detail
    'returned 1 rewards for 2 rows; return one per row'
    """
    if not isinstance(rewards, list | tuple) and not _is_numpy_array(rewards):
        detail = f"returned a {type(rewards).__name__}; return a list of numbers"
        return [RewardResult(problem="invalid", detail=detail)] * num_rows
    sequence: Sequence[Any] = rewards  # pyright: ignore[reportAssignmentType]
    if len(sequence) != num_rows:
        detail = f"returned {len(sequence)} rewards for {num_rows} rows; return one per row"
        return [RewardResult(problem="invalid", detail=detail)] * num_rows
    return [parse_reward(reward) for reward in sequence]


# NumPy types are checked only if the function imported NumPy; importing it here would slow down every process.
def _is_numpy_bool(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.bool_)


def _is_numpy_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)

"""What a reward function's word on a row is: a number that can be trained on, or the reason why there is none."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

# Beyond float32 a reward would become infinite on its way into the batch.
LARGEST = 3.4028234663852886e38

Problem = Literal["none", "nan", "infinite", "timeout", "error", "killed", "invalid"]
PROBLEMS: tuple[Problem, ...] = get_args(Problem)
# What is said of rows that were not begun any more.
GIVEN_UP = "because too many rows failed before"
# Rows that the function failed on; the first three it was right to say.
FAILURES: tuple[Problem, ...] = ("timeout", "error", "killed", "invalid")


@dataclass(frozen=True)
class Verdict:
    """The word on one row.

    Attributes:
        value: the reward; 0 where there is a problem.
        problem: why the row has no usable reward. `none`, `nan` and `infinite`: it is what the function returned;
            `timeout`: it took too long; `error`: it raised; `killed`: its process died; `invalid`: it returned
            something that is no number, or not one a row.
        text: what happened, of a failure.
    """

    value: float = 0.0
    problem: Problem | None = None
    text: str = ""

    @property
    def failed(self) -> bool:
        """Whether the function failed on the row."""
        return self.problem in FAILURES


def verdict_of(reward: object) -> Verdict:
    """Return what `reward`, a function's answer for one row, is worth; True and False are 1 and 0.

    >>> verdict_of(True), verdict_of(float("nan")).problem, verdict_of("1").text
    (Verdict(value=1.0, problem=None, text=''), 'nan', 'a str; a reward is a number, or None')
    """
    if reward is None:
        return Verdict(problem="none")
    if not isinstance(reward, Real) and not _is_numpys_bool(reward):
        return Verdict(problem="invalid", text=f"a {type(reward).__name__}; a reward is a number, or None")
    try:
        value = float(reward)  # pyright: ignore[reportArgumentType]
    except OverflowError:  # an int beyond float64
        return Verdict(problem="infinite")
    if math.isnan(value):
        return Verdict(problem="nan")
    return Verdict(problem="infinite") if abs(value) > LARGEST else Verdict(value)


def verdicts_of(rewards: object, rows: int) -> list[Verdict]:
    """Return what a function's answer for `rows` rows at once is worth.

    >>> verdicts_of([1.0], 2)[0].text
    'returned 1 rewards for 2 rows; return one a row'
    """
    if not isinstance(rewards, list | tuple) and not _is_numpys_array(rewards):
        text = f"returned a {type(rewards).__name__}; return a list of numbers"
        return [Verdict(problem="invalid", text=text)] * rows
    found: Sequence[Any] = rewards  # pyright: ignore[reportAssignmentType]
    if len(found) != rows:
        text = f"returned {len(found)} rewards for {rows} rows; return one a row"
        return [Verdict(problem="invalid", text=text)] * rows
    return [named(verdict_of(reward)) for reward in found]


def named(verdict: Verdict) -> Verdict:
    """Say of what is no number that the function gave it."""
    return Verdict(problem="invalid", text=f"gave {verdict.text}") if verdict.problem == "invalid" else verdict


# NumPy is looked at where the function brought it; to import it here would slow every process down.
def _is_numpys_bool(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.bool_)


def _is_numpys_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)

"""Answers that are mathematics, compared by what they mean (`math-verify`, `pip install 'rlpack[math]'`).

Its own time limits are signals, which fail off the main thread and can't end code in C; they are off here. The pool
ends a row at `reward.timeout_s`, whatever sympy is at.
"""

import logging
from functools import cache, lru_cache
from typing import Any

from rlpack.rewards.errors import RewardError

try:
    from math_verify import parse, verify
except ImportError as error:
    raise RewardError("mathematics needs math-verify; pip install 'rlpack[math]'") from error

_MARKS = ("$", r"\boxed", r"\(", r"\[")


def equivalent(completion: str, answer: object) -> float | None:
    r"""Return 1 for a completion whose final answer means the same as the dataset's, else 0.

    None for a row without an answer, or with one that is no mathematics: there is nothing to compare with.

    >>> equivalent(r"So it is $\\frac{2}{4}$.", "0.5"), equivalent(r"\\boxed{x + 1}", "x + 2")
    (1.0, 0.0)

    Args:
        completion: what the policy wrote; the answer is found in it: boxed, in LaTeX, or as the last number.
        answer: a number, or text: an expression, in LaTeX or not.
    """
    if answer is None:
        return None
    gold = _gold(str(answer))
    if not gold:
        return None
    return float(verify(list(gold), _parsed(completion), timeout_seconds=None))


@cache
def _quiet() -> None:
    """Keep the library from saying in every process that its time limits are off."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


@lru_cache(4096)
def _gold(answer: str) -> tuple[Any, ...]:
    """Return what an answer may mean; one without any sign of LaTeX around it is read as LaTeX first."""
    readings = [answer] if any(mark in answer for mark in _MARKS) else [f"${answer}$", answer]
    return next((tuple(found) for found in map(_parsed, readings) if found), ())


def _parsed(text: str) -> list[Any]:
    _quiet()
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

"""Mathematical answers, compared by value (`math-verify`, the extra `math`).

The library's own time limits are off: they use signals, which fail outside the main thread and can't interrupt C code.
The pool kills a row at `reward.timeout_s`, whatever sympy is doing.
"""

import logging
import os
from functools import cache, lru_cache
from typing import Any

from rlpack.installation import how_to_install
from rlpack.rewards.errors import RewardError

try:
    from math_verify import parse, verify
    from sympy import Expr, nsimplify
except ImportError as error:
    raise RewardError(
        f"rlpack.rewards.math needs math-verify, which is not installed; {how_to_install('math', os.environ)}"
    ) from error

_LATEX_MARKS = ("$", r"\boxed", r"\(", r"\[")


def equivalent(completion: str, answer: object) -> float | None:
    r"""Return 1 if the final answer is equivalent to the dataset's, else 0.

    Rows without an answer, or whose answer can't be parsed as mathematics, get None.

    >>> equivalent(r"So it is $\\frac{2}{4}$.", "0.5"), equivalent(r"\\boxed{x + 1}", "x + 2")
    (1.0, 0.0)

    Args:
        completion: the policy's response; its answer is boxed, in LaTeX, or the last number.
        answer: a number, or an expression as text, in LaTeX or not.
    """
    if answer is None:
        return None
    expected = _parse_answer(str(answer))
    if not expected:
        return None
    return float(verify(list(expected), _parse(completion), timeout_seconds=None))


def final_answer_text(completion: str) -> str | None:
    r"""Return the final answer of a completion as text, None if there is none; decimal numbers become fractions.

    >>> final_answer_text(r"So it is $\\frac{2}{4}$."), final_answer_text("It is 0.5."), final_answer_text("It is not.")
    ('1/2', '1/2', None)
    """
    parsed = _parse(completion)
    if not parsed:
        return None
    answer = parsed[0]
    return str(nsimplify(answer, rational=True) if isinstance(answer, Expr) else answer)


@cache
def _silence_library() -> None:
    """Suppress the library's warning, in every process, that its time limits are off."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


@lru_cache(4096)
def _parse_answer(answer: str) -> tuple[Any, ...]:
    """Return the parsed answer; text without LaTeX delimiters is tried as LaTeX first."""
    readings = [answer] if any(mark in answer for mark in _LATEX_MARKS) else [f"${answer}$", answer]
    return next((tuple(parsed) for parsed in map(_parse, readings) if parsed), ())


def _parse(text: str) -> list[Any]:
    _silence_library()
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

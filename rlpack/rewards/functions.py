"""Verifiable rewards that come with rlpack.

A reward function takes `prompts` and `completions` (texts, one a row), the dataset's columns by name, and the
keyword arguments of `reward.arguments`. It returns one number a row, or None where there is nothing to judge by.
"""

from collections.abc import Sequence


def final_answer(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[object], *, marker: str = "#"
) -> list[float | None]:
    """Return 1 for each completion whose text after its last `marker` is the answer, else 0.

    Space around either doesn't count. A completion without the marker gives 0, a row without an answer None.

    >>> final_answer(["a1b2="] * 3, ["a11b23#3", "a11b24#4", "3"], ["3", "3", "3"])
    [1.0, 0.0, 0.0]

    Args:
        prompts: not looked at.
        completions: what the policy wrote.
        answer: the dataset's answers; numbers are compared as they print.
        marker: what stands before the answer.
    """
    return [_score(text.rpartition(marker), target) for text, target in zip(completions, answer, strict=True)]


def exact_match(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[object]) -> list[float | None]:
    """Return 1 for each completion that is the answer and nothing else, else 0; None for a row without an answer.

    >>> exact_match(["1+1="] * 2, [" 2", "22"], [2, 2])
    [1.0, 0.0]

    Args:
        prompts: not looked at.
        completions: what the policy wrote; space around it doesn't count.
        answer: the dataset's answers; numbers are compared as they print.
    """
    return [_score(("", "whole", text), target) for text, target in zip(completions, answer, strict=True)]


def _score(parts: tuple[str, str, str], target: object) -> float | None:
    """Compare the last of `parts` with the answer; the middle one is empty when there was no marker."""
    if target is None:
        return None
    _, marker, text = parts
    return float(bool(marker) and text.strip() == str(target).strip())

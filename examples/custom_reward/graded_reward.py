"""A graded reward: 1 for a correct answer, less for an incorrect one in the right format, else 0."""

import re
from collections.abc import Sequence


def score(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str | None], *, form: float = 0.1
) -> list[float | None]:
    """Return one reward per row; rows without an answer get None and are not trained on.

    >>> score(["a1b2="] * 3, ["a11b23#3", "a11b24#4", "abc"], ["3"] * 3)
    [1.0, 0.1, 0.0]

    Args:
        prompts: unused.
        completions: the policy's responses, whose answer is the number at the end, after `#`.
        answer: the dataset's answers.
        form: the reward of an incorrect answer in the right format.
    """
    return [_grade(text, expected, form) for text, expected in zip(completions, answer, strict=True)]


def _grade(text: str, expected: str | None, form: float) -> float | None:
    if expected is None:
        return None
    match = re.search(r"#(\d+)$", text.strip())
    if match is None:
        return 0.0
    return 1.0 if match[1] == str(expected) else form

"""A reward with a part for the form: 1 for a right answer, a little for a wrong one that could be read, else 0."""

import re
from collections.abc import Sequence


def score(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str | None], *, form: float = 0.1
) -> list[float | None]:
    """Return one reward a row; None, where there is no answer to compare with, takes the row out of training.

    >>> score(["a1b2="] * 3, ["a11b23#3", "a11b24#4", "abc"], ["3"] * 3)
    [1.0, 0.1, 0.0]

    Args:
        prompts: not looked at.
        completions: what the policy wrote; its answer is the number at the end, after `#`.
        answer: the dataset's answers.
        form: the reward of an answer that is wrong.
    """
    return [_graded(text, right, form) for text, right in zip(completions, answer, strict=True)]


def _graded(text: str, right: str | None, form: float) -> float | None:
    if right is None:
        return None
    found = re.search(r"#(\d+)$", text.strip())
    if found is None:
        return 0.0
    return 1.0 if found[1] == str(right) else form

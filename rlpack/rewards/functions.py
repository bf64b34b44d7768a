"""Verifiable rewards that come with rlpack; mathematics and programs have files of their own.

A reward function names in its signature what it wants of a row (`rlpack.rewards.signatures`): its texts, the dataset's
columns, and the keyword arguments of `reward.arguments`. It returns a number, or None where there is nothing to judge
by.
"""

import re
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


def matches(completion: str, *, pattern: str, whole: bool = False) -> float:
    """Return 1 for a completion in which the regular expression is found, else 0.

    A dot matches a line's end, too. An expression that backtracks for ever is ended at `reward.timeout_s`.

    >>> matches("so it is 42.", pattern="[0-9]+"), matches("so it is 42.", pattern="[0-9]+", whole=True)
    (1.0, 0.0)

    Args:
        completion: what the policy wrote.
        pattern: of Python's `re`.
        whole: whether it has to match the whole completion.
    """
    search = re.fullmatch if whole else re.search
    return float(search(pattern, completion, re.DOTALL) is not None)


def extracted_answer(completion: str, answer: object, *, pattern: str) -> float | None:
    """Return 1 where what the expression's last match holds is the answer, else 0; None for a row without an answer.

    >>> extracted_answer("<answer>3</answer> <answer> 4 </answer>", 4, pattern="<answer>(.*?)</answer>")
    1.0

    Args:
        completion: what the policy wrote.
        answer: the dataset's; numbers are compared as they print, and space around either doesn't count.
        pattern: of Python's `re`; its first group is compared, or all of the match where it has none.
    """
    if answer is None:
        return None
    found = list(re.finditer(pattern, completion, re.DOTALL))
    if not found:
        return 0.0
    text = found[-1].group(1 if found[-1].re.groups else 0) or ""
    return float(text.strip() == str(answer).strip())


def has_format(completion: str, *, tags: Sequence[str] = ("think", "answer")) -> float:
    """Return 1 for a completion that is these sections in this order, each once, and nothing between; else 0.

    >>> has_format("<think>3 + 4</think> <answer>7</answer>"), has_format("<answer>7</answer>")
    (1.0, 0.0)

    Args:
        completion: what the policy wrote; space around sections doesn't count.
        tags: names of the sections, each written as `<name>…</name>`.
    """
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if any(completion.count(mark) != 1 for mark in marks):
        return 0.0
    places = [completion.index(mark) for mark in marks]
    if places != sorted(places):
        return 0.0
    ends = zip(places[1::2], marks[1::2], strict=True)
    between = [
        completion[end + len(mark) : start] for (end, mark), start in zip(ends, [*places[2::2], None], strict=True)
    ]
    outside = [completion[: places[0]], *between]
    return float(not any(text.strip() for text in outside))


def _score(parts: tuple[str, str, str], target: object) -> float | None:
    """Compare the last of `parts` with the answer; the middle one is empty when there was no marker."""
    if target is None:
        return None
    _, marker, text = parts
    return float(bool(marker) and text.strip() == str(target).strip())

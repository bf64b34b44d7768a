"""Built-in verifiable rewards on plain text; mathematics and code have their own modules.

The signature of a reward function names the values that it reads (`rlpack.rewards.signatures`): the row's texts,
dataset columns, and the keyword arguments in `reward.arguments`. The function returns a number, or None if the row
can't be scored.
"""

import re
from collections.abc import Sequence


def final_answer(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[object], *, marker: str = "#"
) -> list[float | None]:
    """Return 1 where the text after the last `marker` is the answer.

    All other completions get 0, including those without the marker; rows without an answer get None. Surrounding
    whitespace is ignored.

    >>> final_answer(["a1b2="] * 3, ["a11b23#3", "a11b24#4", "3"], ["3", "3", "3"])
    [1.0, 0.0, 0.0]

    Args:
        prompts: unused.
        completions: the policy's responses.
        answer: the dataset's answers; numbers are compared as printed.
        marker: text that precedes the answer.
    """
    return [_score_after(text, marker, target) for text, target in zip(completions, answer, strict=True)]


def exact_match(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[object]) -> list[float | None]:
    """Return 1 for each completion that equals the answer, else 0.

    Rows without an answer get None. Surrounding whitespace is ignored.

    >>> exact_match(["1+1="] * 2, [" 2", "22"], [2, 2])
    [1.0, 0.0]

    Args:
        prompts: unused.
        completions: the policy's responses.
        answer: the dataset's answers; numbers are compared as printed.
    """
    return [_score(text, target) for text, target in zip(completions, answer, strict=True)]


def matches(completion: str, *, pattern: str, whole: bool = False) -> float:
    """Return 1 if the regular expression matches in the completion, else 0.

    A dot also matches line breaks. Catastrophic backtracking ends at `reward.timeout_s`.

    >>> matches("so it is 42.", pattern="[0-9]+"), matches("so it is 42.", pattern="[0-9]+", whole=True)
    (1.0, 0.0)

    Args:
        completion: the policy's response.
        pattern: a regular expression of Python's `re`.
        whole: require that it matches the whole completion.
    """
    search = re.fullmatch if whole else re.search
    return float(search(pattern, completion, re.DOTALL) is not None)


def extracted_answer(completion: str, answer: object, *, pattern: str) -> float | None:
    """Return 1 if the last match of `pattern` holds the answer, else 0.

    Rows without an answer get None. Surrounding whitespace is ignored.

    >>> extracted_answer("<answer>3</answer> <answer> 4 </answer>", 4, pattern="<answer>(.*?)</answer>")
    1.0

    Args:
        completion: the policy's response.
        answer: the dataset's answer; numbers are compared as printed.
        pattern: a regular expression of Python's `re`. Its first group is compared, or the whole match if it has none.
    """
    if answer is None:
        return None
    occurrences = list(re.finditer(pattern, completion, re.DOTALL))
    if not occurrences:
        return 0.0
    last = occurrences[-1]
    return _score(last.group(1 if last.re.groups else 0) or "", answer)


def has_format(completion: str, *, tags: str | Sequence[str] = ("think", "answer"), is_opened: bool = False) -> float:
    """Return 1 if the completion consists of these sections, else 0.

    A section has to occur exactly once, with only whitespace around and between sections.

    >>> has_format("<think>3 + 4</think> <answer>7</answer>"), has_format("<answer>7</answer>")
    (1.0, 0.0)
    >>> has_format("3 + 4</think> <answer>7</answer>", is_opened=True)
    1.0

    Args:
        completion: the policy's response.
        tags: names of the sections, each written as `<name>…</name>`; a text is one name.
        is_opened: whether prompts end with the opening mark of the first section, as some chat templates write it.
    """
    tags = [tags] if isinstance(tags, str) else tags
    if is_opened and tags:
        completion = f"<{tags[0]}>{completion}"
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if any(completion.count(mark) != 1 for mark in marks):
        return 0.0
    starts = [completion.index(mark) for mark in marks]
    if starts != sorted(starts):
        return 0.0
    closings = zip(starts[1::2], marks[1::2], strict=True)
    after = [
        completion[start + len(mark) : following]
        for (start, mark), following in zip(closings, [*starts[2::2], None], strict=True)
    ]
    outside = [completion[: starts[0]], *after]
    return float(not any(text.strip() for text in outside))


def _score_after(completion: str, marker: str, target: object) -> float | None:
    """Score the text after the last marker; 0 without a marker."""
    if target is not None and marker not in completion:
        return 0.0
    return _score(completion.rpartition(marker)[2], target)


def _score(text: str, target: object) -> float | None:
    """Return whether a text is the answer, None without an answer."""
    return None if target is None else float(text.strip() == str(target).strip())

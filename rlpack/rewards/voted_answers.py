"""The answers that majority votes count: a response's answer as its reward function reads it, or its exact text.

A reward function that compares an answer defines what a response's answer is. The built-in ones of that kind are listed
here; no other function says where in a response its answer is.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AnswerReader:
    """How the answer is read from a response.

    Attributes:
        description: completes "majority vote by …".
        read: maps a response to its answer, None if it has none. Call it only for responses with a reward: the reward
            function has searched these for the answer within its deadline, and `read` does little more than that.
        is_extracted: whether the answer is what a reward function reads, rather than the exact text.
    """

    description: str
    read: Callable[[str], str | None]
    is_extracted: bool = True


@dataclass(frozen=True)
class Vote:
    """The winners of a majority vote.

    Attributes:
        answers: the answers with the most votes; several if they tie, none if no response has an answer.
        rows: indices of the responses that gave one of them; of all responses if none has an answer.
    """

    answers: tuple[str, ...]
    rows: tuple[int, ...]


def answer_reader(functions: Iterable[tuple[str, Mapping[str, Any]]]) -> AnswerReader:
    """Return the reader of the first function that defines answers; exact texts if there is none.

    >>> reader = answer_reader([("rlpack.rewards.functions:final_answer", {"marker": "="})])
    >>> reader.read("1+1=2, or 2 = 2 "), reader.read("two"), answer_reader([]).description
    ('2', None, 'exact text')

    Args:
        functions: targets of the reward functions and their arguments.
    """
    for target, arguments in functions:
        if target in _READERS:
            return _READERS[target](target, arguments)
    return AnswerReader("exact text", str, is_extracted=False)


def majority(answers: Sequence[str | None]) -> Vote:
    """Return the result of a vote of one prompt's responses; those without an answer abstain.

    >>> majority(["4", None, "5", "4"])
    Vote(answers=('4',), rows=(0, 3))
    >>> majority(["4", None, "5"]).answers, majority([None, None])
    (('4', '5'), Vote(answers=(), rows=(0, 1)))
    """
    voters: dict[str, list[int]] = {}
    for row, answer in enumerate(answers):
        if answer is not None:
            voters.setdefault(answer, []).append(row)
    if not voters:
        return Vote((), tuple(range(len(answers))))
    most = max(map(len, voters.values()))
    winners = {answer: rows for answer, rows in voters.items() if len(rows) == most}
    return Vote(tuple(winners), tuple(sorted(row for rows in winners.values() for row in rows)))


def _after(text: str, marker: str) -> str | None:
    """Return the text after the last marker, as `final_answer` compares it."""
    return text.rpartition(marker)[2].strip() if marker in text else None


def _last_match(text: str, pattern: str) -> str | None:
    """Return the last match of a pattern, as `extracted_answer` compares it."""
    occurrences = list(re.finditer(pattern, text, re.DOTALL))
    if not occurrences:
        return None
    last = occurrences[-1]
    return (last.group(1 if last.re.groups else 0) or "").strip()


def _final_answer(target: str, arguments: Mapping[str, Any]) -> AnswerReader:
    marker = str(arguments.get("marker", "#"))
    return AnswerReader(f"the text after the last {marker!r} ({target})", lambda text: _after(text, marker))


def _exact_match(target: str, arguments: Mapping[str, Any]) -> AnswerReader:
    del arguments
    return AnswerReader(f"the text without surrounding whitespace ({target})", str.strip)


def _extracted_answer(target: str, arguments: Mapping[str, Any]) -> AnswerReader:
    pattern = str(arguments["pattern"])
    return AnswerReader(f"the last match of {pattern!r} ({target})", lambda text: _last_match(text, pattern))


def _equivalent(target: str, arguments: Mapping[str, Any]) -> AnswerReader:
    from rlpack.rewards.math import final_answer_text  # imports sympy

    del arguments
    return AnswerReader(f"the final answer as mathematics ({target})", final_answer_text)


_READERS: Mapping[str, Callable[[str, Mapping[str, Any]], AnswerReader]] = {
    "rlpack.rewards.functions:final_answer": _final_answer,
    "rlpack.rewards.functions:exact_match": _exact_match,
    "rlpack.rewards.functions:extracted_answer": _extracted_answer,
    "rlpack.rewards.math:equivalent": _equivalent,
}

"""Text for people: untrusted text (models, dataset rows) made safe to print, and number formats."""

import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

# Held-out rewards that are neither 0 nor 1.
GRADED_REWARDS = "evaluation/graded_rewards"
_MEAN_REWARD = "evaluation/reward_"
# Newline and tab become visible symbols; other control and format characters become escapes.
_SYMBOLS = {"\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    r"""Escape characters that could control a terminal or mislead a reader.

    Control characters (C0, C1, so every escape sequence), format characters (bidirectional overrides, zero-width
    joiners), surrogates, private-use characters and line separators become `\x1b`-like escapes; newlines and tabs
    become symbols. The result is printable and has no line break. It still has to be escaped for HTML.

    >>> visible("a\x1b[2Jb\nc")
    'a\\x1b[2Jb⏎c'
    """
    return "".join(_SYMBOLS.get(character) or _escape(character) for character in text)


def shortened(text: str, limit: int) -> str:
    """Shorten `text` to at most `limit` characters.

    The cut is in the middle, and says how many characters are missing.

    >>> shortened("0123456789" * 10, 40)
    '01234567 … 84 characters … 23456789'
    """
    if len(text) <= limit:
        return text
    half = max(1, (limit - 24) // 2)
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def are_accuracies(records: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the held-out mean rewards of records are accuracies: every reward was 0 or 1.

    >>> are_accuracies([{"evaluation/reward_greedy": 0.5, "evaluation/graded_rewards": 0.0}, {"reward/mean": 3.0}])
    True
    >>> are_accuracies([{"evaluation/reward_greedy": 0.5, "evaluation/graded_rewards": 2.0}])
    False
    """
    counts = [record.get(GRADED_REWARDS) for record in records if any(name.startswith(_MEAN_REWARD) for name in record)]
    return bool(counts) and not any(count is None or count > 0 for count in counts)


def mean_reward_format(*, is_accuracy: bool) -> str:
    """Return the format of held-out mean rewards: percent for accuracies, else decimal."""
    return "{:.1%}" if is_accuracy else "{:.3f}"


def _escape(character: str) -> str:
    """Return a character, or its escape if it isn't printable."""
    if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}:
        return character.encode("unicode_escape").decode("ascii")
    return character

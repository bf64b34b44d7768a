"""Text for people: untrusted text (models, dataset rows) made safe to print, and number formats."""

import unicodedata
from collections.abc import Iterable

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


def reward_format(rewards: Iterable[float]) -> str:
    """Return the format of mean rewards.

    Percent if all are between 0 and 1, else decimal.

    >>> reward_format([0.5, 1.0]).format(0.5), reward_format([0.5, 7.25]).format(0.5)
    ('50.0%', '0.500')
    """
    return "{:.1%}" if all(0 <= reward <= 1 for reward in rewards) else "{:.3f}"


def _escape(character: str) -> str:
    """Return a character, or its escape if it isn't printable."""
    if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}:
        return character.encode("unicode_escape").decode("ascii")
    return character

"""Text that others wrote (models, dataset rows), made safe to show."""

import unicodedata

# Format characters that reorder or hide what a reader sees; tab and newline are shown by signs of their own.
_SIGNS = {"\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    r"""Return `text` with every character that could steer a terminal or mislead a reader written out.

    Control characters (C0, C1, so every escape sequence), format characters (bidirectional overrides, zero-width
    joiners), surrogates, private-use characters and line separators become `\x1b`-like escapes; newlines and tabs
    become signs. What is left is printable and has no line break. The result still has to be escaped for HTML.

    >>> visible("a\x1b[2Jb\nc")
    'a\\x1b[2Jb⏎c'
    """
    return "".join(_SIGNS.get(character) or _shown(character) for character in text)


def shortened(text: str, limit: int) -> str:
    """Return at most `limit` characters of `text`; a cut in the middle says how much is missing.

    >>> shortened("0123456789" * 10, 40)
    '01234567 … 84 characters … 23456789'
    """
    if len(text) <= limit:
        return text
    half = max(1, (limit - 24) // 2)
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def _shown(character: str) -> str:
    """Return a character, or its escape if it isn't plainly printable."""
    if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}:
        return character.encode("unicode_escape").decode("ascii")
    return character

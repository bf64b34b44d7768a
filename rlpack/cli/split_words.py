"""Words of a command line that a shell split off an override at its spaces."""

from collections.abc import Sequence

_OPENING, _CLOSING = "[{(", "]})"


def not_an_override(arguments: Sequence[str], index: int, example: str) -> str:
    """Return the message for a word that is no override.

    Args:
        arguments: the words of the command.
        index: of the word.
        example: an override, for a word that isn't part of one.

    >>> not_an_override(["trainer.steps", "=", "5"], 0, "seed=1")
    "'trainer.steps' is not an override; write trainer.steps=5, without spaces"
    >>> not_an_override(["a.b=[3,", "4]"], 1, "seed=1")
    "'4]' is not an override; a value with spaces needs quotes, in a shell as 'a.b=[3, 4]'"
    """
    return f"{arguments[index]!r} is not an override; {_way_out(arguments, index, example)}"


def _way_out(arguments: Sequence[str], index: int, example: str) -> str:
    word, before, after = arguments[index], arguments[index - 1] if index else "", list(arguments[index + 1 :])
    value = "".join(after[:2]) if after[:1] == ["="] else after[0] if after else ""
    if value[:1] == "=" and value != "=":
        return f"write {word}{value}, without spaces"
    if before[-1:] == "=" and before != "=":
        return f"write {before}{word}, without spaces"
    if _num_open(before) > 0:
        parts = [before, word]
        while after and _num_open(" ".join(parts)) > 0:
            parts.append(after.pop(0))
        whole = " ".join(parts)
        if _num_open(whole) == 0 and "'" not in whole:
            return f"a value with spaces needs quotes, in a shell as '{whole}'"
    return f"write key=value, such as {example}"


def _num_open(text: str) -> int:
    """Return the number of brackets that are opened and not closed."""
    return sum(map(text.count, _OPENING)) - sum(map(text.count, _CLOSING))

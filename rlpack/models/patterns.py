"""Shell-style patterns over names of weights and modules: `*` (dots included), `?` and `[0-3]`."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from rlpack.models.errors import ModelError

_SHOWN = 3


def match_patterns(patterns: Sequence[str], names: Iterable[str], key: str) -> set[str]:
    """Return the names that match any of the patterns.

    Args:
        patterns: each must match at least one name.
        names: all names.
        key: configuration key of the patterns, for the error.

    Raises:
        ModelError: a pattern matches no name; the message lists the nearest names.

    >>> sorted(match_patterns(["*.bias", "head*"], ["body.weight", "body.bias", "head.weight"], "frozen"))
    ['body.bias', 'head.weight']
    """
    names = list(names)
    matched: set[str] = set()
    for pattern in patterns:
        matching = {name for name in names if fnmatchcase(name, pattern)}
        if not matching:
            raise ModelError(
                f"{key} contains {pattern!r}, which matches no name; the nearest are "
                f"{', '.join(_nearest(pattern, names))}; a pattern matches a whole name, and * matches any text"
            )
        matched |= matching
    return matched


def _nearest(pattern: str, names: list[str]) -> list[str]:
    """Return the names most similar to a pattern, one per kind of layer; the first names if none is similar."""
    kinds = {re.sub(r"\d+", "0", name): name for name in reversed(names)}
    plain = re.sub(r"\d+|\[[^]]*\]", "0", pattern).strip("*.")
    parts = {part: name for kind, name in kinds.items() for part in (kind, *kind.split("."))}
    close = get_close_matches(plain, parts, n=_SHOWN, cutoff=0.5)
    return list(dict.fromkeys(parts[part] for part in close)) or list(kinds.values())[-_SHOWN:]

"""Patterns over names of weights and modules: a shell's, `*`, `?`, `[0-3]`, and `*` stands for dots as well."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from rlpack.models.errors import ModelError

_SHOWN = 3


def chosen(patterns: Sequence[str], names: Iterable[str], key: str) -> set[str]:
    """Return the names that any of the patterns matches.

    Args:
        patterns: each has to match something, or it is a slip.
        names: what there is.
        key: of the configuration, for the error.

    Raises:
        ModelError: a pattern matches no name; the nearest ones are given.

    >>> sorted(chosen(["*.bias", "head*"], ["body.weight", "body.bias", "head.weight"], "frozen"))
    ['body.bias', 'head.weight']
    """
    names = list(names)
    found: set[str] = set()
    for pattern in patterns:
        matching = {name for name in names if fnmatchcase(name, pattern)}
        if not matching:
            raise ModelError(
                f"{key} holds {pattern!r}, which matches none of {len(names)} names; near it are "
                f"{', '.join(_near(pattern, names))}; a pattern is a whole name, in which * stands for any text"
            )
        found |= matching
    return found


def _near(pattern: str, names: list[str]) -> list[str]:
    """Return the names most like a pattern, or the first ones, one of each kind where layers repeat them."""
    kinds = {re.sub(r"\d+", "0", name): name for name in reversed(names)}
    plain = re.sub(r"\d+|\[[^]]*\]", "0", pattern).strip("*.")
    parts = {part: name for kind, name in kinds.items() for part in (kind, *kind.split("."))}
    close = get_close_matches(plain, parts, n=_SHOWN, cutoff=0.5)
    return list(dict.fromkeys(parts[part] for part in close)) or list(kinds.values())[-_SHOWN:]

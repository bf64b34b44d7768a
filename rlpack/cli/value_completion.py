"""Shell completion of values: the choices of a key. Hydra itself offers only a key's current value."""

import inspect
from collections.abc import Sequence
from enum import Enum
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from rlpack.config.compose import PRESETS
from rlpack.config.errors import ConfigError
from rlpack.config.keys import ROOT, Key, find, root_key
from rlpack.config.recipe_targets import recipe_targets
from rlpack.config.recipes import sweep_class
from rlpack.config.sections.section import options


def value_completions(word: str, earlier: Sequence[str]) -> list[str]:
    """Return the words that complete `key=…`, or none if the key has no fixed choices.

    Args:
        word: the word before the cursor.
        earlier: the overrides before it, which choose the recipe.

    >>> value_completions("batching.mode=", [])
    ['batching.mode=packed', 'batching.mode=dynamic', 'batching.mode=fixed']
    """
    path, equals, prefix = word.partition("=")
    key = find(path.lstrip("+"), _root(earlier)) if equals and path else None
    choices = [choice for option in options(key.annotation) for choice in _choices(option)] if key else []
    if choices == ["null"]:  # any value is allowed
        return []
    return [f"{path}={choice}" for choice in choices if choice.startswith(prefix)]


def _choices(option: Any) -> list[str]:
    """Return all values of a type, as users write them; none if the type has no fixed choices."""
    if option is bool:
        return ["true", "false"]
    if option is NoneType:
        return ["null"]
    if get_origin(option) is Literal:
        return [str(value) for value in get_args(option)]
    if inspect.isclass(option) and issubclass(option, Enum):
        return [str(member.value) for member in option]
    return []


def _root(overrides: Sequence[str]) -> Key:
    """Return the root of the keys of the chosen recipes; those that all recipes share if one can't be loaded."""
    try:
        targets = recipe_targets(overrides, [PRESETS])
        return root_key(sweep_class(targets)) if targets else ROOT
    except ConfigError:
        return ROOT

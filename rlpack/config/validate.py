"""Validate a composed config against the schema and its rules.

Invariant: `validate` either returns a `Config` that satisfies every rule, or raises one `ConfigError` that lists all
problems of that stage, each with the given value, what is allowed and the key to change.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from enum import Enum
from types import NoneType
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlpack.config.errors import ConfigError, to_config_error
from rlpack.config.foreign_names import foreign_answer
from rlpack.config.keys import Key, children, find, how_to_set, root_key, unknown_key_problem
from rlpack.config.recipes import config_class, find_recipe
from rlpack.config.rules import broken_rules
from rlpack.config.schema import Config, Recipe
from rlpack.config.sections.section import options
from rlpack.user_code import UserCode

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list, such as [1,2]",
    "dict_type": "a mapping of names to values",
}
_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument", "invalid_key"}
_LONGEST_SHOWN = 80
# Larger floats aren't written digit by digit, and may stand for another integer.
_LARGEST_EXACT = 2**53


def validate(composed: Mapping[str, Any]) -> Config:
    """Return the config that a plain nested mapping describes; missing keys have the schema's defaults.

    Raises:
        ConfigError: an unknown key, a missing or wrong value, or a broken rule across keys.

    >>> validate({"model": {"config": {"model_type": "qwen2"}}, "seed": 7}).seed
    7
    """
    target = target_of(composed)
    kind = config_class(target)
    root = root_key(kind)
    if problems := list(_ignored_unknown_keys(target, root)):
        raise ConfigError(problems)
    try:
        with UserCode(f"recipe.target is {target!r}, and its config section", to_config_error):
            config = kind.model_validate(dict(composed))
    except ValidationError as error:
        errors = _without_members(error.errors(include_url=False), root)
        raise ConfigError([problem for details in errors for problem in _problems(details, root)]) from None
    if problems := broken_rules(config):
        raise ConfigError(problems)
    return config


def _ignored_unknown_keys(target: str, root: Key) -> Iterator[str]:
    """Yield a problem for each name in a recipe's `ignores` that is not a key: it would have no effect."""
    for path in find_recipe(target).ignores:
        if find(path, root) is None:
            yield f"recipe.target is {target!r}, whose RecipeSpec.ignores has {unknown_key_problem(path, root)}"


def target_of(composed: Mapping[str, Any]) -> str:
    """Return the `recipe.target` of a plain nested mapping; the default's if it has none, or one of the wrong type."""
    recipe = composed.get("recipe")
    target = recipe.get("target") if isinstance(recipe, Mapping) else None
    return target if isinstance(target, str) else Recipe().target


def _without_members(errors: Iterable[ErrorDetails], root: Key) -> Iterator[ErrorDetails]:
    """Yield errors with the locations of keys, those of a value that fits no member of a union only once.

    Pydantic has an error for each member, whose name it adds to the location. An error within a value, such as that of
    an item of a list, comes from the member that is meant.
    """
    by_place: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for details in errors:
        place, within = _split_at_union(details["loc"], root)
        by_place.setdefault(place, []).append({**details, "loc": (*place, *within)})
    for place, found in by_place.items():
        yield from [details for details in found if details["loc"] != place] or found[:1]


def _split_at_union(location: tuple[int | str, ...], root: Key) -> tuple[tuple[int | str, ...], tuple[int | str, ...]]:
    """Return the location of a union, and the rest without the name of its member; without a union, all and none."""
    key = root
    for depth, part in enumerate(location, 1):
        any_name = Key(key.path, get_args(key.annotation)[1]) if key.is_open else None
        below = children(key).get(str(part), any_name)
        if below is None:
            break
        key = below
        if len(set(options(key.annotation)) - {NoneType}) > 1:
            return location[:depth], location[depth + 1 :]
    return location, ()


def _problems(details: ErrorDetails, root: Key) -> Iterator[str]:
    """Yield messages for an error of pydantic."""
    path = ".".join(str(part) for part in details["loc"])
    if details["type"] in _UNKNOWN and find(path, root) is not None:
        section, _, name = path.rpartition(".")
        yield f"{path} is one name with dots; in a YAML file, write {name} on a line below {section}, without dots"
    elif details["type"] in _UNKNOWN:
        yield from unknown_key_problems(path, details["input"], root)
    elif details["loc"][-1:] == ("[key]",):  # a name below a mapping
        path, name = ".".join(str(part) for part in details["loc"][:-2]), details["input"]
        yield f"{path} has the name {_show(name)}, which isn't text; write it in quotes, as '{name}'"
    else:
        yield _problem(details, root)


def unknown_key_problems(path: str, value: Any, root: Key) -> list[str]:
    """Return a message for each name of another framework in the value of a key that doesn't exist, else one for it."""
    foreign = [unknown_key_problem(leaf, root) for leaf in _leaves(path, value) if foreign_answer(leaf)]
    return foreign or [unknown_key_problem(path, root)]


def _leaves(path: str, value: Any) -> Iterator[str]:
    """Yield the dotted path of each value below a key."""
    if not isinstance(value, Mapping):
        yield path
        return
    for name, below in value.items():
        yield from _leaves(f"{path}.{name}", below)


def _problem(details: ErrorDetails, root: Key) -> str:
    kind, path = details["type"], ".".join(str(part) for part in details["loc"])
    if kind == "missing":
        return f"{path} is missing; {how_to_set(path, root)}"
    if kind == "value_error":  # raised by a section's own checks, with our text
        return str(details.get("ctx", {})["error"])
    if details["input"] is None:
        mapping = find(path.rpartition(".")[0], root) if isinstance(details["loc"][-1], str) else None
        without = f", or leave it out with ~{path}" if mapping is not None and mapping.is_open else ""
        return f"{path} can't be null; {how_to_set(path, root)}{without}"
    return f"{path} is {_show(details['input'])}; {_allowed(details, path, root)}"


def _allowed(details: ErrorDetails, path: str, root: Key) -> str:
    """Describe the values that the key allows."""
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    if kind == "int_type" and isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT:
        return f"write it as {int(value)}, without a point or an exponent"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        limit = context[name]
        return f"it has to be {words} {f'{limit:g}' if isinstance(limit, float) else limit}"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "")
        names = choices.replace(" or ", ", ").split(", ")
        nearest = get_close_matches(str(details["input"]), names, n=1)
        return (f"did you mean {nearest[0]}? " if nearest else "") + f"choose one of {', '.join(names)}"
    if choices := enum_values(path, root):
        return f"choose one of {', '.join(choices)}"
    if kind in {"model_type", "dataclass_type"}:
        return f"it is a section, not a value; set one of its keys: {', '.join(_keys_below(path, root))}"
    quoted = f"; put it in quotes, in a shell as '{path}=\"…\"'" if kind == "string_type" and _is_word(value) else ""
    return f"it has to be {_EXPECTED[kind]}{quoted}" if kind in _EXPECTED else details["msg"]


def _is_word(value: Any) -> bool:
    """Return whether a value that was read from YAML may have been meant as text."""
    return isinstance(value, bool | int | float)


def enum_values(path: str, root: Key) -> list[str]:
    """Return the values of the enums that a key may have."""
    key = find(path, root)
    kinds = (
        [kind for kind in options(key.annotation) if inspect.isclass(kind) and issubclass(kind, Enum)] if key else []
    )
    return [str(member.value) for kind in kinds for member in kind]


def _keys_below(path: str, root: Key) -> Iterator[str]:
    key = find(path, root)
    return iter(children(key)) if key else iter(())


def _show(value: Any) -> str:
    """Return the value as users write it, truncated if long."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}… ({len(text)} characters)"

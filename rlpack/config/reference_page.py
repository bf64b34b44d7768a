"""Write docs/reference/config.md from the schema: `python -m rlpack.config.reference_page`."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from rlpack.config.compose import CONFIG_NAME, PRESETS
from rlpack.config.keys import ROOT, Key, children, find, root_key
from rlpack.config.preset_files import GLOBAL
from rlpack.config.recipes import EVALUATE_TARGET, builtin_recipes, builtin_target, config_class, find_recipe
from rlpack.config.schema import Config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "config.md"

_HEAD = """\
# Configuration keys

Generated from the models in `rlpack/config/` by `python -m rlpack.config.reference_page`; don't edit it by hand.

The default is the value that `rlpack train` uses if nothing else is chosen. Where a preset in `configs/` sets it, the
preset is named, together with the value without it: `rlpack train` starts from recipe=grpo, model=tiny, data=arithmetic
and further presets, and another choice, such as recipe=ppo, brings its own values. `rlpack train --cfg job` shows the
values of a command. `<name>` is a name that you choose. Whole numbers with a minimum of 1 are at most 2147483647 unless
another maximum is given.
A section of a single recipe, such as `dapo`, exists only with that recipe; so do those of your own recipes. `evaluate`
exists only with `rlpack evaluate`.
"""
_WORDS = {int: "whole number", float: "number", bool: "true, false", str: "text", NoneType: "null"}


def render() -> str:
    """Return the page's text: the top level's table, each section's, and those of built-in recipes' own sections."""
    return "\n".join([_HEAD, *_tables()])


@functools.cache
def preset_values() -> dict[str, tuple[Any, str]]:
    """Return the keys that the presets of `rlpack train` set: the value, and the preset as `group=choice`."""
    values: dict[str, tuple[Any, str]] = {}
    for entry in yaml.safe_load((PRESETS / f"{CONFIG_NAME}.yaml").read_text(encoding="utf-8"))["defaults"]:
        if not isinstance(entry, dict):
            continue
        ((group, choice),) = entry.items()
        if choice is None or group.startswith("override "):
            continue
        for path, value in _values_of(group, choice).items():
            values[path] = (value, f"{group}={choice}")
    return values


@functools.cache
def _values_of(group: str, choice: str) -> dict[str, Any]:
    """Return the keys that a preset sets, and their values."""
    text = (PRESETS / group / f"{choice}.yaml").read_text(encoding="utf-8")
    preset = yaml.safe_load(text) or {}
    return dict(_leaves(preset if GLOBAL in text else {group: preset}))


def _is_same_in_group(path: str, group: str) -> bool:
    """Return whether every preset of a group sets a key, all to one value, so that the schema's default has no use."""
    presets = [_values_of(group, file.stem) for file in (PRESETS / group).glob("*.yaml")]
    return all(path in values and values[path] == presets[0][path] for values in presets)


def _leaves(preset: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each key that a preset sets."""
    for name, value in preset.items():
        key = find(f"{prefix}{name}")
        if key is not None and not key.is_leaf and isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def main() -> int:
    """Write the page."""
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
    return 0


def _tables() -> Iterator[str]:
    yield from _tables_below(ROOT)
    for target in (*map(builtin_target, builtin_recipes()), EVALUATE_TARGET):
        kind = config_class(target)
        for section in find_recipe(target).sections:
            yield from _tables_below(children(root_key(kind))[section])


def _tables_below(key: Key) -> Iterator[str]:
    """Yield the table of a section's values, then those of the sections below it."""
    below = list(children(key).values())
    if rows := [child for child in below if child.is_leaf]:
        yield from _table(key, rows)
    for child in below:
        if not child.is_leaf:
            yield from _tables_below(child)


def _table(section: Key, rows: list[Key]) -> Iterator[str]:
    yield f"## {f'`{section.path}`' if section.path else 'Top level'}"
    yield ""
    if section.path and section.description:
        yield section.description
        yield ""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in rows:
        yield f"| `{key.name}` | {_cell(type_text(key))} | {_default(key)} | {_cell(_meaning(key))} |"
    yield ""


def _default(key: Key) -> str:
    """Return the value that `rlpack train` uses and, where it can differ, the preset and the schema's default."""
    own = "required" if key.required else _code(_schema_default(key))
    if key.path not in preset_values():
        return own
    value, preset = preset_values()[key.path]
    used, group = _code(value), preset.partition("=")[0]
    if used == own:
        return own
    if _is_same_in_group(key.path, group):
        return f"{used} by every preset of {group}"
    return f"{used} by {preset}, else {own}"


def _schema_default(key: Key) -> Any:
    """Return a key's default; that of a section may differ from its class's, such as the critic's learning rate."""
    value: Any = Config()
    for part in key.path.split("."):
        if not isinstance(value, BaseModel) or part not in type(value).model_fields:
            return key.default
        value = dict(value)[part]
    return value


def _meaning(key: Key) -> str:
    """Return a key's description; those of a role's batching and its forward passes are inherited from `batching`."""
    is_batching = ".batching." in key.path or ".forward_batching." in key.path
    inherited = find(f"batching.{key.name}") if is_batching else None
    return key.description or (inherited.description if inherited else "")


def type_text(key: Key) -> str:
    """Return a key's type and limits for users.

    >>> from rlpack.config.keys import find
    >>> type_text(find("trainer.mini_batch_size")), type_text(find("resume"))
    ('whole number, null, >= 1', 'never, auto')
    """
    return ", ".join([*_type_words(key.annotation), *key.constraints])


def _type_words(annotation: Any) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _type_words(arguments[0])
    elif origin is Literal:
        yield from map(str, arguments)
    elif origin in {Union, UnionType}:
        for argument in arguments:
            yield from _type_words(argument)
    elif origin is tuple:
        yield f"list ({', '.join(_type_words(arguments[0]))})"
    elif origin is dict:
        yield "mapping"
    else:
        yield _WORDS[annotation]


def _as_yaml(value: Any) -> str:
    """Return a default as written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_as_yaml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_as_yaml(item) for item in value) + "]"
    return str(value).replace("\n", "\\n")


def _code(value: Any) -> str:
    """Return a value as code in a cell of a table."""
    text = _as_yaml(value).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())

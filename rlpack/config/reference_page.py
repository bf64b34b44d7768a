"""Write docs/reference/config.md from the schema: `python -m rlpack.config.reference_page`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rlpack.config.keys import ROOT, Key, children, find, root_key
from rlpack.config.recipes import builtin_recipes, builtin_target, config_class, find_recipe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "config.md"

_HEAD = """\
# Configuration keys

Generated from the models in `rlpack/config/` by `python -m rlpack.config.reference_page`; don't edit it by hand.

These are the schema's defaults. Presets in `configs/` override some of them for the built-in task;
`rlpack train --cfg job` shows the values that a command uses. `<name>` is a name that you choose.
A section of a single recipe, such as `dapo`, exists only with that recipe; so do those of your own recipes.
"""
_WORDS = {int: "whole number", float: "number", bool: "true, false", str: "text", NoneType: "null"}


def render() -> str:
    """Return the page's text: the top level's table, each section's, and those of built-in recipes' own sections."""
    return "\n".join([_HEAD, *_tables()])


def main() -> int:
    """Write the page."""
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
    return 0


def _tables() -> Iterator[str]:
    yield from _tables_below(ROOT)
    for name in builtin_recipes():
        kind = config_class(builtin_target(name))
        for section in find_recipe(builtin_target(name)).sections:
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
        default = "required" if key.required else f"`{_as_yaml(key.default)}`"
        yield f"| `{key.name}` | {_cell(type_text(key))} | {default} | {_cell(_meaning(key))} |"
    yield ""


def _meaning(key: Key) -> str:
    """Return a key's description; that of a role's batching is inherited from `batching`."""
    inherited = find(f"batching.{key.name}") if ".batching." in key.path else None
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
    return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())

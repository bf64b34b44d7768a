"""Values of free-form arguments that JSON doesn't preserve: infinities, NaN, and names that aren't text.

A run stores its configuration as JSON, in each checkpoint. `rlpack evaluate` continues with the stored values, which
have to be those that the run used. Keys of the schema's own types are converted back when they are read.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, get_args

from pydantic import BaseModel

from rlpack.config.keys import ANY_NAME, Key, children, root_key
from rlpack.config.schema import Config

# The names that lead to free-form arguments, nested; nothing is below the arguments themselves.
_Branch = Mapping[str, "_Branch"]


def json_problems(config: Config) -> Iterator[str]:
    """Yield a problem for each value below a mapping of free-form arguments that JSON doesn't preserve."""
    for path, arguments in _free_form(config, _branches(type(config)), ""):
        yield from _problems(path, arguments)


@lru_cache(maxsize=64)
def _branches(kind: type[Config]) -> _Branch:
    """Return the branches of a schema. A run's config is checked once, but a search for layouts checks thousands."""
    return _branch(root_key(kind)) or {}


def _branch(key: Key) -> _Branch | None:
    """Return the branches below a key; None if no free-form arguments are at or below it."""
    if key.is_open and get_args(key.annotation)[1] is Any:
        return {}
    below = {name: branch for name, child in children(key).items() if (branch := _branch(child)) is not None}
    return below or None


def _free_form(value: Any, branch: _Branch, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the mappings of free-form arguments at and below a value, and their dotted paths."""
    if not branch:
        yield path, value
        return
    for name, inner in (dict(value) if isinstance(value, BaseModel | Mapping) else vars(value)).items():
        child = branch.get(name, branch.get(ANY_NAME))
        if child is not None and inner is not None:
            yield from _free_form(inner, child, f"{path}.{name}" if path else name)


def _problems(path: str, value: Any) -> Iterator[str]:
    """Yield the problems of a value, and of those in it."""
    if isinstance(value, float) and not math.isfinite(value):
        yield (
            f"{path} is {value}, which a checkpoint's JSON can't hold, so `rlpack evaluate` would use another value; "
            "set a finite number, or text that your code converts"
        )
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                yield (
                    f"{path} has the name {name!r}, which a checkpoint's JSON turns into text, so `rlpack "
                    f"evaluate` would use another; write it as text ({path}.{name}=…, in YAML with quotes) and let "
                    "your code convert it"
                )
            yield from _problems(f"{path}.{name}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _problems(f"{path}[{index}]", inner)

"""Keys of the schema: iterate over them, look one up, and say what to write instead of an unknown one."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlpack.config.foreign_names import foreign_answer, foreign_answer_by_last_part
from rlpack.config.recipes import EVALUATE_TARGET, builtin_sections, find_recipe
from rlpack.config.schema import Config
from rlpack.config.sections.section import MAX_COUNT
from rlpack.config.usual_names import USUAL_NAMES

ANY_NAME = "<name>"


@dataclass(frozen=True)
class Key:
    """A key of the schema.

    Attributes:
        path: dotted path; `<name>` is a name that users choose.
        annotation: the Python type.
        default: the default value, or None for a section or where `required`.
        required: whether there is no default.
        description: meaning, on one line.
        constraints: limits as text, such as `>= 1`.
    """

    path: str
    annotation: Any
    default: Any = None
    required: bool = False
    description: str = ""
    constraints: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def is_open(self) -> bool:
        """Whether users choose the names below it."""
        return get_origin(self.annotation) is dict

    @property
    def is_section(self) -> bool:
        """Whether it holds keys of the schema."""
        return _is_section(self.annotation)

    @property
    def is_leaf(self) -> bool:
        """Whether it holds a value, free-form arguments included."""
        return not self.is_section and not (self.is_open and _is_section(get_args(self.annotation)[1]))


def root_key(kind: type[BaseModel]) -> Key:
    """Return the key that all keys of a schema are below."""
    return Key("", kind)


def walk(root: Key | None = None) -> Iterator[Key]:
    """Yield every key below `root`, parents before children, in the schema's order.

    Without a root these are the keys that all recipes share.

    >>> [key.path for key in walk() if key.path.startswith("sft_warmup")][:2]
    ['sft_warmup', 'sft_warmup.steps']
    """
    for key in children(root or ROOT).values():
        yield key
        yield from walk(key)


def children(key: Key) -> Mapping[str, Key]:
    """Return the keys directly below `key` by name; `<name>` for names that users choose, none below a value."""
    if key.is_open:
        below = get_args(key.annotation)[1]
        return {ANY_NAME: Key(_join(key.path, ANY_NAME), below)} if _is_section(below) else {}
    if not key.is_section:
        return {}
    if is_dataclass(key.annotation):
        return _dataclass_children(key)
    return dict(_section_children(key.path, key.annotation))


def find(path: str, root: Key | None = None) -> Key | None:
    """Return the key at a dotted path as a user writes it, or None if there is none.

    Every name below an open mapping is a key.

    >>> find("placement.pools.big.ranks").path, find("model.config.hidden_size").path, find("trainer.stepz")
    ('placement.pools.<name>.ranks', 'model.config', None)
    """
    key = root or ROOT
    for part in path.split("."):
        below = children(key)
        if key.is_open and not below:
            return key
        if part not in below and ANY_NAME not in below:
            return None
        key = below.get(part) or below[ANY_NAME]
    return key


def unknown_key_problem(path: str, root: Key | None = None) -> str:
    """Return the message for a key that doesn't exist: what to write instead, and the valid keys next to it.

    >>> unknown_key_problem("sft_warmup.stepz")
    'sft_warmup.stepz is not a key; did you mean sft_warmup.steps? sft_warmup has: steps, batch_size, learning_rate'
    """
    if answer := foreign_answer(path) or _argument_of_role(path):
        return f"{path} is not a key; {answer}"
    root = root or ROOT
    top = path.partition(".")[0]
    if top not in children(root) and (owner := builtin_sections().get(top)):
        return f"{path} is not a key of this recipe; {top}.* belongs to recipe={owner}"
    if top not in children(root) and top in find_recipe(EVALUATE_TARGET).sections:
        return f"{path} is not a key of rlpack train; {top}.* belongs to rlpack evaluate"
    where, unknown, below = _known_part(path, root)
    if not below:
        return f"{path} is not a key; {where} is a value and has no keys below it"
    usual, note = USUAL_NAMES.get(path, (None, ""))
    nearest = usual or _nearest(unknown[0], where, below, root)
    place, _, name = (nearest or "").rpartition(".")
    is_near = nearest is not None and len(unknown) == 1 and (place == where or name == unknown[0])
    if usual is None and nearest and unknown[1:] and find(whole := ".".join([nearest, *unknown[1:]]), root):
        nearest, is_near = whole, True
    if usual is None and not is_near and (answer := foreign_answer_by_last_part(path)):
        return f"{path} is not a key; {answer}"
    hint = f"; did you mean {nearest}?" + (f" ({note})" if note else "") if nearest else ";"
    return f"{path} is not a key{hint} {where or 'the top level'} has: {', '.join(below)}"


def _argument_of_role(path: str) -> str:
    """Return how to set an argument of a role's class that was written as a key of the role; "" for another path."""
    section, name, rest = [*path.split(".", 2), "", ""][:3]
    keys = children(children(ROOT)["roles"]).get(ANY_NAME)
    if section != "roles" or not rest or keys is None or get_close_matches(rest.partition(".")[0], children(keys)):
        return ""
    return f"arguments of a role's class are set as roles.{name}.arguments.{rest}"


def _known_part(path: str, root: Key) -> tuple[str, list[str], Mapping[str, Key]]:
    """Return the part of a path that exists, the parts that don't, and the keys below the part that does."""
    parent, parts = root, path.split(".")
    unknown = list(parts)
    while (below := children(parent)) and (unknown[0] in below or ANY_NAME in below):
        parent = below.get(unknown[0]) or below[ANY_NAME]
        unknown = unknown[1:]
    return ".".join(parts[: len(parts) - len(unknown)]), unknown, below


def how_to_set(path: str, root: Key | None = None) -> str:
    """Return how to give a value to a key that has none.

    >>> how_to_set("data.split")
    'set data.split=… (training split (Hub and generator))'
    """
    key = find(path, root)
    text = key.description.rstrip(".") if key else ""
    return f"set {path}=…" + (f" ({text[:1].lower()}{text[1:]})" if text else "")


def _nearest(name: str, where: str, below: Mapping[str, Key], root: Key) -> str | None:
    """Return the most likely key's path: one of that name below, a sibling with a similar name, or one elsewhere."""
    if where and (
        same := [key.path for key in walk(find(where, root)) if key.name == name and ANY_NAME not in key.path]
    ):
        return same[0]
    if close := get_close_matches(name, below, n=1):
        return _join(where, close[0])
    everywhere = {key.name: key.path for key in reversed(list(walk(root))) if ANY_NAME not in key.path}
    close = get_close_matches(name, everywhere, n=1, cutoff=0.8)
    return everywhere[close[0]] if close else None


@lru_cache(maxsize=1024)
def _section_children(path: str, section: type[BaseModel]) -> Mapping[str, Key]:
    return {name: _from_field(_join(path, name), info) for name, info in section.model_fields.items()}


def _is_section(annotation: Any) -> bool:
    return inspect.isclass(annotation) and (issubclass(annotation, BaseModel) or is_dataclass(annotation))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _from_field(path: str, info: FieldInfo) -> Key:
    default = info.get_default(call_default_factory=True, validated_data={})
    description = info.description or ""
    if not description and _is_section(info.annotation):
        description = (inspect.getdoc(info.annotation) or "").partition("\n")[0]
    return Key(
        path=path,
        annotation=info.annotation,
        default=None if default is PydanticUndefined else default,
        required=info.is_required(),
        description=description,
        constraints=tuple(_constraints(info)),
    )


def _constraints(info: FieldInfo) -> Iterator[str]:
    """Yield the numeric limits of a field as text, also those inside `X | None`, but not the upper limit of counts."""
    marks = list(info.metadata)
    for argument in get_args(info.annotation):
        for nested in get_args(argument)[1:]:
            marks.extend(nested.metadata if isinstance(nested, FieldInfo) else [])
    for mark in marks:
        match mark:
            case Ge(ge=limit):
                yield f">= {limit}"
            case Gt(gt=limit):
                yield f"> {limit}"
            case Le(le=limit) if limit != MAX_COUNT:
                yield f"<= {limit}"
            case Lt(lt=limit):
                yield f"< {limit}"


def _dataclass_children(key: Key) -> dict[str, Key]:
    """Return the keys of a dataclass section, described by its docstring's Attributes."""
    documentation = inspect.getdoc(key.annotation) or ""
    hints = get_type_hints(key.annotation)
    return {
        field.name: Key(
            path=_join(key.path, field.name),
            annotation=hints[field.name],
            default=None if field.default is MISSING else field.default,
            required=field.default is MISSING,
            description=_attribute_text(documentation, field.name),
        )
        for field in fields(key.annotation)
    }


def _attribute_text(documentation: str, name: str) -> str:
    """Return the text of `name` under Attributes, on one line and capitalized."""
    match = re.search(rf"^    {name}: (.*?)(?=^    \w+: |^\w|\Z)", documentation, re.DOTALL | re.MULTILINE)
    text = " ".join(match.group(1).split()) if match else ""
    return text[:1].upper() + text[1:] if text[:1].isalpha() else text


# Keys that all recipes share.
ROOT = root_key(Config)

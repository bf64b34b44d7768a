"""The base class of all sections, and number types with their ranges."""

import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

TokenId = Annotated[int, Field(ge=0)]
# The product of two counts, such as prompts and samples of each, fits int64.
MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
# Larger numbers overflow in fp32, or in a product of two.
NonNegative = Annotated[float, Field(ge=0, le=1e18)]
Positive = Annotated[float, Field(gt=0, le=1e18)]
# Up to eleven days; system calls accept no much longer timeout.
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Unit = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Base of every section: frozen, strictly typed, closed to unknown keys.

    YAML has no tuples, enums and paths. Fields of these types accept a list, a member's value, and text, also within
    lists, tuples and dicts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _convert_plain(cls, values: Any) -> Any:
        """Convert YAML values to tuples, enums and paths."""
        if not isinstance(values, Mapping):
            return values
        fields = cls.model_fields
        return {
            name: from_plain(fields[name].annotation, value) if name in fields else value
            for name, value in values.items()
        }


def options(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, or the one type, without their `Annotated` limits.

    >>> list(options(int | None))
    [<class 'int'>, <class 'NoneType'>]
    """
    if get_origin(annotation) is Annotated:
        yield from options(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from options(option)
    else:
        yield annotation


def from_plain(annotation: Any, value: Any) -> Any:
    """Return the tuple, enum member or path that a plain value stands for in a field of a type, else the value.

    Items of lists and values of dicts are converted in the same way; keys of dicts are texts.

    >>> from_plain(tuple[Path, ...], ["a", "b"])
    (PosixPath('a'), PosixPath('b'))
    >>> from_plain(dict[str, list[tuple[int, float]]], {"a": [[1, 0.5]]})
    {'a': [(1, 0.5)]}
    """
    possible = list(options(annotation))
    if any(type(value) is option for option in possible):
        return value
    for option in possible:
        converted = _as_option(option, value)
        if converted is not None:
            return converted
    return value


def _as_option(option: Any, value: Any) -> Any:
    """Return what a plain value stands for in one type of a union; None if this type has no such conversion."""
    kind, items = get_origin(option) or option, get_args(option)
    if isinstance(value, list) and kind is tuple:
        kinds = items if items and items[-1] is not ... and len(items) == len(value) else items[:1] * len(value)
        return tuple(map(from_plain, kinds, value)) if items else tuple(value)
    if isinstance(value, list) and kind is list and items:
        return [from_plain(items[0], item) for item in value]
    if isinstance(value, Mapping) and kind is dict and items:
        return {key: from_plain(items[1], item) for key, item in value.items()}
    if isinstance(value, str) and kind is Path:
        return Path(value)
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return next((member for member in kind if member.value == value), None)
    return None

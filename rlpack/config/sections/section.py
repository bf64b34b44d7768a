"""The base class of all sections, and number types with their ranges."""

import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
# Larger numbers overflow in fp32, or in a product of two.
NonNegative = Annotated[float, Field(ge=0, le=1e18)]
Positive = Annotated[float, Field(gt=0, le=1e18)]
# Up to eleven days; system calls accept no much longer timeout.
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Unit = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Base of every section: frozen, strictly typed, closed to unknown keys.

    YAML has no tuples, enums and paths. Fields of these types accept a list, a member's value, and text.
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

    >>> from_plain(tuple[Path, ...], ["a", "b"])
    (PosixPath('a'), PosixPath('b'))
    """
    possible = list(options(annotation))
    if any(type(value) is option for option in possible):
        return value
    for option in possible:
        if isinstance(value, list) and (get_origin(option) or option) is tuple:
            items = get_args(option)
            kinds = items if items and items[-1] is not ... and len(items) == len(value) else items[:1] * len(value)
            return tuple(map(from_plain, kinds, value)) if items else tuple(value)
        if isinstance(value, str) and option is Path:
            return Path(value)
        if inspect.isclass(option) and issubclass(option, Enum):
            member = next((member for member in option if member.value == value), None)
            if member is not None:
                return member
    return value

"""Compare values with the annotations of parameters and fields, given as source text."""

import re
from collections.abc import Mapping
from typing import Any

# Python types by annotation; other annotations are not checked.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "dict": (dict,),
    "RopeParameters": (dict,),
    "list": (list, tuple),
    "tuple": (list, tuple),
}


def is_wrong(value: Any, annotation: str) -> bool:
    """Return whether a value certainly doesn't have an annotated type; False for None.

    >>> is_wrong("a", "int | None"), is_wrong(1, "float"), is_wrong([1], "int | list[int]"), is_wrong(1, "list")
    (True, False, False, True)
    """
    kinds = [kind.strip() for kind in re.sub(r"\[[^\[\]]*\]", "", annotation).split("|") if kind.strip() != "None"]
    if value is None or not all(kind in _TYPES for kind in kinds):
        return False
    return not any(isinstance(value, _TYPES[kind]) for kind in kinds)

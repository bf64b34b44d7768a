"""Read JSON and text from untrusted files, with limits on the type of file, its size and its nesting.

A FIFO or a device would be read without end, and values nested some thousand levels deep raise RecursionError, in the
parser or in whatever walks them later.
"""

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 29
MOST_LEVELS = 64


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: it can't be opened, or is something else, such as a FIFO, which would wait for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{str(path)!r} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: Path, *, of_any_size: bool = False) -> str:
    """Return the text of a regular file.

    Args:
        path: the file.
        of_any_size: whether it may have more than `MOST_BYTES` bytes.

    Raises:
        OSError: it can't be read, or isn't a regular file.
        ValueError: it is too large, or isn't UTF-8.
    """
    with open_regular(path) as file:
        content = file.read() if of_any_size else file.read(MOST_BYTES + 1)
    if not of_any_size and len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return content.decode("utf-8")


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: it can't be read, or isn't a regular file.
        ValueError: it is too large, isn't JSON in UTF-8, or is nested more than `MOST_LEVELS` levels deep.
    """
    return parse_json(read_text(path))


def read_object(path: Path, *, of_any_size: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: the file.
        of_any_size: see `read_text`.

    Raises:
        OSError, ValueError: see `read_json`; or it holds another kind of value.
    """
    value = parse_json(read_text(path, of_any_size=of_any_size))
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def parse_json(text: str | bytes) -> Any:
    """Return the value in JSON text.

    Raises:
        ValueError: it isn't JSON, has a number of thousands of digits, or is nested more than `MOST_LEVELS` levels
            deep.

    >>> parse_json('{"a": [1]}')
    {'a': [1]}
    """
    too_deep = f"it is nested more than {MOST_LEVELS} levels deep"
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        containers = [inner for inner in level if isinstance(inner, dict | list)]
        if not containers:
            return value
        level = [child for inner in containers for child in (inner.values() if isinstance(inner, dict) else inner)]
    raise ValueError(too_deep)

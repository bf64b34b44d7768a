"""The tools of a prompt: JSON schemas of functions in the dataset's column `tools`, which chat templates render."""

import json
from collections.abc import Mapping
from typing import Any

from rlpack.batch.errors import DataError
from rlpack.data.examples import Example

# As transformers and TRL name the column and the argument of chat templates.
COLUMN = "tools"
_LONGEST_SHOWN = 60


def tools_of(example: Example) -> list[dict[str, Any]] | None:
    """Return the tools of a prompt, None if it has none or is not a list of chat messages.

    Keys with null are dropped from objects, because Parquet files and the `datasets` library give every tool the
    parameters of all; JSON text is taken as it is.

    Raises:
        DataError: the column has neither a list of objects nor JSON text of one; the message names prompt and column.
    """
    value = None if isinstance(example.prompt, str) else example.columns.get(COLUMN)
    what = f"prompt {example.uid!r}: column {COLUMN}"
    way_out = "give it a list of JSON objects, JSON text of one, or null, or rename the column"
    try:
        tools = (json.loads(value) if value.strip() else None) if isinstance(value, str) else _without_nulls(value)
        json.dumps(tools, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} has an unpaired surrogate, which is not a character; fix the text") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{what} is {_brief(value)}, which is not JSON ({error}); {way_out}") from error
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{what} is {_brief(value)}; {way_out}")
    return tools or None


def _brief(value: Any) -> str:
    return f"{repr(value)[:_LONGEST_SHOWN]} ({type(value).__name__})"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value

"""The values of metrics: each is one number, which every sink can write and every reader accepts."""

import reprlib
from collections.abc import Mapping
from typing import Any

from rlpack.observe.errors import MetricError


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as floats and ints; tensors and NumPy scalars of one number become floats.

    A sink would otherwise write what no reader accepts.

    >>> as_numbers({"recipe/difficulty": "hard"})
    Traceback (most recent call last):
    rlpack.observe.errors.MetricError: metric 'recipe/difficulty' is 'hard'; a metric is one number

    Raises:
        MetricError: a value is text, None or several numbers, or doesn't fit into a float.
    """
    return {name: _as_number(name, value) for name, value in metrics.items()}


def _as_number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
        text = " ".join(reprlib.repr(value).split())
        raise MetricError(f"metric {name!r} is {text}; a metric is one number") from error
    return value if type(value) is int else number  # written as 3 rather than 3.0

"""Merge metrics over microbatches and ranks, by a reducer that the metric's name implies.

A microbatch reports its contribution to the step's metric (a mean is already divided by the step's denominator), so
metrics, like losses, don't depend on batching. Names ending in `_max` and `_min` merge by the maximum and minimum, all
others by their sum. Sums are exact (`math.fsum`), so they don't depend on the order of the parts.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError

Reducer = Literal["sum", "max", "min"]

REDUCERS: tuple[tuple[str, Reducer], ...] = (("_max", "max"), ("_min", "min"))


def reducer_of(name: str) -> Reducer:
    """Return the reducer of the metric `name`.

    >>> reducer_of("actor/ratio_max"), reducer_of("actor/loss")
    ('max', 'sum')
    """
    for ending, reducer in REDUCERS:
        if name.endswith(ending):
            return reducer
    return "sum"


def merge_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the merged metrics of all parts; a name may be missing in some, NaN propagates.

    >>> merge_metrics([{"loss": 0.25, "ratio_max": 1.5}, {"loss": 0.5}, {"ratio_max": 2.0}])
    {'loss': 0.75, 'ratio_max': 2.0}
    """
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(float(value))
    return {name: _reduce(reducer_of(name), parts) for name, parts in values.items()}


class MetricAccumulator:
    """The metrics of one optimizer step on one rank.

    Tensors are read only in `result`, so that microbatches don't synchronize with the GPU.

    >>> accumulator = MetricAccumulator()
    >>> accumulator.add({"loss": torch.tensor(0.5)})
    >>> accumulator.add({"loss": 0.25})
    >>> accumulator.result()
    {'loss': 0.75}
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, Tensor | float]] = []

    def add(self, part: Mapping[str, Tensor | float]) -> None:
        """Add the metrics of one microbatch: numbers, or tensors of one number, which are detached.

        Raises:
            AlgorithmError: a metric is not one number; of tensors, only the shapes are read here.
        """
        self._parts.append({name: _one_number(name, value) for name, value in part.items()})

    def result(self) -> dict[str, float]:
        """Return the merged metrics of all parts added so far."""
        tensors = [
            value.double().flatten() for part in self._parts for value in part.values() if isinstance(value, Tensor)
        ]
        numbers = iter(torch.cat(tensors).tolist() if tensors else ())
        return merge_metrics(
            {n: next(numbers) if isinstance(v, Tensor) else v for n, v in part.items()} for part in self._parts
        )


def _one_number(name: str, value: Any) -> Tensor | float:
    """Return a metric as a float, or as a detached tensor of one number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach()
    if isinstance(value, Tensor):
        what = f"has the shape {[*value.shape]}"
    else:
        try:
            return float(value)
        except (TypeError, ValueError):  # ValueError: a text
            what = f"is {value!r}"
    reducer = reducer_of(name)
    example = "(token_weight * values).sum()" if reducer == "sum" else f"values.{reducer}()"
    raise AlgorithmError(
        f"metric {name!r} {what}; a loss returns one number per metric; reduce it, for example with {example}"
    )


def _reduce(reducer: Reducer, values: list[float]) -> float:
    """Merge the values of one metric."""
    if reducer == "max":
        return float(np.max(values))
    if reducer == "min":
        return float(np.min(values))
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        # fsum raises for inf - inf and for overflow; such a metric should be NaN or infinite.
        return float(sum(values))


def merge_steps(ranks: Iterable[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Return the metrics of each optimizer step, merged over ranks, which all took the same steps.

    >>> merge_steps([[{"loss": 0.25}, {"loss": 1.0}], [{"loss": 0.5}, {"loss": 2.0}]])
    [{'loss': 0.75}, {'loss': 3.0}]
    """
    return [merge_metrics(parts) for parts in zip(*ranks, strict=True)]

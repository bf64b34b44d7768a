"""How microbatches and ranks report figures: sums over global denominators, and extremes.

A microbatch reports what it adds to the step's figure (a mean comes already divided by the step's denominator), so
figures, like losses, don't depend on batching. The name alone says how parts are merged: `…_max` by the largest,
`…_min` by the smallest, all others by their sum. Sums are exact (`math.fsum`), so the order of parts can't show.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Reducer = Literal["sum", "max", "min"]

REDUCERS: tuple[tuple[str, Reducer], ...] = (("_max", "max"), ("_min", "min"))


def reducer_of(name: str) -> Reducer:
    """Return how parts of the metric `name` are merged.

    >>> reducer_of("actor/ratio_max"), reducer_of("actor/loss")
    ('max', 'sum')
    """
    for ending, reducer in REDUCERS:
        if name.endswith(ending):
            return reducer
    return "sum"


def merge(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of all parts together; a name may be missing in some. NaN in a part shows in the whole.

    >>> merge([{"loss": 0.25, "ratio_max": 1.5}, {"loss": 0.5}, {"ratio_max": 2.0}])
    {'loss': 0.75, 'ratio_max': 2.0}
    """
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(float(value))
    return {name: _reduce(reducer_of(name), figures) for name, figures in values.items()}


class MetricSums:
    """Collects the parts of one optimizer step on one rank.

    Tensors are kept as they are until `result`, so a GPU is not made to wait at every microbatch.

    >>> sums = MetricSums()
    >>> sums.add({"loss": torch.tensor(0.5)})
    >>> sums.add({"loss": 0.25})
    >>> sums.result()
    {'loss': 0.75}
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, Tensor | float]] = []

    def add(self, part: Mapping[str, Tensor | float]) -> None:
        """Take the figures of one microbatch: floats, or tensors of one number (kept without their graph)."""
        self._parts.append({n: v.detach() if isinstance(v, Tensor) else v for n, v in part.items()})

    def result(self) -> dict[str, float]:
        """Return the figures of everything added so far."""
        tensors = [
            value.double().flatten() for part in self._parts for value in part.values() if isinstance(value, Tensor)
        ]
        read = iter(torch.cat(tensors).tolist() if tensors else ())
        return merge({n: next(read) if isinstance(v, Tensor) else v for n, v in part.items()} for part in self._parts)


def _reduce(reducer: Reducer, figures: list[float]) -> float:
    """Merge one metric's figures."""
    if reducer == "max":
        return float(np.max(figures))
    if reducer == "min":
        return float(np.min(figures))
    try:
        return math.fsum(figures)
    except (ValueError, OverflowError):
        # fsum refuses inf - inf and sums beyond float64; such a figure has to be seen as the NaN or infinity it is.
        return float(sum(figures))


def merge_steps(ranks: Iterable[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Return the figures of each optimizer step, merged over the ranks, which all took the same steps.

    >>> merge_steps([[{"loss": 0.25}, {"loss": 1.0}], [{"loss": 0.5}, {"loss": 2.0}]])
    [{'loss': 0.75}, {'loss': 3.0}]
    """
    return [merge(parts) for parts in zip(*ranks, strict=True)]

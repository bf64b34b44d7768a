"""Time the linear layers of a model in fp32 by PyTorch's libraries: an engine that uses them needs at least this."""

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.generation import Size
from rlpack.models.cpu_products import is_faster, packed_product, packed_weight

_REPEATS = 5


class LinearLayers:
    """The linear layers of a Qwen2 model, one after the other, with layers that read the same input joined."""

    def __init__(self, size: Size) -> None:
        """Draw random weights, and prepare them for each of PyTorch's libraries."""
        key_value = size.hidden // size.heads * size.key_value_heads
        shapes = [
            (size.hidden + 2 * key_value, size.hidden),
            (size.hidden, size.hidden),
            (2 * size.intermediate, size.hidden),
            (size.hidden, size.intermediate),
        ] * size.layers
        self._weights = [torch.randn(shape) for shape in [*shapes, (size.vocabulary, size.hidden)]]
        self._packed = [packed_weight(weight) for weight in self._weights] if is_faster() else []

    def seconds_of(self, lengths: np.ndarray) -> float:
        """Return the time of the products that sampling takes, in seconds; prompts are left out.

        Args:
            lengths: tokens of each response, int [B]. All are sampled from the start; a row that has ended takes no
                part in the products. Powers of two are measured, and times between them are interpolated.
        """
        active = [(lengths > token).sum() for token in range(lengths.max())]
        powers = [2**power for power in range(len(lengths).bit_length() + 1)]
        return float(np.interp(active, powers, [self._seconds_of_rows(rows) for rows in powers]).sum())

    def _seconds_of_rows(self, rows: int) -> float:
        """Return the time of a pass through all layers, in seconds, with the faster library for each layer."""
        inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]) for weight in self._weights}
        given = [inputs[weight.shape[1]] for weight in self._weights]
        sides = [_times(F.linear, given, self._weights)]
        if self._packed:
            sides.append(_times(packed_product, given, self._packed))
        return float(np.min(sides, axis=0).sum())


def _times(product: Callable[[Tensor, Tensor], Tensor], inputs: list[Tensor], weights: list[Tensor]) -> np.ndarray:
    """Return the fastest time of each layer over passes through all layers, so that none stays in a core's cache."""
    found = np.full((_REPEATS + 1, len(weights)), np.inf)
    for repeat in range(_REPEATS + 1):
        for place, (rows, weight) in enumerate(zip(inputs, weights, strict=True)):
            begin = time.perf_counter()
            product(rows, weight)
            found[repeat, place] = time.perf_counter() - begin
    return found[1:].min(0)  # the first pass compiles kernels

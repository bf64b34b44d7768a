"""Linear layers that read the same input, as one product whose weights are prepared for many calls.

Weights are concatenated and, where oneDNN is faster (`rlpack.models.cpu_products`), stored in the layout that its
kernels read. For 1 to 63 rows, for which layers elsewhere stay with MKL, that is up to three times as fast. Prepared
weights are copies: they don't follow later changes of the layers.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlpack.models.cpu_products import is_faster, packed_product, packed_weight, rounded_rows

# Number of multiplications from which oneDNN is faster than MKL despite its longer call.
_LEAST_WORK = 2**19
# Numbers of rows below 64 that products are computed with: oneDNN compiles a kernel for each.
_FEW_ROWS = (4, 8, 12, 16, 24, 32, 48, 64)


class FusedLinear:
    """input · [weight of each layer]ᵀ + [bias of each layer].

    Attributes:
        least_rows: number of rows from which oneDNN is used; None if it never is.
    """

    def __init__(self, layers: Sequence[nn.Linear], *, copy: bool) -> None:
        """Prepare the layers' weights, or use them as they are if not `copy`."""
        self._parts = [(layer.weight, layer.bias) for layer in layers]
        self.least_rows: int | None = None
        if copy and len(layers) > 1:
            self._parts = [_concatenated(layers)]
        weight, self._bias = self._parts[0]
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and is_faster():
            self.least_rows = -(-_LEAST_WORK // min(part.numel() for part, _ in self._parts))
        self._packed = None
        if copy and self.least_rows is not None:
            self._packed = packed_weight(weight)
            if self.least_rows <= _FEW_ROWS[0]:
                # For so few rows, MKL isn't worth a second copy of a large weight.
                self.least_rows, self._parts = 1, []

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the product, [M, N], of rows [M, K]."""
        if self.least_rows is None or len(rows) < self.least_rows:
            products = [F.linear(rows, weight, bias) for weight, bias in self._parts]
        elif self._packed is not None:
            return packed_product(rows, self._packed, self._bias)
        else:
            products = [packed_product(rows, weight, bias) for weight, bias in self._parts]
        return products[0] if len(products) == 1 else torch.cat(products, -1)


def padded_rows(count: int, least_rows: int | None) -> int:
    """Return the number of rows, at least `count`, that a model's products are computed with.

    Args:
        count: rows.
        least_rows: the smallest `least_rows` of the products; None if they have none.
    """
    if least_rows is None or count < least_rows:
        return count
    return rounded_rows(count) if count > _FEW_ROWS[-1] else next(rows for rows in _FEW_ROWS if rows >= count)


def _concatenated(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return concatenated weights and biases; zeros where only some layers have a bias."""
    weight = torch.cat([layer.weight for layer in layers])
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    return weight, torch.cat(biases)

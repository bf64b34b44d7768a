"""The layout of weights in transit: names, shapes and dtypes by bucket, and the form that a receiver expects."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch


class TensorSpec(NamedTuple):
    """Name, shape and dtype of one weight in transit."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class WeightForm(NamedTuple):
    """The form in which a receiver expects the weights of a model.

    Attributes:
        dtype: dtype of floating-point weights; None keeps each weight's own.
        adapters_only: whether it expects only adapter matrices, because it already has the base weights.
    """

    dtype: torch.dtype | None = None
    adapters_only: bool = False


@dataclass(frozen=True)
class WeightLayout:
    """The weights of a stream by bucket, in the order in which they are sent."""

    buckets: tuple[tuple[TensorSpec, ...], ...]

    def __len__(self) -> int:
        return len(self.buckets)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight by its name."""
        return {spec.name: spec.shape for bucket in self.buckets for spec in bucket}

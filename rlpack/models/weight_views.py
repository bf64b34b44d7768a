"""Tensors that are parts of one weight, with axes in any order: they can be written without the whole weight.

Invariants (tests/unit/models/test_weight_views.py): a part that `find_views` returns has the values of the conversion's
result; a conversion that computes, joins or reshapes gives None.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlpack.models.weight_pieces import Place, sizes


@dataclass(frozen=True)
class WeightView:
    """A tensor that is a part of a weight.

    Attributes:
        shape: shape of the tensor.
        starts: where the part begins, along each axis of the weight.
        axes: the weight's axis for each of the tensor's; None for an axis of size 1 that the weight doesn't have.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    axes: tuple[int | None, ...]

    def cut(self, place: Place, values: Tensor) -> tuple[Place, Tensor] | None:
        """Return the entries of the tensor that are in a place of the weight, and where; None if none is.

        Args:
            place: a place in the weight.
            values: the values in that place.
        """
        ends = list(self.starts)
        for axis in range(len(ends)):
            ends[axis] += self.shape[self.axes.index(axis)] if axis in self.axes else 1
        given = [
            *((part.start, part.stop) for part in place),
            *((0, size) for size in values.shape[len(place) :]),
        ]
        low = [max(start, begin) for start, (begin, _) in zip(self.starts, given, strict=True)]
        high = [min(end, stop) for end, (_, stop) in zip(ends, given, strict=True)]
        if any(stop <= start for start, stop in zip(low, high, strict=True)):
            return None
        part = values[tuple(slice(lo - begin, hi - begin) for lo, hi, (begin, _) in zip(low, high, given, strict=True))]
        order = [axis for axis in self.axes if axis is not None]
        part = part.permute((*order, *(axis for axis in range(part.ndim) if axis not in order)))
        own = tuple(
            slice(0, 1) if axis is None else slice(low[axis] - self.starts[axis], high[axis] - self.starts[axis])
            for axis in self.axes
        )
        return own, part.reshape(sizes(own))


def find_views(weight: Tensor, convert: Callable[[Tensor], Mapping[str, Tensor]]) -> dict[str, WeightView] | None:
    """Return the results of a conversion as parts of a weight, None if one is anything else.

    Args:
        weight: contiguous, on the meta device.
        convert: from the weight to named tensors.
    """
    with _ViewsOnly() as mode:
        try:
            results = convert(weight)
        except RuntimeError:  # a reshape needs the copy that is left out here
            return None
    views = {name: _view_of(weight, tensor) for name, tensor in results.items()}
    found = {name: view for name, view in views.items() if view is not None}
    return found if mode.only_views and len(found) == len(views) else None


def entry_runs(shape: Sequence[int], place: Place) -> tuple[np.ndarray, int]:
    """Return where runs of consecutive entries in a place of a contiguous tensor begin, and the entries of each.

    >>> entry_runs((4, 6), (slice(1, 3), slice(2, 5)))
    (array([ 8, 14]), 3)
    """
    ranges = [(part.start, part.stop) for part in place] + [(0, size) for size in shape[len(place) :]]
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    cut = [axis for axis, (start, stop) in enumerate(ranges) if stop - start < shape[axis]]
    last = cut[-1] if cut else 0
    begins = np.zeros(1, np.int64)
    for axis, (start, stop) in enumerate(ranges[:last]):
        begins = (begins[:, None] + np.arange(start, stop) * strides[axis]).ravel()
    if not ranges:
        return begins, 1
    start, stop = ranges[last]
    return begins + start * strides[last], (stop - start) * strides[last]


class _ViewsOnly(TorchDispatchMode):
    """Runs operations without copies, and notes whether one was anything but a view or a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.only_views = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        self.only_views &= bool(func.is_view)
        return func(*args, **(kwargs or {}))


def _view_of(weight: Tensor, tensor: Tensor) -> WeightView | None:
    """Return a tensor that shares the weight's memory as a part of it, None if it is not a block."""
    if tensor.untyped_storage()._cdata != weight.untyped_storage()._cdata or tensor.dtype != weight.dtype:
        return None
    if not tensor.numel() or not weight.is_contiguous():
        return None
    starts = (
        [int(start) for start in np.unravel_index(int(tensor.storage_offset()), tuple(weight.shape))]
        if weight.ndim
        else []
    )
    axis_of = {stride: axis for axis, stride in enumerate(weight.stride()) if weight.shape[axis] > 1}
    axes = [
        axis_of.get(stride) if size > 1 else None for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    used = [axis for axis in axes if axis is not None]
    for size, axis in zip(tensor.shape, axes, strict=True):
        if size > 1 and (axis is None or starts[axis] + size > weight.shape[axis]):
            return None
    return WeightView(tuple(tensor.shape), tuple(starts), tuple(axes)) if len(used) == len(set(used)) else None

"""Tensors as NumPy arrays, for pickling: protocol 5 sends them out of band, so Ray maps them in place.

A tensor pickled by torch is copied into the pickle stream and out of it again; a NumPy array travels as a buffer
of its own. What arrives through Ray's object store is memory that other processes read too: clone a column before
writing into it in place.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.dtypes import numpy_ready
from rlpack.batch.errors import DataError


class _Writable:
    """Lends an array's memory without its read-only flag, which torch can't represent and would warn about."""

    def __init__(self, array: np.ndarray) -> None:
        self._owner = array
        interface: dict[str, Any] = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def to_array(tensor: Tensor) -> tuple[np.ndarray, str]:
    """Return `tensor` as a contiguous array on the host, with the name of its type.

    Types that NumPy lacks go as their bits. Memory is shared where the tensor is contiguous on the CPU, and no
    conjugate or negative that is yet to be computed.

    >>> to_array(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    (array([16256, 16384], dtype=int16), 'bfloat16')

    Raises:
        DataError: the tensor is on the autograd graph, which can't leave the process.
    """
    if tensor.requires_grad:
        raise DataError("a tensor on the autograd graph can't be pickled; detach() it first")
    return numpy_ready(tensor.cpu()).numpy(), str(tensor.dtype).removeprefix("torch.")


def from_array(array: np.ndarray, dtype: str) -> Tensor:
    """Return the tensor that `to_array` took apart, on the same memory.

    >>> from_array(np.array([16256, 16384], dtype=np.int16), "bfloat16")
    tensor([1., 2.], dtype=torch.bfloat16)
    """
    writable = array if array.flags.writeable else np.asarray(_Writable(array))
    return torch.from_numpy(writable).view(getattr(torch, dtype))

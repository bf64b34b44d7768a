"""Convert tensors to NumPy arrays, which Ray maps in place (pickle protocol 5, out of band).

torch copies a tensor into the pickle stream and out again; a NumPy array is sent as a separate buffer. Arrays received
through Ray's object store are memory shared with other processes: clone a column before writing into it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpack.batch.dtypes import numpy_ready
from rlpack.batch.errors import DataError


class _Writable:
    """An array's memory without its read-only flag, which torch would warn about."""

    def __init__(self, array: np.ndarray) -> None:
        self._owner = array
        interface: dict[str, Any] = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def to_array(tensor: Tensor) -> tuple[np.ndarray, str]:
    """Return `tensor` as a contiguous array on the host, with the name of its dtype.

    A tensor of a dtype that NumPy lacks becomes an integer array of the same bits. Memory is shared if the tensor is
    contiguous on the CPU and not a lazy conjugate or negative.

    >>> to_array(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    (array([16256, 16384], dtype=int16), 'bfloat16')

    Raises:
        DataError: the tensor is on the autograd graph, which can't be pickled.
    """
    if tensor.requires_grad:
        raise DataError("a tensor on the autograd graph can't be pickled; detach() it first")
    return numpy_ready(tensor.cpu()).numpy(), str(tensor.dtype).removeprefix("torch.")


def from_array(array: np.ndarray, dtype: str) -> Tensor:
    """Return the tensor of an array from `to_array`, on the same memory.

    >>> from_array(np.array([16256, 16384], dtype=np.int16), "bfloat16")
    tensor([1., 2.], dtype=torch.bfloat16)
    """
    writable = array if array.flags.writeable else np.asarray(_Writable(array))
    return torch.from_numpy(writable).view(getattr(torch, dtype))

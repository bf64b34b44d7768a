"""The device whose kernels and collectives run: a tensor's own, or one that is simulated for tensors without values."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

# None for the tensors' own device.
_simulated_device: ContextVar[str | None] = ContextVar("simulated_device", default=None)


@contextmanager
def kernels_of(device_type: str) -> Iterator[None]:
    """Choose the kernels and collectives of `cpu` or `cuda` inside the context, where tensors have no values."""
    token = _simulated_device.set(device_type)
    try:
        yield
    finally:
        _simulated_device.reset(token)


def is_simulated() -> bool:
    """Return whether the kernels of a device are simulated."""
    return _simulated_device.get() is not None


def kernel_device(tensor: Tensor) -> str:
    """Return the type of the device whose kernels run on a tensor: its own, or the one of `kernels_of`."""
    return effective_device_type(tensor.device.type)


def effective_device_type(device_type: str) -> str:
    """Return the device type that `kernels_of` chose, or `device_type` outside of it."""
    return _simulated_device.get() or device_type

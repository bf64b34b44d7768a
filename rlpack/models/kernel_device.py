"""The device whose kernels run on a tensor: its own, or one that is simulated, for tensors without values."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

# None for the tensors' own device.
_simulated_device: ContextVar[str | None] = ContextVar("simulated_device", default=None)


@contextmanager
def kernels_of(device_type: str) -> Iterator[None]:
    """Choose the kernels of a device, `cpu` or `cuda`, inside the context, for tensors that have no values."""
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
    return own_or_simulated(tensor.device.type)


def own_or_simulated(device_type: str) -> str:
    """Return the type of a device, or that of `kernels_of`."""
    return _simulated_device.get() or device_type

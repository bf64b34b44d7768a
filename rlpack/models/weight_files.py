"""Read parts of tensors from safetensors files, without mapping or reading the rest of the files."""

from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

# Maximum number of bytes read at a time, in addition to the tensor that they are copied into.
_BLOCK_BYTES = 64 * 2**20


class WeightFiles:
    """The tensors of several safetensors files by name.

    Files are read with `pread` where safetensors supports it (0.8 and later), because pages of a mapped file would
    count as memory of the process and stay resident.

    Attributes:
        shapes: shape of each tensor, from the files' headers.
    """

    def __init__(self, paths: Iterable[Path | str]) -> None:
        """Open the files and read their headers.

        Raises:
            SafetensorError: a file is damaged.
            OSError: a file can't be opened.
        """
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        for path in paths:
            file = _opened(path)
            for name in file.keys():  # noqa: SIM118 - not a dict
                self._files[name] = file
                self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a whole tensor on the CPU, cast to `dtype`."""
        whole = torch.empty(self.shapes[name], dtype=dtype)
        self.read_into(name, whole, [0] * whole.ndim)
        return whole

    def read_into(self, name: str, part: Tensor, offsets: Sequence[int]) -> None:
        """Copy a part of a tensor into `part`, cast to its dtype.

        Args:
            name: name of the tensor.
            part: on any device; its shape is that of the part.
            offsets: where the part begins in the tensor, by axis.
        """
        if part.numel() == 0:
            return
        source = self._files[name].get_slice(name)
        if part.ndim == 0:
            part.copy_(source[...])
            return
        inner = tuple(slice(start, start + size) for start, size in zip(offsets[1:], part.shape[1:], strict=True))
        # Counted as fp32, which no common dtype of weights exceeds.
        rows = max(1, _BLOCK_BYTES // max(1, 4 * prod(part.shape[1:])))
        for start in range(0, part.shape[0], rows):
            block = part[start : start + rows]
            first = offsets[0] + start
            block.copy_(source[(slice(first, first + block.shape[0]), *inner)])

    def equal(self, left: str, right: str) -> bool:
        """Return whether two tensors have the same shape and values."""
        if self.shapes[left] != self.shapes[right]:
            return False
        sources = [self._files[name].get_slice(name) for name in (left, right)]
        shape = self.shapes[left]
        if not shape:
            return torch.equal(*(source[...] for source in sources))
        rows = max(1, _BLOCK_BYTES // max(1, 4 * prod(shape[1:])))
        starts = range(0, shape[0], rows)
        blocks = (slice(start, min(start + rows, shape[0])) for start in starts)
        return all(torch.equal(*(source[block] for source in sources)) for block in blocks)


def _opened(path: Path | str) -> Any:
    """Open a file."""
    try:
        return safe_open(path, framework="pt", device="cpu", backend="pread")
    except TypeError:  # safetensors before 0.8
        return safe_open(path, framework="pt", device="cpu")

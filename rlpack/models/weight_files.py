"""Read parts of tensors from safetensors files, without mapping or reading the rest of the files.

The safetensors library checks a file and gives its names, shapes and dtypes. Tensors are read here, because with its
backend `pread` (0.8.0) a slice reads its whole tensor first, and pages of a mapped file would count as memory of the
process and stay resident.
"""

import json
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

# Maximum number of bytes read at a time, in addition to the tensor that they are copied into.
_BLOCK_BYTES = 64 * 2**20
# Runs of at least this many bytes are read one by one, shorter ones together with the bytes between them.
_RUN_BYTES = 2**16
# A file begins with the size of its header, an unsigned integer.
_SIZE_BYTES = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file, or one entry of it.

    Attributes:
        file: opened without a buffer.
        start: where its bytes begin.
        kind: the dtype of its numbers, as the header names it.
        shape: of the tensor.
    """

    file: BinaryIO
    start: int
    kind: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the numbers.

        Raises:
            ValueError: it is one that can't be read.
        """
        if self.kind not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise ValueError(f"{self.file.name} has a tensor of the dtype {self.kind}; only {known} can be read")
        return _DTYPES[self.kind]

    @property
    def entry_bytes(self) -> int:
        """Return the bytes of an entry of the first axis, or of a number without axes."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    def entry(self, index: int) -> "_Stored":
        """Return an entry of the first axis."""
        return replace(self, start=self.start + index * self.entry_bytes, shape=self.shape[1:])

    def read(self, start: int, stop: int, buffer: Tensor) -> Tensor:
        """Read entries of the first axis into a buffer, and return them as a view of it.

        Args:
            start: the first entry.
            stop: the entry after the last one.
            buffer: uint8 [N] on the CPU, at least as large as the entries.
        """
        size = (stop - start) * self.entry_bytes
        view, place, done = buffer[:size].numpy().data, self.start + start * self.entry_bytes, 0
        while done < size:
            count = os.preadv(self.file.fileno(), [view[done:]], place + done)
            if not count:
                raise OSError(f"{self.file.name} ends after {place + done} bytes; it was cut after it was opened")
            done += count
        return buffer[:size].view(self.dtype).view(stop - start, *self.shape[1:])


class WeightFiles:
    """The tensors of several safetensors files by name.

    Attributes:
        shapes: shape of each tensor, from the files' headers.
    """

    def __init__(self, paths: Iterable[Path | str]) -> None:
        """Open the files and read their headers.

        Raises:
            SafetensorError: a file is damaged.
            OSError: a file can't be opened.
        """
        files = ExitStack()
        weakref.finalize(self, files.close)
        # Kept open until then, so that a file that is replaced meanwhile is still read whole.
        opened = [files.enter_context(open(path, "rb", buffering=0)) for path in paths]  # noqa: SIM115 - see above
        self._stored = {name: stored for file in opened for name, stored in _tensors_of(file)}
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a whole tensor on the CPU, cast to `dtype`.

        Raises:
            OSError, ValueError: as `read_into`.
        """
        whole = torch.empty(self.shapes[name], dtype=dtype)
        self.read_into(name, whole, [0] * whole.ndim)
        return whole

    def read_into(self, name: str, part: Tensor, offsets: Sequence[int]) -> None:
        """Copy a part of a tensor into `part`, cast to its dtype.

        Args:
            name: name of the tensor.
            part: on any device; its shape is that of the part.
            offsets: where the part begins in the tensor, by axis.

        Raises:
            OSError: the file was cut after it was opened, or can't be read.
            ValueError: the tensor's dtype can't be read.
        """
        if part.numel():
            _copy(self._stored[name], part, offsets, _buffer_of([self._stored[name]]))

    def equal(self, left: str, right: str) -> bool:
        """Return whether two tensors have the same shape and values.

        Raises:
            OSError, ValueError: as `read_into`.
        """
        if self.shapes[left] != self.shapes[right]:
            return False
        sides = [self._flat(left), self._flat(right)]
        common = sides[0].dtype if sides[0].dtype == sides[1].dtype else torch.float64
        buffers, count = [_buffer_of(sides) for _ in sides], _BLOCK_BYTES // max(side.entry_bytes for side in sides)
        total = prod(self.shapes[left])
        for start in range(0, total, count):
            stop = min(start + count, total)
            blocks = [side.read(start, stop, buffer) for side, buffer in zip(sides, buffers, strict=True)]
            if not torch.equal(*(block.to(common) for block in blocks)):
                return False
        return True

    def _flat(self, name: str) -> _Stored:
        """Return a tensor as one axis."""
        stored = self._stored[name]
        return replace(stored, shape=(prod(stored.shape),))


def _copy(stored: _Stored, part: Tensor, offsets: Sequence[int], buffer: Tensor) -> None:
    """Copy a part of a tensor in a file, block by block; entries that are too large, or needed only in part, singly.

    Args:
        stored: the tensor.
        part: the target, of the part's shape.
        offsets: where the part begins, by axis.
        buffer: uint8 [N].
    """
    if part.ndim == 0:
        part.copy_(stored.read(0, 1, buffer)[0])
        return
    first, size = offsets[0], stored.entry_bytes
    read = prod((*part.shape[1:2], *stored.shape[2:])) * stored.dtype.itemsize  # what the part needs of an entry
    if part.ndim > 1 and (size > buffer.numel() or _RUN_BYTES <= read < size):
        for index in range(part.shape[0]):
            _copy(stored.entry(first + index), part[index], offsets[1:], buffer)
        return
    inner = tuple(slice(start, start + width) for start, width in zip(offsets[1:], part.shape[1:], strict=True))
    rows = buffer.numel() // size
    for start in range(0, part.shape[0], rows):
        block = part[start : start + rows]
        entries = stored.read(first + start, first + start + block.shape[0], buffer)
        block.copy_(entries[(slice(None), *inner)])


def _buffer_of(tensors: Sequence[_Stored]) -> Tensor:
    """Return a buffer for blocks of tensors, which is no larger than they are."""
    most = max(prod(stored.shape) * stored.dtype.itemsize for stored in tensors)
    return torch.empty(min(_BLOCK_BYTES, most), dtype=torch.uint8)


def _tensors_of(file: BinaryIO) -> Iterator[tuple[str, _Stored]]:
    """Yield the names and tensors of a file."""
    with safe_open(file.name, framework="pt", device="cpu"):
        pass  # checks the header, and that the tensors fill the file
    header_bytes = int.from_bytes(file.read(_SIZE_BYTES), "little")
    header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    for name, described in header.items():
        start = _SIZE_BYTES + header_bytes + described["data_offsets"][0]
        yield name, _Stored(file, start, described["dtype"], tuple(described["shape"]))

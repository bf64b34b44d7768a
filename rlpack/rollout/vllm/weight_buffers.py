"""Buckets of weights in shared memory, sent from a rank to its vLLM process; `device_buffers` uses GPU memory.

The rank owns two buffers and alternates between them: it writes one while vLLM's process loads from the other. Both
processes keep them mapped between updates, because touching a fresh page of shared memory costs ten times the copy into
it. The call that announces a bucket carries the layout of the buffer and a digest (`BucketNote`).

Invariants (tests/unit/rollout/vllm/test_weight_buffers.py):

1. tensors of any dtype and shape are read back exactly as written;
2. a buffer that is truncated, changed or missing, or a bucket out of order, is refused before a weight is used;
3. on Linux, a buffer has no name in a file system: the kernel frees it however the processes that hold it end;
4. matrices come first, in their order and without gaps if their sizes are multiples of 64 bytes, so that matrices that
   an engine stacks into one, such as q, k and v, are already contiguous.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from rlpack.rollout.errors import EngineError

NUM_BUFFERS = 2
_ALIGNMENT = 64


@dataclass(frozen=True)
class BucketNote:
    """The contents of a buffer.

    Attributes:
        path: where a process can open the buffer while the rank is alive; "" for buffers on GPUs.
        index: index of the bucket in its update, from 0.
        names: names of the weights.
        dtypes: names of their dtypes, such as `float32`.
        shapes: their shapes.
        offsets: where each weight starts, in bytes.
        num_bytes: size of the bucket, from the start of the buffer.
        digest: digest of these bytes as hexadecimal text: xxh3-128, or a checksum on GPUs.
        handles: handles of buffers on GPUs, by the GPU's id; see `device_buffers`.
    """

    path: str
    index: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    num_bytes: int
    digest: str
    handles: dict[str, list[Any]] = field(default_factory=dict)


class Buffers(Protocol):
    """The rank's side of a transport to vLLM's process."""

    def write(self, weights: Mapping[str, Tensor], index: int) -> BucketNote:
        """Write a bucket; this overwrites the bucket before the last one."""
        ...

    def end_update(self) -> None:
        """Free what is needed only during an update; vLLM's process has loaded all buckets."""
        ...

    def close(self) -> None:
        """Free all memory."""
        ...


class WeightBuffers:
    """The rank's two buffers; each is as large as the largest bucket written to it so far."""

    def __init__(self) -> None:
        """Create empty buffers."""
        self._buffers = [_Buffer() for _ in range(NUM_BUFFERS)]

    @property
    def num_bytes(self) -> int:
        """Return the size of all buffers in bytes."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    def write(self, weights: Mapping[str, Tensor], index: int) -> BucketNote:
        """Write a bucket to the next buffer; this overwrites the bucket before the last one.

        Args:
            weights: whole tensors on the CPU, by name.
            index: index of the bucket in its update.
        """
        places, num_bytes = places_of(weights)
        buffer = self._buffers[index % NUM_BUFFERS]
        memory, digest = buffer.memory(num_bytes), xxhash.xxh3_128()
        for name, offset in places.items():
            data = write_bytes(weights[name], memory, offset)
            digest.update(data.numpy().data)
            digest.update(bytes(-len(data) % _ALIGNMENT))
        return describe(weights, places, num_bytes, path=buffer.path, index=index, digest=digest.hexdigest())

    def end_update(self) -> None:
        """Do nothing: both processes keep the buffers mapped."""

    def close(self) -> None:
        """Close the buffers; the kernel frees them once vLLM's process has closed them, too."""
        for buffer in self._buffers:
            buffer.close()


class BucketReader:
    """vLLM's side of the buffers; it maps each once."""

    def __init__(self) -> None:
        """Map nothing yet."""
        self._maps: dict[str, _Map] = {}

    def read(self, note: BucketNote, expected_index: int) -> dict[str, Tensor]:
        """Check a bucket and return views of its tensors, which change when the bucket after the next one is written.

        Args:
            note: the contents of the buffer.
            expected_index: number of buckets of this update that have arrived before.

        Raises:
            EngineError: the bucket is not the next one, or its buffer is missing or was changed.
        """
        check_index(note, expected_index)
        memory = self._mapped(note)[: note.num_bytes]
        return checked_views(memory, note, xxhash.xxh3_128_hexdigest(memory.numpy().data))

    def _mapped(self, note: BucketNote) -> Tensor:
        """Return all bytes of a bucket's buffer, uint8 [num_bytes]."""
        try:
            status = os.stat(note.path)
            identity = (status.st_dev, status.st_ino, status.st_size)
            if status.st_size < note.num_bytes:
                text = f"bucket {note.index} of the weights has {status.st_size} bytes in {note.path}"
                raise EngineError(f"{text}, not {note.num_bytes}")
            if (known := self._maps.get(note.path)) is None or known.identity != identity:
                known = self._maps[note.path] = _Map(identity, _map_privately(note.path, status.st_size))
        except OSError as error:
            raise EngineError(f"bucket {note.index} of the weights can't be read from {note.path}: {error}") from None
        return known.memory


@dataclass(frozen=True)
class _Map:
    """A mapped buffer: device, inode and size of its file, and its bytes."""

    identity: tuple[int, int, int]
    memory: Tensor


class _Buffer:
    """Shared memory that can grow.

    Attributes:
        path: where other processes open it.
        num_bytes: its size.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        if sys.platform == "linux":
            self._descriptor = os.memfd_create("rlpack-weights")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._descriptor, self.path = tempfile.mkstemp(prefix="rlpack-weights-")

    def memory(self, num_bytes: int) -> Tensor:
        """Return the whole buffer, uint8 of at least `num_bytes`, after growing it if needed."""
        if num_bytes > self.num_bytes:
            os.truncate(self._descriptor, num_bytes)
            self._memory = torch.frombuffer(mmap.mmap(self._descriptor, num_bytes), dtype=torch.uint8)
            self.num_bytes = num_bytes
        return self._memory

    def close(self) -> None:
        """Close the file; further calls have no effect."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self.num_bytes, self._memory = -1, 0, torch.empty(0, dtype=torch.uint8)
            if sys.platform != "linux":
                os.unlink(self.path)


def places_of(weights: Mapping[str, Tensor]) -> tuple[dict[str, int], int]:
    """Return the offset of each weight in bytes, in memory order, and their total size, a multiple of 64."""
    matrices = [name for name, weight in weights.items() if weight.ndim > 1]
    others = [name for name, weight in weights.items() if weight.ndim <= 1]
    places, num_bytes = {}, 0
    for name in matrices + others:
        places[name] = num_bytes
        num_bytes += _aligned(weights[name].nbytes)
    return places, num_bytes


def write_bytes(weight: Tensor, memory: Tensor, offset: int) -> Tensor:
    """Write a weight and the zeros up to the next one into a buffer; return the weight's bytes, uint8 on the CPU."""
    data = weight.detach().contiguous().view(-1).view(torch.uint8)
    end = offset + len(data)
    memory[offset:end].copy_(data)
    memory[end : _aligned(end)].zero_()
    return data


def describe(
    weights: Mapping[str, Tensor],
    places: Mapping[str, int],
    num_bytes: int,
    *,
    index: int,
    digest: str,
    path: str = "",
    handles: Mapping[str, list[Any]] | None = None,
) -> BucketNote:
    """Return the note of a bucket of some bytes whose weights have these offsets."""
    return BucketNote(
        path=path,
        index=index,
        names=list(weights),
        dtypes=[str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
        shapes=[list(weight.shape) for weight in weights.values()],
        offsets=[places[name] for name in weights],
        num_bytes=num_bytes,
        digest=digest,
        handles=dict(handles or {}),
    )


def check_index(note: BucketNote, expected_index: int) -> None:
    """Raise unless a bucket is the next one.

    Raises:
        EngineError: a bucket is missing, or came twice.
    """
    if note.index != expected_index:
        raise EngineError(f"bucket {note.index} of the weights arrived where bucket {expected_index} was expected")


def checked_views(memory: Tensor, note: BucketNote, digest: str) -> dict[str, Tensor]:
    """Return views of a bucket's tensors.

    Raises:
        EngineError: the digest of its memory is not the announced one.
    """
    if digest != note.digest:
        text = f"bucket {note.index} of the weights was corrupted in transit: its digest is {digest}"
        raise EngineError(f"{text}, not {note.digest}")
    rows = zip(note.names, note.dtypes, note.shapes, note.offsets, strict=True)
    return {name: _tensor(memory, dtype, shape, offset) for name, dtype, shape, offset in rows}


def _aligned(num_bytes: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _map_privately(path: str, num_bytes: int) -> Tensor:
    """Map a file, uint8; PyTorch needs writable memory, and a private map keeps writes from reaching the file."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _tensor(memory: Tensor, dtype_name: str, shape: list[int], offset: int) -> Tensor:
    """Return one tensor of a buffer, a view of its memory."""
    dtype = vars(torch)[dtype_name]
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)

"""Buckets of weights in files of shared memory, from a rank to its vLLM process.

A file holds the tensors of one bucket end to end, each at a multiple of 64 bytes. What is in it, and a digest of all of
it, travel in the call that announces it (`BucketNote`). The reader maps the file in place.

Invariants (tests/unit/rollout/vllm/test_weight_files.py):

1. what is read is what was written, whatever its dtypes and shapes;
2. a file that is cut, changed or missing, and a bucket that is out of order, is refused before a weight is used;
3. a file is gone as soon as its writer closes it.
"""

import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from rlpack.rollout.errors import EngineError

_log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rlpack-weights-"
_ALIGNMENT = 64


@dataclass(frozen=True)
class BucketNote:
    """What a file of weights holds.

    Attributes:
        path: of the file.
        index: of the bucket in its update, from 0.
        names: of the weights.
        dtypes: their PyTorch types by name, such as `float32`.
        shapes: their shapes.
        offsets: where each begins, in bytes.
        num_bytes: size of the file.
        digest: xxh3-128 of the file, as hexadecimal text.
    """

    path: str
    index: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    num_bytes: int
    digest: str


@contextmanager
def written(weights: Mapping[str, Tensor], index: int) -> Iterator[BucketNote]:
    """Write a bucket to a file, and delete the file at the end of the block.

    Args:
        weights: whole tensors on the CPU, by name.
        index: of the bucket in its update.
    """
    offsets, num_bytes = [], 0
    for weight in weights.values():
        offsets.append(num_bytes)
        num_bytes += -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
    descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=_folder(num_bytes))
    try:
        os.truncate(descriptor, max(1, num_bytes))
        digest = xxhash.xxh3_128()
        for weight, offset in zip(weights.values(), offsets, strict=True):
            data = weight.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            _write(descriptor, data, offset)
            digest.update(data)
            digest.update(bytes(-len(data) % _ALIGNMENT))
        if num_bytes == 0:
            digest.update(bytes(1))
        yield BucketNote(
            path=path,
            index=index,
            names=list(weights),
            dtypes=[str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
            shapes=[list(weight.shape) for weight in weights.values()],
            offsets=offsets,
            num_bytes=max(1, num_bytes),
            digest=digest.hexdigest(),
        )
    finally:
        os.close(descriptor)
        Path(path).unlink(missing_ok=True)


def mapped(note: BucketNote, expected_index: int) -> dict[str, Tensor]:
    """Check a bucket's file and return its tensors, in place.

    The memory lives as long as one of the tensors, even if the file is deleted: vLLM keeps the tensors of a layer until
    all of them have come.

    Args:
        note: what the file holds.
        expected_index: how many buckets of this update have come before.

    Raises:
        EngineError: the bucket is not the next one, or its file is missing or was changed.
    """
    if note.index != expected_index:
        raise EngineError(f"bucket {note.index} of the weights arrived where bucket {expected_index} was expected")
    try:
        descriptor = os.open(note.path, os.O_RDONLY)
    except OSError as error:
        raise EngineError(f"bucket {note.index} of the weights can't be read from {note.path}: {error}") from None
    try:
        size = os.fstat(descriptor).st_size
        if size != note.num_bytes:
            text = f"bucket {note.index} of the weights has {size} bytes in {note.path}, not {note.num_bytes}"
            raise EngineError(text)
        # A private map: PyTorch wants writable memory, and nothing that is written reaches the file.
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    if (digest := xxhash.xxh3_128_hexdigest(memory)) != note.digest:
        memory.close()
        text = f"bucket {note.index} of the weights was changed on its way: its digest is {digest}, not {note.digest}"
        raise EngineError(text)
    return {
        name: _tensor(memory, dtype, shape, offset)
        for name, dtype, shape, offset in zip(note.names, note.dtypes, note.shapes, note.offsets, strict=True)
    }


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes at a place of a file; on fresh shared memory this takes half the time of a map."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _tensor(memory: mmap.mmap, dtype_name: str, shape: list[int], offset: int) -> Tensor:
    """Return one tensor of a mapped file, in place."""
    dtype = vars(torch)[dtype_name]
    if prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset).view(shape)


def _folder(num_bytes: int) -> str | None:
    """Return shared memory if a bucket fits twice, else None, the folder for temporary files."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        free = 0
    if free >= 2 * num_bytes:
        return str(SHARED_MEMORY)
    _log.warning(
        "%s has %.0f MB free, less than two buckets of weights (%.0f MB); weights go through files in %s, which is "
        "slower. Give the container more shared memory (Docker: --shm-size)",
        *(SHARED_MEMORY, free / 1e6, 2 * num_bytes / 1e6, tempfile.gettempdir()),
    )
    return None

"""Buckets of weights in GPU memory, sent from a rank to its vLLM processes by CUDA IPC.

A rank and its vLLM processes (one per GPU) use the same GPUs. The rank copies a bucket to each of them once; the
processes open the memory and load from it, as with vLLM's own IPC backend. The rank owns two buffers, as in
`weight_buffers`.

A handle consists of plain types, because vLLM's messages carry others only if pickled data is allowed in them
(VLLM_ALLOW_INSECURE_SERIALIZATION). PyTorch counts one release for each export of a buffer, so a reader opens a buffer
once per export and keeps it open until the update ends.

Invariants (tests/unit/rollout/vllm/test_device_buffers.py, tests/gpu/test_device_buffers.py):

1. tensors of any dtype and shape are read back exactly as written;
2. a buffer that was changed or is on another GPU, or a bucket out of order, is refused before a weight is used;
3. between updates neither side holds a buffer;
4. once a GPU has no room for a buffer, buckets are written to shared memory (`weight_buffers`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.weight_buffers import (
    NUM_BUFFERS,
    BucketNote,
    WeightBuffers,
    check_index,
    checked_views,
    describe,
    places_of,
    write_bytes,
)

logger = logging.getLogger(__name__)

# Number of arguments of PyTorch's `rebuild_cuda_tensor` that come before those of the storage: class, size, stride,
# offset, storage class and dtype of the tensor, and the device. The reader knows them; the others make the handle.
_TENSOR_ARGUMENTS = 7
# Index of `storage_size_bytes` in a handle.
_NUM_BYTES = 1
_SMALLEST = 64  # bytes of a buffer


class Sharing(NamedTuple):
    """How buffers are shared between processes.

    Attributes:
        id_of: returns the id of a device, the same in all processes.
        export: returns the handle of a buffer, of plain types.
        reopen: returns all bytes of the buffer of a handle on a device, uint8.
        synchronize: waits until a device has finished its work.
        collect: returns the memory of buffers that their readers have closed to the GPUs.
    """

    id_of: Callable[[torch.device], str]
    export: Callable[[Tensor], list[Any]]
    reopen: Callable[[list[Any], torch.device], Tensor]
    synchronize: Callable[[torch.device], None]
    collect: Callable[[], None]


def _id_of(device: torch.device) -> str:
    # Indices depend on CUDA_VISIBLE_DEVICES, which differs between processes.
    return str(torch.cuda.get_device_properties(device).uuid)


def _export(buffer: Tensor) -> list[Any]:
    _, arguments = reduce_tensor(buffer)
    return list(arguments[_TENSOR_ARGUMENTS:])


def _reopen(handle: list[Any], device: torch.device) -> Tensor:
    shape = ((handle[_NUM_BYTES],), (1,), 0)
    return rebuild_cuda_tensor(Tensor, *shape, torch.storage.TypedStorage, torch.uint8, device.index, *handle)


def _collect() -> None:
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()  # vLLM's processes can't use memory that this process has cached


CUDA_IPC = Sharing(_id_of, _export, _reopen, torch.cuda.synchronize, _collect)


class _Slot(NamedTuple):
    """One of the two buffers on each device, and their handles by device id."""

    buffers: list[Tensor]
    handles: dict[str, list[Any]]


class DeviceBuffers:
    """The rank's two buffers on each GPU of its engine; they exist only during an update."""

    def __init__(self, devices: Sequence[torch.device], sharing: Sharing = CUDA_IPC) -> None:
        """Allocate nothing yet.

        Args:
            devices: the GPUs of the engine.
            sharing: how vLLM's processes open a buffer.
        """
        self._devices, self._sharing = list(devices), sharing
        self._slots: dict[int, _Slot] = {}
        self._in_host_memory: WeightBuffers | None = None

    @property
    def num_bytes(self) -> int:
        """Return the size of all buffers of one GPU in bytes."""
        return sum(len(slot.buffers[0]) for slot in self._slots.values())

    def write(self, weights: Mapping[str, Tensor], index: int) -> BucketNote:
        """Copy a bucket to all GPUs, or to shared memory; this overwrites the bucket before the last one.

        Args:
            weights: whole tensors on the CPU, by name.
            index: index of the bucket in its update.
        """
        if self._in_host_memory is None:
            try:
                return self._write_to_gpus(weights, index)
            except torch.OutOfMemoryError as error:
                logger.warning(
                    "rollout.engine=vllm: from now on, new weights reach the engine through host memory, which is "
                    "slower, because a GPU has no room for them: %s; to leave more room, lower "
                    "rollout.vllm.gpu_memory_utilization or set rollout.kv_cache_gb",
                    error,
                )
                self._in_host_memory = WeightBuffers()
        return self._in_host_memory.write(weights, index)

    def _write_to_gpus(self, weights: Mapping[str, Tensor], index: int) -> BucketNote:
        """Copy a bucket to all GPUs.

        Raises:
            torch.OutOfMemoryError: a GPU has no room for the buffer.
        """
        first_names = _first_names(weights)
        places, num_bytes = places_of({name: weights[name] for name in first_names.values()})
        slot = self._slot(index % NUM_BUFFERS, num_bytes)
        first, *others = slot.buffers
        total = sum(_sum_of_words(write_bytes(weights[name], first, offset)) for name, offset in places.items())
        for other in others:
            other[:num_bytes].copy_(first[:num_bytes])
        for device in self._devices:  # the reader has its own streams
            self._sharing.synchronize(device)
        all_places = {name: places[first_name] for name, first_name in first_names.items()}
        return describe(weights, all_places, num_bytes, index=index, digest=_as_text(total), handles=slot.handles)

    def end_update(self) -> None:
        """Free the buffers, which vLLM's processes have closed."""
        self._slots.clear()
        self._sharing.collect()

    def close(self) -> None:
        """Free the buffers."""
        self.end_update()
        if self._in_host_memory is not None:
            self._in_host_memory.close()

    def _slot(self, number: int, num_bytes: int) -> _Slot:
        """Return a buffer of at least this size on each device."""
        known = self._slots.get(number)
        if known is None or len(known.buffers[0]) < num_bytes:
            self._slots.pop(number, None)  # before the larger one is allocated
            size = max(num_bytes, _SMALLEST)
            buffers = [torch.empty(size, dtype=torch.uint8, device=device) for device in self._devices]
            handles = [self._sharing.export(buffer) for buffer in buffers]
            ids = [self._sharing.id_of(device) for device in self._devices]
            self._slots[number] = known = _Slot(buffers, dict(zip(ids, handles, strict=True)))
        return known


class DeviceReader:
    """vLLM's side of the buffers, on the GPU of one of its processes."""

    def __init__(self, device: torch.device, sharing: Sharing = CUDA_IPC) -> None:
        """Open nothing yet.

        Args:
            device: the GPU with the model, or this process's part of it.
            sharing: how the rank's buffers are opened.
        """
        self._device, self._sharing = device, sharing
        self._open: dict[int, tuple[list[Any], Tensor]] = {}

    def read(self, note: BucketNote, expected_index: int) -> dict[str, Tensor]:
        """Check a bucket and return views of its tensors, which change when the bucket after the next one is written.

        Args:
            note: the contents of the buffer.
            expected_index: number of buckets of this update that have arrived before.

        Raises:
            EngineError: the bucket is not the next one, is on other GPUs, can't be opened, or has another checksum.
        """
        check_index(note, expected_index)
        own = self._sharing.id_of(self._device)
        if (handle := note.handles.get(own)) is None:
            gpus = ", ".join(note.handles)
            raise EngineError(f"bucket {note.index} of the weights is on the GPU {gpus}, but the engine's is {own}")
        memory = self._opened(note.index % NUM_BUFFERS, handle, note.index)[: note.num_bytes]
        return checked_views(memory, note, checksum(memory))

    def end_update(self) -> None:
        """Close all buffers, so that the rank can free them."""
        self._open.clear()

    def _opened(self, number: int, handle: list[Any], index: int) -> Tensor:
        """Return all bytes of a buffer, uint8."""
        known = self._open.get(number)
        if known is None or known[0] != handle:
            self._open.pop(number, None)
            try:
                known = (handle, self._sharing.reopen(handle, self._device))
            except RuntimeError as error:
                raise EngineError(f"bucket {index} of the weights can't be opened by CUDA IPC: {error}") from None
            self._open[number] = known
        return known[1]


def _first_names(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name to the first name of the same tensor in memory; tied weights have several names."""
    first: dict[tuple[Any, ...], str] = {}
    return {
        name: first.setdefault((weight.data_ptr(), weight.dtype, weight.shape, weight.stride()), name)
        for name, weight in weights.items()
    }


def checksum(memory: Tensor) -> str:
    """Return the sum of 64-bit words modulo 2^64 as text, for uint8 [n] on any device; n is a multiple of 8.

    Any flipped bit changes it. It is computed without a copy to the CPU.
    """
    return _as_text(int(memory.view(torch.int64).sum().item()))


def _sum_of_words(data: Tensor) -> int:
    """Return the sum of the 64-bit words of uint8 [n] on the CPU, as if followed by zeros, modulo 2^64."""
    whole = len(data) // 8 * 8
    words = data[:whole].numpy().view(np.int64)  # which may be unaligned; PyTorch allows no such view
    return int(words.sum(dtype=np.int64)) + int.from_bytes(data[whole:].numpy().tobytes(), "little")


def _as_text(total: int) -> str:
    return f"{total % 2**64:016x}"

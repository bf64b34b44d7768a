"""Buckets in the memory of GPUs. Here a dictionary stands for CUDA's IPC; tests/gpu runs the real one."""

import inspect
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.device_buffers import DeviceBuffers, DeviceReader, Sharing, checksum
from rlpack.rollout.vllm.weight_buffers import BucketNote, BucketReader
from tests.unit.rollout.vllm.test_weight_buffers import DTYPES, SHAPES, same_bits, some_weights, values

CPU = torch.device("cpu")


class Ipc:
    """Buffers by a number; counts how often each is opened."""

    def __init__(self) -> None:
        self.exported: dict[int, Tensor] = {}
        self.opened: list[int] = []
        self.calls: list[str] = []

    def sharing(self, name: str = "GPU-1") -> Sharing:
        return Sharing(
            id_of=lambda device: name,
            export=self._export,
            reopen=self._reopen,
            synchronize=lambda device: self.calls.append("synchronize"),
            collect=lambda: self.calls.append("collect"),
        )

    def _export(self, buffer: Tensor) -> list[Any]:
        self.exported[number := len(self.exported)] = buffer
        return [number, len(buffer)]

    def _reopen(self, handle: list[Any], device: torch.device) -> Tensor:
        if handle[0] not in self.exported:
            raise RuntimeError("CUDA error: invalid resource handle")
        self.opened.append(handle[0])
        return self.exported[handle[0]]


def pair(ipc: Ipc) -> tuple[DeviceBuffers, DeviceReader]:
    return DeviceBuffers([CPU], ipc.sharing()), DeviceReader(CPU, ipc.sharing())


def test_every_dtype_and_shape_is_read_as_it_was_written():
    writer, reader = pair(Ipc())
    weights = {f"{dtype} {shape}": values(dtype, shape) for dtype in DTYPES for shape in SHAPES}
    read = reader.read(writer.write(weights, 0), 0)
    assert list(read) == list(weights)
    assert all(same_bits(read[name], weight) for name, weight in weights.items())


def test_views_and_empty_buckets_are_read_as_they_were_written():
    writer, reader = pair(Ipc())
    whole = torch.arange(24, dtype=torch.int16).view(4, 6)
    weights = {"odd place": whole.view(-1)[1:6], "turned": whole.t(), "none": torch.empty(0, 3)}
    read = reader.read(writer.write(weights, 0), 0)
    assert read["odd place"].tolist() == [1, 2, 3, 4, 5]
    assert read["turned"].tolist() == [[column + 6 * row for row in range(4)] for column in range(6)]
    assert read["none"].shape == (0, 3)
    assert reader.read(writer.write({}, 1), 1) == {}


def test_the_checksum_is_the_sum_of_64_bit_words_of_the_whole_bucket():
    writer = DeviceBuffers([CPU], Ipc().sharing())
    # Each weight begins at a multiple of 64 bytes; 3 bytes are part of one word.
    weights = {"a": torch.tensor([2**63 - 1, 2**62]), "b": torch.tensor([1, 0, 2], dtype=torch.uint8)}
    expected = (2**63 - 1 + 2**62 + 1 + (2 << 16)) % 2**64
    assert writer.write(weights, 0).digest == f"{expected:016x}"
    assert writer.write({"a": torch.tensor([-1, -1])}, 1).digest == "fffffffffffffffe"
    assert checksum(torch.full((16,), 255, dtype=torch.uint8)) == "fffffffffffffffe"


def test_a_bucket_is_read_until_the_one_after_the_next_is_written():
    writer, reader = pair(Ipc())
    sizes, read = (5, 40, 3, 200, 7), []
    for index, size in enumerate(sizes):
        read.append(reader.read(writer.write({"w": torch.full((size,), float(index))}, index), index)["w"])
        for back in (0, 1)[: index + 1]:
            assert read[index - back].tolist() == [float(index - back)] * sizes[index - back]
    assert writer.num_bytes == 64 + 832


def test_a_buffer_is_opened_once_per_export_and_closed_on_both_sides_between_updates():
    ipc = Ipc()
    writer, reader = pair(ipc)
    for index in range(6):
        reader.read(writer.write({"w": torch.full((8,), float(index))}, index), index)
    assert ipc.opened == [0, 1]
    assert ipc.calls == ["synchronize"] * 6
    reader.end_update()
    writer.end_update()
    assert writer.num_bytes == 0
    assert ipc.calls[6:] == ["collect"]
    assert reader.read(writer.write({"w": torch.ones(8)}, 0), 0)["w"].tolist() == [1.0] * 8
    assert ipc.opened == [0, 1, 2]


def test_every_gpu_of_the_engine_gets_the_bucket():
    ipc = Ipc()
    names = iter(("GPU-1", "GPU-2"))
    writer = DeviceBuffers([CPU, CPU], ipc.sharing()._replace(id_of=lambda device: next(names)))
    note = writer.write(some_weights(), 0)
    assert list(note.handles) == ["GPU-1", "GPU-2"]
    for name in ("GPU-1", "GPU-2"):
        read = DeviceReader(CPU, ipc.sharing(name)).read(note, 0)
        assert all(same_bits(read[key], weight) for key, weight in some_weights().items())
    assert ipc.opened == [0, 1]
    with pytest.raises(
        EngineError, match=r"^bucket 0 of the weights is on the GPU GPU-1, GPU-2, but the engine's is X$"
    ):
        DeviceReader(CPU, ipc.sharing("X")).read(note, 0)


def test_a_tied_weight_is_written_once_and_read_under_each_of_its_names():
    writer, reader = pair(Ipc())
    embedding, vector = torch.arange(64.0).view(8, 8), torch.arange(3)
    named = {"embedding": embedding, "head": embedding.detach(), "vector": vector, "turned": embedding.t()}
    note = writer.write(named, 0)
    assert note.num_bytes == writer.num_bytes == 256 + 256 + 64  # other strides are another weight
    assert note.offsets == [0, 0, 512, 256]
    read = reader.read(note, 0)
    assert list(read) == list(named)
    assert all(same_bits(read[name], weight) for name, weight in named.items())


def test_equal_weights_in_memory_of_their_own_are_written_both():
    writer, reader = pair(Ipc())
    note = writer.write({"a": torch.ones(16), "b": torch.ones(16)}, 0)
    assert (note.num_bytes, note.offsets) == (128, [0, 64])
    assert [weight.tolist() for weight in reader.read(note, 0).values()] == [[1.0] * 16] * 2


def test_buckets_go_through_shared_memory_once_a_gpu_has_no_room(caplog: pytest.LogCaptureFixture):
    ipc = Ipc()
    sharing, attempts = ipc.sharing(), []

    def export_small(buffer: Tensor) -> list[Any]:
        attempts.append(len(buffer))
        if len(buffer) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 B")
        return sharing.export(buffer)

    writer = DeviceBuffers([CPU], sharing._replace(export=export_small))
    on_gpu, on_cpu = DeviceReader(CPU, sharing), BucketReader()
    for update, expected in ((1, [True, False, False, False]), (2, [False] * 4)):
        read, are_on_gpu = [], []
        for index, size in enumerate((16, 32, 16, 16)):
            note = writer.write({"w": torch.full((size,), float(update))}, index)
            are_on_gpu.append(bool(note.handles))
            read.append((on_gpu if note.handles else on_cpu).read(note, index)["w"])
            for tensor in read[-2:]:
                assert tensor.unique().tolist() == [float(update)]
        assert are_on_gpu == expected
        on_gpu.end_update()
        writer.end_update()
        assert writer.num_bytes == 0
    assert attempts == [64, 128]
    (record,) = caplog.records
    assert re.search(
        r"through host memory, .* a GPU has no room for them: CUDA out of memory.* 128\.00 B; .*"
        r"rollout\.vllm\.gpu_memory_utilization",
        record.getMessage(),
    )
    writer.close()


def test_the_memory_of_buffers_returns_to_the_gpu_after_an_update(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    DeviceBuffers([CPU]).end_update()
    assert calls == ["ipc_collect", "empty_cache"]


def flip(position: int) -> Callable[[Ipc], None]:
    def flip_bit(ipc: Ipc) -> None:
        ipc.exported[0][position] ^= 1

    return flip_bit


def clear(ipc: Ipc) -> None:
    ipc.exported[0].zero_()


@pytest.mark.parametrize("damage", [flip(0), flip(66), flip(50), flip(-1), clear])
@pytest.mark.parametrize("is_open", [False, True], ids=["the first bucket", "a later bucket"])
def test_a_damaged_buffer_is_refused_and_its_bucket_named(damage: Callable[[Ipc], None], is_open: bool):
    ipc = Ipc()
    writer, reader = pair(ipc)
    if is_open:
        reader.read(writer.write(some_weights(), 0), 0)
    note = writer.write(some_weights(), 2)
    damage(ipc)
    with pytest.raises(
        EngineError, match=r"^bucket 2 of the weights was corrupted in transit: its digest is \w+, not \w+$"
    ):
        reader.read(note, 2)


def test_the_other_buffers_bucket_of_the_same_size_is_refused():
    writer, reader = pair(Ipc())
    first, second = writer.write({"w": torch.zeros(8)}, 0), writer.write({"w": torch.ones(8)}, 1)
    with pytest.raises(EngineError, match="bucket 1 of the weights was corrupted in transit"):
        reader.read(replace(second, handles=first.handles), 1)


@pytest.mark.parametrize("expected", [0, 2, 3])
def test_a_bucket_out_of_its_order_is_refused_before_it_is_opened(expected: int):
    note = BucketNote("", 1, [], [], [], [], 64, "", {"GPU-1": [0, 64]})
    with pytest.raises(EngineError, match=rf"bucket 1 of the weights arrived where bucket {expected} was expected"):
        DeviceReader(CPU, Ipc().sharing()).read(note, expected)


def test_a_buffer_that_cant_be_opened_is_an_error_with_cudas_reason():
    note = BucketNote("", 0, [], [], [], [], 64, "", {"GPU-1": [7, 64]})
    with pytest.raises(EngineError, match=re.escape("bucket 0 of the weights can't be opened by CUDA IPC: CUDA error")):
        DeviceReader(CPU, Ipc().sharing()).read(note, 0)


def test_a_note_survives_as_a_dictionary():
    note = DeviceBuffers([CPU], Ipc().sharing()).write(some_weights(), 0)
    assert BucketNote(**asdict(note)) == note


def test_pytorchs_arguments_of_a_shared_buffer_have_the_order_that_handles_rely_on():
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names[:7] == [
        *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device")
    ]
    assert names[7:9] == ["storage_handle", "storage_size_bytes"]

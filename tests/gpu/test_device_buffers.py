"""CUDA IPC between two processes, with PyTorch alone: what is read is what was written, and no memory stays."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.device_buffers import DeviceBuffers, DeviceReader
from rlpack.rollout.vllm.weight_buffers import BucketNote, BucketReader
from tests.unit.rollout.vllm.test_weight_buffers import DTYPES, SHAPES, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEADLINE_S = 120.0


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_buckets(pipe: Connection) -> None:
    """Answer each note with the bytes of the bucket's weights, or an error; None ends an update."""
    reader = DeviceReader(torch.device("cuda", 0))
    while (message := pipe.recv()) != "end":
        if message is None:
            reader.end_update()
            pipe.send("closed")
            continue
        try:
            note = BucketNote(**message)
            pipe.send({name: as_bytes(tensor) for name, tensor in reader.read(note, note.index).items()})
        except EngineError as error:
            pipe.send(str(error))


@pytest.fixture(scope="module")
def reader() -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_buckets, args=(theirs,), daemon=True)
    process.start()
    yield ours
    ours.send("end")
    process.join(DEADLINE_S)


def ask(pipe: Connection, message: Any) -> Any:
    pipe.send(message)
    assert pipe.poll(DEADLINE_S), "the other process doesn't answer"
    return pipe.recv()


def test_every_dtype_and_shape_is_read_in_another_process_as_it_was_written(reader: Connection):
    buffers = DeviceBuffers([torch.device("cuda", 0)])
    weights = {f"{dtype} {shape}": values(dtype, shape) for dtype in DTYPES for shape in SHAPES}
    assert ask(reader, asdict(buffers.write(weights, 0))) == {name: as_bytes(weights[name]) for name in weights}
    assert ask(reader, None) == "closed"
    buffers.end_update()


def test_updates_of_many_buckets_arrive_and_free_their_memory(reader: Connection):
    buffers, before = DeviceBuffers([torch.device("cuda", 0)]), torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    for update in range(5):
        for index, size in enumerate((1000, 3_000_000, 20, 4_000_000, 5)):
            weight = torch.arange(size, dtype=torch.float32) + update
            assert ask(reader, asdict(buffers.write({"w": weight}, index))) == {"w": as_bytes(weight)}
        assert ask(reader, None) == "closed"
        buffers.end_update()
        assert torch.cuda.memory_allocated() == before, f"after update {update}"
        assert torch.cuda.memory_reserved() == reserved, f"after update {update}"


def test_a_tied_weight_is_copied_once_and_read_under_both_names(reader: Connection):
    buffers = DeviceBuffers([torch.device("cuda", 0)])
    weight = torch.arange(4096.0).view(64, 64)
    note = buffers.write({"embedding": weight, "head": weight}, 0)
    assert buffers.num_bytes == weight.nbytes
    assert ask(reader, asdict(note)) == {"embedding": as_bytes(weight), "head": as_bytes(weight)}
    assert ask(reader, None) == "closed"
    buffers.end_update()


def test_a_bucket_for_which_the_gpu_has_no_room_goes_through_shared_memory(reader: Connection):
    buffers, weights = DeviceBuffers([torch.device("cuda", 0)]), {"w": torch.arange(50_000_000)}
    assert ask(reader, asdict(buffers.write({"small": torch.ones(2)}, 0))) == {"small": as_bytes(torch.ones(2))}
    torch.cuda.set_per_process_memory_fraction(100_000_000 / torch.cuda.get_device_properties(0).total_memory)
    try:
        note = buffers.write(weights, 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert note.handles == {}
    assert BucketReader().read(note, 1)["w"].equal(weights["w"])
    assert ask(reader, None) == "closed"
    buffers.end_update()
    assert buffers.write({"small": torch.ones(2)}, 0).handles == {}
    buffers.close()


def test_a_bit_that_flips_in_the_gpus_memory_is_named(reader: Connection):
    buffers = DeviceBuffers([torch.device("cuda", 0)])
    note = buffers.write({"w": torch.arange(1024)}, 2)
    buffers._slots[0].buffers[0][4096] ^= 1
    torch.cuda.synchronize()
    assert "bucket 2 of the weights was corrupted in transit" in ask(reader, asdict(note))
    assert ask(reader, None) == "closed"
    buffers.end_update()


def test_the_checksum_of_a_gpu_is_that_of_the_cpu():
    buffers = DeviceBuffers([torch.device("cuda", 0)])
    weight = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1 << 20))
    digest = int(buffers.write({"w": weight}, 0).digest, 16)
    assert digest == sum(weight.tolist()) % 2**64
    buffers.close()

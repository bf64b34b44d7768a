"""Buckets of weights in shared memory: what is read is what was written, and a damaged buffer is refused."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.weight_buffers import BucketNote, BucketReader, WeightBuffers

DTYPES = ("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "int8", "uint8", "bool")
SHAPES = ((3, 4), (12,), (1, 1, 5), (7,))


def values(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of random bits, NaNs of all kinds included; 0 and 1 for booleans."""
    wide = torch.randint(256, (*shape, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(len(shape)))
    kind = vars(torch)[dtype]
    return (
        wide[..., 0] < 128
        if kind == torch.bool
        else wide.view(-1)[: -(-wide.numel() // 8) * kind.itemsize].view(kind).view(shape)
    )


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    alike = (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
    return alike and tensor.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))


def some_weights() -> dict[str, Tensor]:
    return {"first": torch.arange(10.0), "second": torch.ones(3, 3), "third": torch.tensor([7])}


@pytest.fixture
def buffers() -> Iterator[WeightBuffers]:
    made = WeightBuffers()
    yield made
    made.close()


def test_every_dtype_and_shape_is_read_as_it_was_written(buffers: WeightBuffers):
    weights = {f"{dtype} {shape}": values(dtype, shape) for dtype in DTYPES for shape in SHAPES}
    note = buffers.write(weights, 0)
    read = BucketReader().read(note, 0)
    assert list(read) == list(weights)
    assert all(same_bits(read[name], weight) for name, weight in weights.items())
    assert all(offset % 64 == 0 for offset in note.offsets)


@pytest.mark.parametrize(
    "weights",
    [
        {"none": torch.empty(0)},
        {"no rows": torch.empty(0, 4, dtype=torch.bfloat16), "a number": torch.tensor(2.5)},
        {"a number": torch.tensor(3, dtype=torch.int64)},
        {"before": torch.tensor([1.0]), "none": torch.empty(3, 0), "after": torch.tensor([2.0])},
        {},
    ],
    ids=lambda weights: ", ".join(weights) or "no weights",
)
def test_empty_tensors_and_single_numbers_are_read_as_they_were_written(buffers, weights: dict[str, Tensor]):
    read = BucketReader().read(buffers.write(weights, 0), 0)
    assert list(read) == list(weights)
    assert all(same_bits(read[name], weight) for name, weight in weights.items())


def test_a_view_is_written_in_the_order_of_its_elements(buffers: WeightBuffers):
    whole = torch.arange(24.0).view(4, 6)
    weights = {"turned": whole.t(), "every other": whole[:, ::2], "repeated": torch.tensor([5.0]).expand(3)}
    read = BucketReader().read(buffers.write(weights, 0), 0)
    assert read["turned"].tolist() == [[float(column + 6 * row) for row in range(4)] for column in range(6)]
    assert read["every other"].tolist() == [[float(6 * row + column) for column in (0, 2, 4)] for row in range(4)]
    assert read["repeated"].tolist() == [5.0] * 3


def test_matrices_lie_one_after_the_other_whatever_comes_between_them(buffers: WeightBuffers):
    weights = {"q": torch.ones(2, 16), "q bias": torch.ones(3), "k": torch.ones(1, 16), "v": torch.ones(1, 16)}
    note = buffers.write(weights, 0)
    assert dict(zip(note.names, note.offsets, strict=True)) == {"q": 0, "k": 128, "v": 192, "q bias": 256}


def test_a_bucket_is_read_until_the_one_after_the_next_is_written(buffers: WeightBuffers):
    reader = BucketReader()
    sizes, read = (5, 40, 3, 200, 7), []
    for index, size in enumerate(sizes):
        read.append(reader.read(buffers.write({"w": torch.full((size,), float(index))}, index), index)["w"])
        for back in (0, 1)[: index + 1]:
            assert read[index - back].tolist() == [float(index - back)] * sizes[index - back]
    assert buffers.num_bytes == 64 + 832


def test_a_smaller_bucket_leaves_the_size_of_the_buffers(buffers: WeightBuffers):
    for index, size in enumerate((16, 32, 48, 16, 16)):
        buffers.write({"w": torch.zeros(size)}, index)
    assert buffers.num_bytes == 4 * (48 + 32)


def test_a_second_pair_of_buffers_under_the_same_path_is_read_anew():
    reader, first = BucketReader(), WeightBuffers()
    path = first.write({"w": torch.zeros(8)}, 0).path
    reader.read(first.write({"w": torch.zeros(8)}, 0), 0)
    first.close()
    second = WeightBuffers()
    note = second.write({"w": torch.ones(8)}, 0)
    assert note.path == path  # the kernel gives the lowest free number
    assert reader.read(note, 0)["w"].tolist() == [1.0] * 8
    second.close()


def test_what_a_reader_writes_into_its_tensors_reaches_nobody_else(buffers: WeightBuffers):
    note = buffers.write(some_weights(), 0)
    BucketReader().read(note, 0)["first"].zero_()
    assert BucketReader().read(note, 0)["first"].tolist() == [float(number) for number in range(10)]


def test_tensors_outlive_the_buffers(buffers: WeightBuffers):
    note = buffers.write(some_weights(), 0)
    read = BucketReader().read(note, 0)
    buffers.close()
    assert not Path(note.path).exists()
    assert read["first"].tolist() == [float(number) for number in range(10)]
    buffers.close()  # a second time changes nothing


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(position: int) -> Callable[[Path], None]:
    def flip_bit(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        with path.open("r+b") as file:
            file.write(data)

    return flip_bit


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(cut, r"has 191 bytes in \S+, not 192", id="cut"),
        pytest.param(lambda path: os.truncate(path, 0), r"has 0 bytes in \S+, not 192", id="emptied"),
        pytest.param(flip(0), "corrupted in transit: its digest is", id="the first bit"),
        pytest.param(flip(66), "corrupted in transit: its digest is", id="a bit in the middle"),
        pytest.param(flip(50), "corrupted in transit: its digest is", id="a bit between two tensors"),
        pytest.param(flip(-1), "corrupted in transit: its digest is", id="the last bit"),
    ],
)
@pytest.mark.parametrize("is_known", [False, True], ids=["the first bucket", "a later bucket"])
def test_a_damaged_buffer_is_refused_and_its_bucket_named(
    buffers: WeightBuffers, damage: Callable[[Path], None], words: str, is_known: bool
):
    reader = BucketReader()
    if is_known:
        reader.read(buffers.write(some_weights(), 0), 0)
    note = buffers.write(some_weights(), 2)
    damage(Path(note.path))
    with pytest.raises(EngineError, match=rf"^bucket 2 of the weights .*{words}"):
        reader.read(note, 2)


def test_a_buffer_whose_rank_has_given_it_up_is_refused(buffers: WeightBuffers):
    note = buffers.write(some_weights(), 2)
    buffers.close()
    with pytest.raises(EngineError, match=r"^bucket 2 of the weights can't be read from .*No such file"):
        BucketReader().read(note, 2)


def test_the_other_buffers_bucket_of_the_same_size_is_refused(buffers: WeightBuffers):
    first, second = buffers.write({"w": torch.zeros(8)}, 0), buffers.write({"w": torch.ones(8)}, 1)
    with pytest.raises(EngineError, match="bucket 1 of the weights was corrupted in transit"):
        BucketReader().read(replace(second, path=first.path), 1)


@pytest.mark.parametrize("expected", [0, 2, 3])
def test_a_bucket_out_of_its_order_is_refused_before_it_is_read(expected: int):
    note = BucketNote("/nowhere", 1, [], [], [], [], 1, "")
    with pytest.raises(EngineError, match=rf"bucket 1 of the weights arrived where bucket {expected} was expected"):
        BucketReader().read(note, expected)


WRITER = """
import sys, torch
from rlpack.rollout.vllm.weight_buffers import WeightBuffers
buffers, index = WeightBuffers(), 0
while True:
    note = buffers.write({"w": torch.full((1 << 20,), float(index))}, index)
    if index == 3:
        print(note.path, flush=True)
    index += 1
"""


def shared_memory_of(pid: int) -> set[str]:
    """Return the inodes of the buffers that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:rlpack-weights" in line}


def mapped_anywhere() -> set[str]:
    """Return the inodes of the buffers that any process has mapped."""
    found: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found |= shared_memory_of(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def test_a_rank_that_is_killed_in_the_middle_of_a_bucket_leaves_no_memory():
    files = set(Path("/dev/shm").iterdir())
    writer = subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        path = writer.stdout.readline().strip()
        inodes = shared_memory_of(writer.pid)
        assert len(inodes) == 2
        assert os.stat(path).st_size == 1 << 22
        assert inodes <= mapped_anywhere()
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    assert not Path(path).exists()
    assert not inodes & mapped_anywhere()
    assert not {file.name for file in set(Path("/dev/shm").iterdir()) - files if "rlpack-weights" in file.name}

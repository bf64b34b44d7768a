"""Buckets of weights in files: what is read is what was written, and a file that was damaged is refused."""

import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm import weight_files
from rlpack.rollout.vllm.weight_files import PREFIX, SHARED_MEMORY, BucketNote, mapped, written

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


def test_every_dtype_and_shape_is_read_as_it_was_written():
    weights = {f"{dtype} {shape}": values(dtype, shape) for dtype in DTYPES for shape in SHAPES}
    with written(weights, 0) as note:
        read = mapped(note, 0)
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
def test_empty_tensors_and_single_numbers_are_read_as_they_were_written(weights: dict[str, Tensor]):
    with written(weights, 0) as note:
        read = mapped(note, 0)
    assert list(read) == list(weights)
    assert all(same_bits(read[name], weight) for name, weight in weights.items())


def test_a_view_is_written_in_the_order_of_its_elements():
    whole = torch.arange(24.0).view(4, 6)
    weights = {"turned": whole.t(), "every other": whole[:, ::2], "repeated": torch.tensor([5.0]).expand(3)}
    with written(weights, 0) as note:
        read = mapped(note, 0)
    assert read["turned"].tolist() == [[float(column + 6 * row) for row in range(4)] for column in range(6)]
    assert read["every other"].tolist() == [[float(6 * row + column) for column in (0, 2, 4)] for row in range(4)]
    assert read["repeated"].tolist() == [5.0] * 3


def test_the_file_is_in_shared_memory_and_gone_after_its_block_while_its_tensors_live():
    before = set(SHARED_MEMORY.glob(f"{PREFIX}*"))
    with written(some_weights(), 3) as note:
        assert set(SHARED_MEMORY.glob(f"{PREFIX}*")) - before == {Path(note.path)}
        assert os.stat(note.path).st_mode & 0o077 == 0  # nobody else reads the weights
        read = mapped(note, 3)
    assert not Path(note.path).exists()
    assert read["first"].tolist() == [float(number) for number in range(10)]


def test_the_file_is_gone_after_an_error_in_its_block():
    with pytest.raises(KeyError), written(some_weights(), 0) as note:
        raise KeyError
    assert not Path(note.path).exists()


def test_what_a_reader_writes_into_its_tensors_reaches_nobody_else():
    with written(some_weights(), 0) as note:
        mapped(note, 0)["first"].zero_()
        assert mapped(note, 0)["first"].tolist() == [float(number) for number in range(10)]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 64)


def flip(position: int) -> Callable[[Path], None]:
    def flip_bit(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    return flip_bit


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(cut, r"has 191 bytes in \S+, not 192", id="cut"),
        pytest.param(extend, r"has 256 bytes in \S+, not 192", id="extended"),
        pytest.param(lambda path: os.truncate(path, 0), r"has 0 bytes in \S+, not 192", id="emptied"),
        pytest.param(Path.unlink, "can't be read from .*No such file", id="missing"),
        pytest.param(flip(0), "changed on its way: its digest is", id="the first bit"),
        pytest.param(flip(66), "changed on its way: its digest is", id="a bit in the middle"),
        pytest.param(flip(50), "changed on its way: its digest is", id="a bit between two tensors"),
        pytest.param(flip(-1), "changed on its way: its digest is", id="the last bit"),
    ],
)
def test_a_file_that_was_damaged_is_refused_and_its_bucket_named(damage: Callable[[Path], None], words: str):
    with written(some_weights(), 2) as note:
        damage(Path(note.path))
        with pytest.raises(EngineError, match=rf"^bucket 2 of the weights .*{words}"):
            mapped(note, 2)


def test_another_buckets_file_of_the_same_size_is_refused():
    refused = pytest.raises(EngineError, match="bucket 1 of the weights was changed on its way")
    with written({"w": torch.zeros(8)}, 0) as first, written({"w": torch.ones(8)}, 1) as second, refused:
        mapped(replace(second, path=first.path), 1)


@pytest.mark.parametrize("expected", [0, 2, 3])
def test_a_bucket_out_of_its_order_is_refused_before_its_file_is_read(expected: int):
    note = BucketNote("/nowhere", 1, [], [], [], [], 1, "")
    with pytest.raises(EngineError, match=rf"bucket 1 of the weights arrived where bucket {expected} was expected"):
        mapped(note, expected)


@pytest.mark.parametrize("free", [None, 200])
def test_too_little_shared_memory_means_a_file_elsewhere_and_a_warning(
    free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def disk_usage(path: Path) -> object:
        assert path == SHARED_MEMORY
        if free is None:
            raise FileNotFoundError(path)
        return type("Usage", (), {"free": free})

    monkeypatch.setattr(weight_files.shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING), written(some_weights(), 0) as note:
        assert Path(note.path).parent == tmp_path
        assert mapped(note, 0)["second"].tolist() == [[1.0] * 3] * 3
    assert "/dev/shm has" in caplog.text
    assert "--shm-size" in caplog.text
    assert not list(tmp_path.iterdir())


def test_shared_memory_that_holds_two_buckets_is_enough(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(weight_files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 384}))
    with written(some_weights(), 0) as note:
        assert Path(note.path).parent == SHARED_MEMORY
    assert not caplog.records

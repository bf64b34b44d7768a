"""Reading parts of safetensors files: their values, and how many bytes are read and held for them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlpack.models import weight_files
from rlpack.models.weight_files import WeightFiles
from tests.memory_rise import MIB, MemoryRise

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


def saved(folder: Path, **tensors: Tensor) -> Path:
    save_file(tensors, folder / "some.safetensors")
    return folder / "some.safetensors"


def bytes_read() -> int:
    """Return how many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_part_of_any_tensor_has_the_files_values(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4), label="shape")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    numbers = torch.randint(0, 100, shape).to(dtype)
    path = saved(tmp_path_factory.mktemp("files"), other=torch.ones(3), numbers=numbers)
    starts = [data.draw(st.integers(0, size)) for size in shape]
    stops = [data.draw(st.integers(start, size)) for start, size in zip(starts, shape, strict=True)]
    place = tuple(map(slice, starts, stops))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "_BLOCK_BYTES", data.draw(st.sampled_from([8, 32, 256]), label="block"))
        patch.setattr(weight_files, "_RUN_BYTES", data.draw(st.sampled_from([1, 16, 256]), label="run"))
        part = torch.full_like(numbers[place], 77, dtype=torch.float64)
        WeightFiles([path]).read_into("numbers", part, starts)
    assert torch.equal(part, load_file(path)["numbers"][place].to(torch.float64))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's count of bytes read")
@pytest.mark.parametrize(
    ("shape", "place"),
    [
        ((4096, 8192), (slice(512, 1024),)),
        ((4096, 8192), (slice(0, 4096),)),
        ((16, 1024, 2048), (slice(2, 4),)),
        ((16, 1024, 2048), (slice(0, 16), slice(256, 512))),
        ((64, 256, 1024), (slice(0, 64), slice(32, 64))),
        ((1, 4096, 8192), (slice(0, 1), slice(1024, 1536))),
    ],
    ids=["rows", "whole", "experts", "rows of experts", "few rows of experts", "rows of one entry"],
)
def test_a_part_costs_its_own_bytes_and_a_block(tmp_path: Path, shape: tuple[int, ...], place: tuple[slice, ...]):
    rise, path = MemoryRise(), saved(tmp_path, whole=torch.zeros(shape, dtype=torch.bfloat16))
    starts = [part.start for part in place] + [0] * (len(shape) - len(place))
    part = torch.ones([each.stop - each.start for each in place] + list(shape[len(place) :]), dtype=torch.bfloat16)
    files = WeightFiles([path])
    before = bytes_read()
    rise.start()
    files.read_into("whole", part, starts)
    needed = part.numel() * part.element_size()
    assert bytes_read() - before < needed + MIB
    assert rise.num_bytes < 66 * MIB
    assert not part.any()


def test_equal_compares_values_of_any_shape_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weight_files, "_BLOCK_BYTES", 64)
    one = torch.arange(100.0).reshape(20, 5)
    last = one.clone()
    last[-1, -1] += 1
    path = saved(
        tmp_path,
        one=one,
        same=one.clone(),
        half=one.bfloat16(),
        small=one.to(torch.float8_e4m3fn),
        last=last,
        shape=one.reshape(5, 20).clone(),
    )
    scalars = {"scalar": torch.tensor(2.0), "equal scalar": torch.tensor(2.0), "other scalar": torch.tensor(3.0)}
    save_file(scalars, tmp_path / "scalars.safetensors")
    files = WeightFiles([path, tmp_path / "scalars.safetensors"])
    assert [files.equal("one", other) for other in ("same", "half", "last", "shape")] == [True, True, False, False]
    assert not files.equal("half", "small")  # e4m3 has no 17
    assert [files.equal("scalar", other) for other in ("equal scalar", "other scalar")] == [True, False]


def test_a_file_that_is_replaced_is_still_read_whole_and_one_that_is_cut_is_an_error(tmp_path: Path):
    path = saved(tmp_path, numbers=torch.arange(1000.0))
    files = WeightFiles([path])
    save_file({"numbers": torch.zeros(7)}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    assert torch.equal(files.read("numbers", torch.float32), torch.arange(1000.0))
    path = saved(tmp_path, numbers=torch.arange(1000.0))
    files = WeightFiles([path])
    os.truncate(path, 1000)
    with pytest.raises(OSError, match=r"some.safetensors ends after 1000 bytes; it was cut after it was opened"):
        files.read("numbers", torch.float32)
    with pytest.raises(SafetensorError):
        WeightFiles([path])


def test_only_reading_a_tensor_of_an_unknown_dtype_is_an_error(tmp_path: Path):
    header: dict[str, Any] = {
        "scale": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]},
        "weight": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    }
    text = json.dumps(header).encode()
    numbers = bytes(4) + torch.ones(1).numpy().tobytes()
    (tmp_path / "some.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + numbers)
    files = WeightFiles([tmp_path / "some.safetensors"])
    assert files.shapes == {"scale": (8,), "weight": (1,)}
    assert files.read("weight", torch.float32).tolist() == [1.0]
    with pytest.raises(ValueError, match=r"some.safetensors has a tensor of the dtype F4; only F64, F32, "):
        files.read("scale", torch.float32)

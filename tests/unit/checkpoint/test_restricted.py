"""Checkpoints that someone made to run code; each hostile file leaves a mark if its code runs."""

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.restricted import read_index
from rlpack.checkpoint.sharded import load_training_state, save_training_state
from rlpack.config.sections.optimization import Optimizer
from rlpack.gloo import GLOO
from rlpack.models.optimizers import build_optimizer


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(GLOO, init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Noted(torch.nn.Module):
    """A module with a value that isn't a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"note": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"note": 1}


def training(*, sharded: bool = False, optimizer: Any = "adamw", seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 2, dtype=torch.bfloat16), Noted())
    model[0].requires_grad_(True)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    trained = build_optimizer(model, Optimizer(name=optimizer, learning_rate=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * (seed + 1)
    trained.step()
    return model, trained


def index_of(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor and value by its name."""
    entries = {key.fqn: entry for key, entry in index_of(folder).storage_data.items()}
    files = {name: (folder / name).read_bytes() for name in {entry.relative_path for entry in entries.values()}}
    return {
        name: files[entry.relative_path][entry.offset : entry.offset + entry.length] for name, entry in entries.items()
    }


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_training_state(*training(), tmp_path / "state")
    return tmp_path / "state"


def refused(folder: Path, match: str) -> None:
    model, optimizer = training(seed=1)
    with pytest.raises(CheckpointError, match=match):
        load_training_state(model, optimizer, folder)
    assert not (folder.parent / "mark").exists()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_everything_that_training_writes_can_be_read(
    tmp_path: Path, sharded: bool, optimizer: str, request: pytest.FixtureRequest
):
    if optimizer == "adamw_8bit":
        request.getfixturevalue("eight_bit")
    saved = training(sharded=sharded, optimizer=optimizer)
    save_training_state(*saved, tmp_path / "state")
    loaded = training(sharded=sharded, optimizer=optimizer, seed=1)
    load_training_state(*loaded, tmp_path / "state")
    for one, other in zip(saved[0].parameters(), loaded[0].parameters(), strict=True):
        assert torch.equal(one, other)
    save_training_state(*loaded, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "state")


def test_an_index_that_runs_code_is_refused_before_it_runs(saved: Path):
    (saved / ".metadata").write_bytes(pickle.dumps(Hostile(saved.parent / "mark")))
    refused(saved, r"\.metadata contains (posix|os)\.mkdir, which no checkpoint of weights needs")


@pytest.mark.parametrize("place", ["planner_data", "version", "storage_data"])
def test_code_inside_an_otherwise_right_index_is_refused(saved: Path, place: str):
    index = index_of(saved)
    setattr(index, place, {"key": Hostile(saved.parent / "mark")})
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    refused(saved, r"\.metadata contains (posix|os)\.mkdir")


@pytest.mark.parametrize("name", ["torch.load", "builtins.eval", "torch.distributed.checkpoint.metadata.os.system"])
def test_nothing_is_found_next_to_the_allowed_classes(tmp_path: Path, name: str):
    module, _, member = name.rpartition(".")
    if "metadata" in name:  # a dotted name, as pickle's protocol 4 follows it
        module, member = "torch.distributed.checkpoint.metadata", "os.system"
    opcodes = [b"\x80\x04"]
    opcodes += [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, member)]
    (tmp_path / ".metadata").write_bytes(b"".join([*opcodes, b"\x93."]))
    with pytest.raises(CheckpointError, match=rf"\.metadata contains {name}, which"):
        read_index(tmp_path)


def of_kind(index: Metadata, kind: type) -> MetadataIndex:
    keys = (key for key in index.storage_data if key.fqn.startswith("model."))  # groups of the optimizer aren't read
    return next(key for key in keys if isinstance(index.state_dict_metadata[key.fqn], kind))


@pytest.mark.parametrize("kind", [BytesStorageMetadata, TensorStorageMetadata])
def test_a_value_or_tensor_that_runs_code_is_refused_before_it_runs(saved: Path, kind: type):
    index, stream = index_of(saved), io.BytesIO()
    torch.save(Hostile(saved.parent / "mark"), stream)
    (saved / "__0_1.distcp").write_bytes(stream.getvalue())
    entry = index.storage_data[of_kind(index, kind)]
    entry.relative_path, entry.offset, entry.length = "__0_1.distcp", 0, len(stream.getvalue())
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    refused(saved, r"state/__0_1\.distcp contains (posix|os)\.mkdir, which")


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", "..", "", 7])
def test_an_index_that_names_files_elsewhere_is_refused(saved: Path, name: Any):
    index = index_of(saved)
    next(iter(index.storage_data.values())).relative_path = name
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    refused(saved, r"\.metadata refers to .*, which isn't a file of its folder")


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps({"a": 1}), b"\x80\x04\x8cQ.", pickle.dumps(None)])
def test_an_index_that_is_none_is_refused(saved: Path, content: bytes):
    (saved / ".metadata").write_bytes(content)
    refused(saved, r"\.metadata isn't an index of a distributed checkpoint")


def test_an_index_of_another_version_of_python_is_read(saved: Path):
    expected, path = read_index(saved), saved / ".metadata"
    index = path.read_bytes()
    names = (b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")  # the latter in Python 3.13
    here, there = names if names[0] in index else names[::-1]
    assert index.count(here) == 1
    size = int.from_bytes(index[3:11], "little") + len(there) - len(here)  # of the frame around all opcodes
    moved = index[11:].replace(here, there)
    path.write_bytes(index[:3] + size.to_bytes(8, "little") + moved)
    assert read_index(saved).storage_data == expected.storage_data

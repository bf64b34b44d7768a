"""Ranks hash the files that they write; the process that publishes them hashes only the others."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlpack.checkpoint import publish
from rlpack.checkpoint.background import BackgroundSaver
from rlpack.checkpoint.commit import new_checkpoint, newest
from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.model_folder import new_model_folder
from rlpack.checkpoint.rank_hashes import record_hashes
from rlpack.checkpoint.sharded import save_training_state
from tests.unit.checkpoint.test_sharded import one_rank, training

__all__ = ["one_rank"]


def save_now(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    save_training_state(model, optimizer, folder)


def save_in_background(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    saver = BackgroundSaver()
    saver.start(model, optimizer, folder, timeout_s=60)
    saver.wait(60)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("save", [save_now, save_in_background])
def test_a_commit_reads_no_file_that_a_rank_has_written(
    tmp_path: Path, save: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    hashed_by_driver: list[str] = []

    def sha256_of(path: Path) -> str:
        hashed_by_driver.append(path.name)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(publish, "sha256_of", sha256_of)
    with new_checkpoint(tmp_path, 1) as staging:
        save(*training(), staging.path / "actor")
        staging.commit({})
    assert sorted(hashed_by_driver) == [".metadata", "state.json"]
    folder = tmp_path / "step-1"
    assert newest(tmp_path) == folder
    entries = {entry["name"]: entry for entry in json.loads((folder / "manifest.json").read_bytes())["files"]}
    written = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert entries.keys() == written.keys() - {"manifest.json", "COMMITTED"}
    assert any(name.endswith(".distcp") for name in entries)
    for name, entry in entries.items():
        assert (entry["size"], entry["sha256"]) == (len(written[name]), hashlib.sha256(written[name]).hexdigest())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("cut"), r"model.safetensors has 3 bytes here, but its rank wrote 8 bytes"),
        (
            lambda path: path.unlink(),
            r"model.safetensors is missing here, but its rank wrote 8 bytes; use storage that",
        ),
        (lambda path: path.with_name(".hashes-0.json").write_text("{"), r"the hashes in .*\.hashes-0\.json can't be"),
    ],
)
def test_a_folder_that_differs_from_what_its_ranks_wrote_is_not_published(
    tmp_path: Path, change: Callable[[Path], object], message: str
):
    def write() -> None:
        with new_model_folder(tmp_path / "model") as staging:
            staging.mkdir()
            path = staging / "model.safetensors"
            path.write_text("complete")
            record_hashes(staging, 0, [path.name])
            change(path)

    with pytest.raises(CheckpointError, match=message):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_files_records_nothing(tmp_path: Path):
    record_hashes(tmp_path, 3, [])
    assert list(tmp_path.iterdir()) == []

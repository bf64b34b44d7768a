import hashlib
import json
import os
from pathlib import Path

import pytest

from rlpack.checkpoint.errors import CheckpointError
from rlpack.checkpoint.model_folder import new_model_folder


def write(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_text(text)


def test_a_folder_has_the_hashes_of_its_files_and_replaces_an_earlier_one(tmp_path: Path):
    target = tmp_path / "model"
    for text in ("first", "second"):
        with new_model_folder(target) as staging:
            write(staging, text)
            assert staging.parent == tmp_path
        assert (target / "model.safetensors").read_text() == text
        manifest = (target / "manifest.json").read_bytes()
        assert (target / "COMMITTED").read_text().strip() == hashlib.sha256(manifest).hexdigest()
        (entry,) = json.loads(manifest)["files"]
        assert entry == {
            "name": "model.safetensors",
            "size": len(text),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def run_out_of_space(target: Path) -> None:
    with new_model_folder(target) as staging:
        write(staging, "second")
        raise OSError(28, "No space left on device")


def test_a_failed_export_leaves_the_earlier_folder_alone(tmp_path: Path):
    target = tmp_path / "model"
    with new_model_folder(target) as staging:
        write(staging, "first")
    with pytest.raises(CheckpointError, match=r"could not be written to .*/model: .*No space left"):
        run_out_of_space(target)
    assert (target / "model.safetensors").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("checks_passed", [0, 1])
def test_a_parent_that_is_another_processs_by_now_is_left_alone(tmp_path: Path, checks_passed: int):
    passed = iter(range(checks_passed))

    def check() -> None:
        if next(passed, None) is None:
            raise RuntimeError("another process has it")

    target = tmp_path / "model"
    write(target, "theirs")
    (tmp_path / ".tmp-model-theirs").mkdir()

    def export() -> None:
        with new_model_folder(target, check=check) as staging:
            write(staging, "ours")

    with pytest.raises(RuntimeError, match="another process has it"):
        export()
    assert (target / "model.safetensors").read_text() == "theirs"
    left = {"model"} if checks_passed else {"model", ".tmp-model-theirs"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_what_a_killed_export_left_is_deleted_by_the_next(tmp_path: Path):
    target = tmp_path / "model"
    if (child := os.fork()) == 0:
        context = new_model_folder(target)
        write(context.__enter__(), "half")
        os._exit(9)
    os.waitpid(child, 0)
    assert not target.exists()
    with new_model_folder(target) as staging:
        write(staging, "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_a_killed_export_had_put_aside_gets_its_name_back(tmp_path: Path):
    target = tmp_path / "model"
    write(tmp_path / ".replaced-model-1234", "first")
    with pytest.raises(CheckpointError, match="No space left"):
        run_out_of_space(target)
    assert (target / "model.safetensors").read_text() == "first"


def test_a_failed_rename_leaves_the_earlier_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target, rename = tmp_path / "model", Path.rename
    with new_model_folder(target) as staging:
        write(staging, "first")

    def fail_once(path: Path, to: Path) -> Path:
        if path.name.startswith(".tmp-"):
            raise OSError(5, "Input/output error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(CheckpointError, match="Input/output error"), new_model_folder(target) as staging:
        write(staging, "second")
    assert (target / "model.safetensors").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

"""Files that are replaced as a whole: a crash or a full disk leaves the old content."""

import os
from pathlib import Path
from typing import Any

import pytest

from rlpack.observe import run_dir
from rlpack.observe.errors import RunDirectoryError
from rlpack.whole_files import write_whole


def test_text_is_replaced(tmp_path: Path):
    path = tmp_path / "config.yaml"
    for text in ("first: ä\n", ""):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_run_that_is_resumed_on_a_full_disk_keeps_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
):
    run_dir.open_run_dir(tmp_path, {"seed": 1}, resume=False)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if function == "fsync" else (Path, "replace")), fail)
    with pytest.raises(RunDirectoryError, match=r"can't be written \(.*No space left on device"):
        run_dir.open_run_dir(tmp_path, {"seed": 2}, resume=True)
    assert run_dir.read_config(tmp_path) == {"seed": 1}
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_a_directory_whose_first_start_was_killed_can_be_used(tmp_path: Path):
    (tmp_path / ".config.yaml").write_text("seed:", encoding="utf-8")
    run_dir.open_run_dir(tmp_path, {"seed": 1}, resume=False)
    assert run_dir.read_config(tmp_path) == {"seed": 1}

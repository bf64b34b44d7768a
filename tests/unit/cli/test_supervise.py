"""Attempts of supervised runs; `tests/end_to_end/test_supervise.py` kills and continues real ones."""

from pathlib import Path

import pytest

from rlpack.cli.supervise import supervise


def test_files_of_the_working_directory_replace_no_module_of_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "types.py").write_text("raise RuntimeError(__file__)\n")
    monkeypatch.chdir(tmp_path)
    assert supervise(["--cfg", "job"], "run", 0) == 0
    shown = capfd.readouterr()
    assert "supervise: 0" in shown.out
    assert shown.err == ""

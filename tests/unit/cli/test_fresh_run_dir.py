"""Default run directories: runs that start at once get different ones, and one that records nothing leaves none."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import pytest

from rlpack.cli.fresh_run_dir import reserved_names

NOW = datetime(2026, 2, 3, 4, 5, 6)


def test_runs_that_start_in_one_second_get_different_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        reserves = [stack.enter_context(reserved_names()) for _ in range(8)]
        names = list(pool.map(lambda reserve: reserve(NOW, "grpo"), reserves))
        base = "runs/2026-02-03_04-05-06-grpo"
        assert sorted(names) == [base, *(f"{base}-{number}" for number in range(2, 9))]
        assert all(Path(name).is_dir() for name in names)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_the_run_has_removed_leaves_no_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with reserved_names() as reserve:
        Path(reserve(NOW, "grpo")).rmdir()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_a_run_in_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with reserved_names() as reserve:
        name = reserve(NOW, "sft")
        (tmp_path / name / "metrics.jsonl").touch()
        monkeypatch.chdir("/")  # a recipe may go elsewhere
    assert (tmp_path / name / "metrics.jsonl").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_name_that_cannot_be_reserved_is_left_to_the_checks_of_the_run_if_not_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o500)
    with reserved_names() as reserve:
        assert reserve(NOW, "grpo") == "runs/2026-02-03_04-05-06-grpo"


def test_a_name_below_a_file_is_left_to_the_checks_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with reserved_names() as reserve:
        assert reserve(NOW, "grpo") == "runs/2026-02-03_04-05-06-grpo"

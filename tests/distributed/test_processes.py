"""Rank processes of the tests: a crash runs once more, and an error of a rank doesn't."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import on_ranks


def crash(_: Any, rank: int, folder: Path, times: int) -> int:
    count = len(list(folder.glob("crash*")))
    if rank == 1 and count < times:
        (folder / f"crash{count}").touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    return rank


def fail(_: Any, rank: int, folder: Path) -> None:
    (folder / f"{rank}-{len(list(folder.glob(f'{rank}-*')))}").touch()
    raise ValueError("a mistake")


def test_ranks_that_crash_run_once_more_with_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    assert on_ranks(tmp_path, 2, crash, tmp_path, 1) == [0, 1]
    assert ["-11" in str(warning.message) for warning in recwarn] == [True]
    with pytest.raises(RuntimeError) as error:  # of the pool, or of the rank that lost the other one
        on_ranks(tmp_path, 2, crash, tmp_path, 9)
    assert "-11" in error.value.__notes__[-1]
    assert len(list(tmp_path.glob("crash*"))) == 3


def test_an_error_of_a_rank_is_raised_at_once(tmp_path: Path):
    with pytest.raises(ValueError, match="a mistake"):
        on_ranks(tmp_path, 2, fail, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("?-*")) == ["0-0", "1-0"]

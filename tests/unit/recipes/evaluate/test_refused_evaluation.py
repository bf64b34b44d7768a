"""What an evaluation that is refused before its first response leaves in its directory."""

import logging
from pathlib import Path

import pytest

from rlpack.observe.evaluation.evaluation_dir import IDENTITY
from rlpack.observe.run_dir import LOG
from rlpack.recipes.evaluate.evaluate_model import _log_in
from rlpack.run_log import attached_log


def fail_in(folder: Path, *, has_begun: bool) -> None:
    with attached_log("driver"), _log_in(folder):
        logging.getLogger("rlpack").warning("a line")
        assert (folder / LOG).exists()
        if has_begun:
            (folder / IDENTITY).touch()
        raise ValueError("refused")


def test_a_refused_evaluation_leaves_no_log(tmp_path: Path):
    with pytest.raises(ValueError, match="refused"):
        fail_in(tmp_path, has_begun=False)
    assert list(tmp_path.iterdir()) == []


def test_the_log_of_an_evaluation_that_fails_later_is_kept(tmp_path: Path):
    with pytest.raises(ValueError, match="refused"):
        fail_in(tmp_path, has_begun=True)
    assert "a line" in (tmp_path / LOG).read_text()


def test_a_log_that_was_there_before_is_kept(tmp_path: Path):
    (tmp_path / LOG).write_text("mine\n")
    with pytest.raises(ValueError, match="refused"):
        fail_in(tmp_path, has_begun=False)
    assert (tmp_path / LOG).read_text().startswith("mine\n")

"""The console of a run: rlpack's and the user's messages, all warnings, and no chatter of libraries."""

import logging
import os
import sys
from pathlib import Path

import pytest

from rlpack.cli.main import main
from rlpack.cli.quiet_console import QUIET, concerns_the_run

LIBRARY = """
import logging


def speak():
    for level in (logging.INFO, logging.WARNING):
        logging.getLogger("matplotlib.fonts").log(level, "library %d", level)
        logging.getLogger("the_users.tools").log(level, "own package %d", level)
"""
RECIPE = """
import logging
import os
BARS = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"]  # a library that is imported here reads it
import chatty
from rlpack.config.recipes import RecipeSpec
from rlpack.run_log import current_log

SPEC = RecipeSpec(roles=("actor",))


def main(config):
    chatty.speak()
    logging.getLogger("rlpack.recipes").info("ours")
    logging.getLogger("my_recipe").info("the user's")
    current_log().open(config.run_dir + ".log")
"""


@pytest.mark.usefixtures("no_ray")
def test_messages_of_libraries_below_warnings_are_in_the_log_of_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (packages := tmp_path / "site-packages").mkdir()
    (packages / "chatty.py").write_text(LIBRARY)
    (tmp_path / "my_quiet_recipe.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    monkeypatch.setattr("logging.root.handlers", [])
    for name in QUIET:
        monkeypatch.setenv(name, "")  # so that it is unset after the test
        monkeypatch.delenv(name)
    assert main(["train", "recipe.target=my_quiet_recipe", "sft_warmup.steps=0", "run_dir=run"]) == 0
    shown = capsys.readouterr().err
    assert "ours" in shown
    assert "the user's" in shown
    assert "library 30" in shown
    assert "own package 20" in shown
    assert "library 20" not in shown
    assert "library 20" in (tmp_path / "run.log").read_text()
    assert {os.environ[name] for name in QUIET} == {"1"}


@pytest.mark.parametrize(
    ("name", "path", "is_shown"),
    [
        ("transformers.trainer", "/venv/site-packages/transformers/trainer.py", False),
        ("root", "/venv/lib/python3.11/site-packages/torch/utils/cpp.py", False),
        ("root", "/usr/lib/python3/dist-packages/yaml.py", False),
        ("root", "/venv/site-packages/the_users/tools.py", True),
        ("the_users", "/home/me/torch/tools.py", True),
        ("rlpack.cli", "/venv/site-packages/rlpack/cli/train.py", True),
    ],
)
def test_a_record_below_warnings_is_shown_unless_a_library_of_a_run_logs_it(name: str, path: str, is_shown: bool):
    assert concerns_the_run(logging.LogRecord(name, logging.INFO, path, 1, "", None, None)) == is_shown
    assert concerns_the_run(logging.LogRecord(name, logging.WARNING, path, 1, "", None, None))

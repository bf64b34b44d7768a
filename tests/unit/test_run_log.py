"""`run.log` has everything that is logged, and the console stays as it is."""

import logging
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from rlpack.cli.main import main
from rlpack.config.schema import Config
from rlpack.distributed.errors import RoleError
from rlpack.observe.console import Console
from rlpack.observe.run import Run
from rlpack.observe.run_dir import LOG, check_run_dir, remove_unstarted_run
from rlpack.run_log import attached_log, current_log, is_log_of_node, log_of_node

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def fail() -> None:
    raise RoleError("actor", 1, "train_step", "ZeroDivisionError: division by zero")


def test_records_have_time_process_level_and_logger_and_early_ones_come_first(tmp_path):
    with attached_log("driver") as log:
        logging.getLogger("rlpack.early").warning("before there was a %s", "directory")
        log.open(tmp_path / "run.log")
        logging.getLogger("elsewhere").error("later")
        log.record("ERROR", "text that isn't UTF-8: \ud800")  # not logged: pytest could not send it to another process
    logging.getLogger("elsewhere").error("after the run")
    first, second, third = (tmp_path / "run.log").read_text().splitlines()
    assert re.fullmatch(rf"{TIME} driver WARNING rlpack\.early: before there was a directory", first)
    assert re.fullmatch(rf"{TIME} driver ERROR elsewhere: later", second)
    assert re.fullmatch(rf"{TIME} driver ERROR rlpack: text that isn't UTF-8: \\ud800", third)
    assert current_log() is None


def test_warnings_are_recorded_and_still_shown(tmp_path):
    shown: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: shown.append(str(message))  # type: ignore[assignment]
        with attached_log("driver") as log:
            log.open(tmp_path / "run.log")
            warnings.warn("too few rows", UserWarning, stacklevel=1)
        warnings.warn("not of the run", UserWarning, stacklevel=1)
    assert shown == ["too few rows", "not of the run"]
    assert re.search(r"WARNING py\.warnings: .*test_run_log\.py:\d+: UserWarning: too few rows\n$", read(tmp_path))


def read(folder: Path) -> str:
    return (folder / "run.log").read_text()


def test_a_run_records_its_notes_and_the_traceback_of_its_failure(tmp_path):
    def train() -> None:
        with Run.start(Config(), tmp_path / "run", console=Console()) as run:
            run.log(1, {"reward/mean": 0.5})
            run.note("a note")
            fail()

    with pytest.raises(RoleError):
        train()
    text = read(tmp_path / "run")
    assert re.search(r"driver INFO rlpack: a note\n", text)
    assert "driver ERROR rlpack: Traceback (most recent call last):" in text
    assert 'in fail\n    raise RoleError("actor", 1' in text
    assert current_log() is None


def test_a_failure_is_reported_once_before_the_report_is_written(tmp_path):
    reported: list[tuple[str, bool]] = []

    def report(error: BaseException) -> None:
        reported.append((str(error), (tmp_path / "report.html").exists()))

    def train() -> None:
        with attached_log("driver", report), Run.start(Config(), tmp_path) as run, run.recording_failures():
            run.log(1, {"reward/mean": 0.5})
            fail()

    with pytest.raises(RoleError):
        train()
    assert reported == [("role actor, rank 1, in train_step: ZeroDivisionError: division by zero", False)]
    assert (tmp_path / "report.html").exists()


def test_threads_append_whole_records(tmp_path):
    with attached_log("driver") as log:
        log.open(tmp_path / "run.log")
        text = "x" * 2000
        threads = [threading.Thread(target=lambda: [log.record("INFO", text) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    lines = read(tmp_path).splitlines()
    assert len(lines) == 200
    assert all(line.endswith(f" driver INFO rlpack: {text}") for line in lines)


RANK = """
import logging, sys, warnings
from pathlib import Path

if len(sys.argv) > 1:
    from rlpack.distributed.context import RankContext
    from rlpack.distributed.process import RankProcess

    RankProcess(RankContext(pool="main", rank=3), 1).open_log(Path(sys.argv[1]))
logging.getLogger("rlpack.workers.actor").info("an info")
logging.getLogger("rlpack.workers.actor").warning("a warning")
logging.getLogger("another").info("of no interest")
"""


def test_a_rank_appends_what_it_logs_and_prints_what_it_printed_before(tmp_path):
    def printed(*arguments: str) -> str:
        command = [sys.executable, "-c", RANK, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stderr

    (tmp_path / "run.log").write_text("the driver's\n")
    assert printed(str(tmp_path / "run.log")) == printed() == "a warning\n"
    driver, start, info, warning = read(tmp_path).splitlines()
    assert driver == "the driver's"
    assert re.fullmatch(rf"{TIME} main/3 INFO rlpack: process \d+ on .+", start)
    assert re.fullmatch(rf"{TIME} main/3 INFO rlpack\.workers\.actor: an info", info)
    assert re.fullmatch(rf"{TIME} main/3 WARNING rlpack\.workers\.actor: a warning", warning)


@pytest.fixture
def failing_recipe(tmp_path, monkeypatch):
    """A recipe in the working directory that logs a step, if it is told to, and fails."""
    (tmp_path / "failing.py").write_text(
        "from pathlib import Path\n"
        "from rlpack.config.recipes import RecipeSpec\n"
        "from rlpack.distributed.errors import RoleError\n"
        "from rlpack.observe.run import Run\n"
        "SPEC = RecipeSpec()\n"
        "def main(config):\n"
        "    with Run.start(config, Path(config.run_dir)) as run:\n"
        "        run.set_ray_logs('/tmp/ray/session_x/logs')\n"
        "        if config.trainer.steps > 1:\n"
        "            run.log(1, {})\n"
        "        raise RoleError('actor', 0, 'train_step', 'the process died')\n"
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("failing_recipe")
def test_the_error_of_a_command_ends_with_the_paths_of_both_logs(tmp_path, capsys):
    assert main(["train", "recipe.target=failing", "trainer.steps=3", "run_dir=mine"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == [
        "rlpack train: role actor, rank 0, in train_step: the process died",
        f"rlpack train: log: {tmp_path}/mine/run.log; Ray's logs: /tmp/ray/session_x/logs",
    ]
    assert "RoleError: role actor, rank 0" in read(tmp_path / "mine")


@pytest.mark.usefixtures("failing_recipe")
def test_a_run_that_fails_before_its_first_step_leaves_no_log(tmp_path, capsys):
    assert main(["train", "recipe.target=failing", "trainer.steps=1", "run_dir=mine"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "rlpack train: Ray's logs: /tmp/ray/session_x/logs"
    assert not (tmp_path / "mine").exists()


def test_the_logs_of_other_nodes_are_part_of_a_run_that_never_started(tmp_path):
    other = log_of_node(tmp_path / "run" / LOG, "10.0.0.2")
    assert is_log_of_node(other)
    assert not is_log_of_node(tmp_path / "run-1.log")  # a user's
    assert other == tmp_path / "run" / "run-10.0.0.2.log"
    other.parent.mkdir()
    other.touch()
    check_run_dir(other.parent, resume=False)
    remove_unstarted_run(other.parent)
    assert not other.parent.exists()

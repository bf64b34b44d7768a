"""`supervise=N` starts a run again that lost its driver, a rank, or both, and it ends as an uninterrupted one."""

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlpack.cli import supervise
from tests.end_to_end.commands import Command, committed, records, started, until, without_times
from tests.end_to_end.settings import REFERENCE, UNEVEN

pytestmark = [pytest.mark.ray, pytest.mark.slow]
OVERRIDES = (*UNEVEN, *REFERENCE, "trainer.steps=9")
# A start without much of a warm-up, and more steps than a test waits for.
QUICK = ("experiment=smoke", "trainer.steps=200", "evaluation.every=200", "checkpoint.every=200")


def drivers(command: Command) -> list[psutil.Process]:
    """Return the process of the attempt that is under way."""
    return [one for one in command.processes() if "supervise=0" in one.cmdline()]


def rank(command: Command) -> psutil.Process:
    """Return a process that trains."""
    return next(one for one in command.processes() if one.cmdline()[:1] and "RankActor" in one.cmdline()[0])


def reach(command: Command, step: int) -> None:
    """Wait for a step, over restarts."""
    until(lambda: any(r["phase"] == "train" and r["step"] >= step for r in records(command.run_dir)), 240)


def test_a_run_whose_driver_and_then_a_rank_is_killed_ends_as_an_uninterrupted_one(tmp_path: Path, uninterrupted):
    with started(tmp_path, *OVERRIDES, "supervise=2") as command:
        reach(command, 2)
        drivers(command)[0].kill()
        until(lambda: bool(committed(command.run_dir, "train")), 240)
        rank(command).kill()
        assert command.wait() == 0, command.err
        assert command.left_behind() == []
    assert "ended with signal SIGKILL; restart 1 of 2 from its newest checkpoint" in command.err
    assert "ended with exit code 1; restart 2 of 2" in command.err
    assert "attempt 3 of 3 of a supervised run" in (command.run_dir / "run.log").read_text()
    taken, expected = records(command.run_dir), records(uninterrupted.run_dir)
    assert [without_times(record) for record in taken] == [without_times(record) for record in expected]
    weights, others = (load_file(run.run_dir / "model" / "model.safetensors") for run in (command, uninterrupted))
    assert all(torch.equal(weights[name], others[name]) for name in others)


def test_ctrl_c_reaches_the_run_once_and_it_is_not_started_again(tmp_path: Path):
    with started(tmp_path, *QUICK, "supervise=3") as command:
        reach(command, 1)
        command.interrupt()
        assert command.wait() == 130, command.err
        assert command.left_behind() == []
    assert command.err.count("interrupted: finishing the step, then saving") == 1
    assert "restart" not in command.err
    assert committed(command.run_dir, "train") == [records(command.run_dir)[-1]["step"]]


def test_a_run_ends_with_its_supervisor(tmp_path: Path):
    with started(tmp_path, *QUICK, "supervise=3") as command:
        reach(command, 1)
        os.kill(command.process.pid, signal.SIGKILL)
        assert command.left_behind() == []
    assert committed(command.run_dir, "train") == [records(command.run_dir)[-1]["step"]]


def test_what_a_restart_cannot_mend_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    codes: list[tuple[int, bool]] = []
    calls: list[list[str]] = []

    def attempt(words: list[str], number: int, restarts: int) -> tuple[int, bool]:
        calls.append(words)
        return codes.pop(0)

    monkeypatch.setattr(supervise, "_run", attempt)
    monkeypatch.setattr(supervise, "_PAUSE_S", 0.0)
    words = ["seed=3", "+supervise=2", "resume=never"]
    for codes, expected in (
        ([(2, False)], 2),
        ([(3, False)], 3),
        ([(130, True)], 130),
        ([(1, False), (1, False)], 1),  # twice in a row without a checkpoint
        ([(-9, False), (-9, False), (-9, False)], 1),
        ([(1, False), (-9, False), (0, False)], 0),
        ([(-9, False), (2, False), (0, False)], 0),  # a restart lacked a node
        ([(-9, False), (2, False), (3, False)], 1),  # neither configuration nor data were wrong at the first start
    ):
        assert supervise.supervise(words, str(tmp_path), 2) == expected
        assert codes == []
    first, second = calls[-2:]
    assert calls[0] == ["seed=3", f"run_dir={tmp_path}", "supervise=0", "resume=never"]
    assert first == second == ["seed=3", f"run_dir={tmp_path}", "supervise=0", "resume=auto"]
    codes = [(0, False)]
    assert supervise.supervise(["++resume=auto"], str(tmp_path), 2) == 0
    assert calls[-1] == [f"run_dir={tmp_path}", "supervise=0", "++resume=auto"]

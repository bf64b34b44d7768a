"""A cluster that outlives a run has nothing of it left ten seconds after a fault ended it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlpack.observe.run_dir import LOCK
from tests.end_to_end.commands import MARK
from tests.end_to_end.machines import Machines, holders, two_nodes
from tests.faults.faulty_roles import FOLDER
from tests.faults.runs import GRACE_S, fired, is_held, settings, started, wait
from tests.faults.table import cases

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NOTHING = {"groups": [], "actors": [], "processes": [], "locked": False}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A cluster whose nodes, and so all that runs on them, have its folder as their mark."""
    folder = tmp_path_factory.mktemp("machines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(folder))
        patch.setenv(FOLDER, str(folder))
        with two_nodes(folder) as machines:
            yield machines


def processes(mark: str) -> list[psutil.Process]:
    """Return what runs on a cluster's nodes, except Ray's waiting workers.

    Children of this process, such as Python's resource tracker, have the mark from its environment.
    """
    found = []
    for process in psutil.process_iter():
        try:
            is_own = process.ppid() == os.getpid()
            if process.environ().get(MARK) == mark and process.name() != "ray::IDLE" and not is_own:
                found.append(process)
        except psutil.Error:  # it ended
            continue
    return found


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("driver, plan, kill, one pool", -9),
        pytest.param("trainer rank k, plan, kill, one pool", 1, marks=pytest.mark.long),
    ],
)
def test_nothing_of_a_run_is_left_on_a_cluster_after_a_fault(machines: Machines, tmp_path: Path, name: str, code: int):
    mark = str(Path(machines.environment["RAY_AUTH_TOKEN_PATH"]).parent)
    before = set(processes(mark))
    (case,) = (case for case in cases() if str(case) == name)
    overrides = (*settings("one pool", steps=1), f"placement.address={machines.address}")
    with started(tmp_path, [case.planned(1)], overrides, access=machines.environment) as command:
        assert wait(command, is_stopped=False)[0] == code, command.err
        assert [one["id"] for one in fired(tmp_path)] == [name]
        end = time.monotonic() + GRACE_S
        while (left := left_on(machines, tmp_path, before)) != NOTHING and time.monotonic() < end:
            time.sleep(0.5)
        assert left == NOTHING
        assert command.left_behind(0.0) == []


def left_on(machines: Machines, folder: Path, before: set[psutil.Process]) -> dict[str, object]:
    """Return what is left of a run in a folder, in the words of `NOTHING`."""
    mark = str(Path(machines.environment["RAY_AUTH_TOKEN_PATH"]).parent)
    left = [process for process in processes(mark) if process not in before]
    return {
        **holders(machines),
        "processes": [title for process in left if (title := _title(process))],
        "locked": is_held(folder / "run" / LOCK),
    }


def _title(process: psutil.Process) -> str | None:
    """Return a process's command; None if it has ended."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return None

"""Runs that several tests look at."""

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.end_to_end.commands import DEADLINE_S, Command, done
from tests.end_to_end.settings import REFERENCE, UNEVEN


def shared_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that all processes of this test session share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Return a run of nine steps on two ranks that nothing stopped; one process of the session runs it."""
    folder = shared_folder(tmp_path_factory, "uninterrupted")
    mark, failed = folder / "mark", folder / "failed"
    with FileLock(folder / "lock", timeout=2 * DEADLINE_S):
        if failed.exists():
            pytest.fail("the run failed in another process of this session")
        if not mark.exists():
            failed.touch()
            command = done(folder, *UNEVEN, *REFERENCE, "trainer.steps=9")
            mark.write_text(command.mark)
            failed.unlink()
    return Command(folder, folder / "run", None, mark.read_text())

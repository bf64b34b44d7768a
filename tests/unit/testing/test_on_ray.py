"""What a check on processes looks for, without Ray; tests/distributed/test_role_checks.py has the rest."""

import os
import subprocess
import sys

import psutil
import pytest

from rlpack.testing import ContractError, check_role_on_ray
from rlpack.testing import on_ray as processes
from rlpack.worker import Worker
from tests.unit.testing.test_contracts import Good, Undecorated


def test_a_process_that_outlives_a_check_is_found_by_its_mark_and_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "_LEFT_S", 0.1)
    with processes._marked() as mark:
        outliving = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert outliving.stdout is not None
        outliving.stdout.readline()  # its environment can be read from here on
    with processes._marked() as other:
        assert processes._left_behind(other) == []
    assert outliving.poll() is None
    (left,) = processes._left_behind(mark)
    assert "input()" in left
    assert outliving.wait(timeout=10) != 0
    assert not psutil.pid_exists(outliving.pid)
    assert outliving.stdin is not None
    outliving.stdin.close()
    outliving.stdout.close()


def test_the_environment_is_as_it_was_after_a_check():
    before = dict(os.environ)
    with processes._marked() as mark:
        assert mark in os.environ.values()
    assert dict(os.environ) == before


def test_a_role_that_ranks_could_not_import_or_call_is_refused_before_anything_starts():
    class Inner(Good): ...

    with pytest.raises(
        ContractError, match=r"^processes: ranks can't import .*Inner: .*move it to the top level of a mo"
    ):
        check_role_on_ray(Inner)
    renamed: type[Worker] = type("Undecorated", (Good,), {"__module__": Undecorated.__module__})
    with pytest.raises(ContractError, match="Undecorated is not the class that is checked"):
        check_role_on_ray(renamed)
    with pytest.raises(ContractError, match=r"^dispatch: Undecorated.score has no dispatch"):
        check_role_on_ray(Undecorated)

"""A few cells of the fault matrix in three runs; `make test-faults` runs them all."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.matrix import Runs, batches, table
from tests.faults.table import ACTIVE, FAULTS, PHASES, RANKED, ROLES, cases, expected, reason_against
from tests.forked_workers import worker_servers

# One kill of each stateless role, in as many phases: in its own call, between calls, and while it gets weights.
KILLED = {
    "rollout, transfer, kill, own pools",
    "reference, plan, kill, own pools",
    "reward pool, score, kill, own pools",
    "judge, generate, kill, own pools",
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with worker_servers() as address:
        yield address


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_that_loses_every_stateless_role_ends_as_an_undisturbed_one(tmp_path: Path, address: str):
    chosen = [case for case in cases() if str(case) in KILLED]
    findings = Runs(tmp_path, address).find(chosen)
    outcomes = {str(case): finding.outcome for case, finding in findings.items()}
    assert outcomes == dict.fromkeys(KILLED, "repeated"), next(iter(findings.values())).text[-5000:]
    assert max(finding.seconds for finding in findings.values()) < 30


@pytest.mark.ray
@pytest.mark.slow
def test_the_error_of_a_killed_trainer_names_it_and_no_forked_worker_is_left(tmp_path: Path, address: str):
    servers = [child for child in psutil.Process().children() if address in _words(child)]
    forked = sum(server.cpu_times().children_user for server in servers)
    (case,) = (case for case in cases() if str(case) == "trainer rank k, update, kill, one pool")
    (finding,) = Runs(tmp_path, address).find([case]).values()
    assert finding.outcome == "error", finding.text[-5000:]
    deadline = time.monotonic() + 10
    while any(server.children() for server in servers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [server.children() for server in servers] == [[], []]
    assert sum(server.cpu_times().children_user for server in servers) > forked  # else they forked none


def _words(process: psutil.Process) -> str:
    """Return the command line of a process, empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_the_table_has_each_cell_or_a_reason_against_it():
    every = cases()
    assert len(every) == len(set(map(str, every))) >= 440
    names = {(case.role, case.phase, case.fault) for case in every}
    cells = {(role, phase, fault) for role in ROLES for phase in PHASES for fault in FAULTS}
    assert {cell for cell in cells if reason_against(*cell) is None} == names
    assert ACTIVE.keys() >= set(RANKED)


def test_only_stateless_roles_with_a_pool_of_their_own_are_started_again():
    repeated = {(case.role, case.layout, case.fault) for case in cases() if case.outcome == "repeated"}
    roles = ("rollout", "reference", "reward pool", "judge")
    assert repeated == {(role, "own pools", fault) for role in roles for fault in ("kill", "stop", "lost reply")}
    assert expected("rollout", "generate", "kill", "one pool") == "error"


def test_every_cell_is_in_one_run_and_no_role_is_started_again_too_often_in_one():
    runs = list(batches(cases()))
    assert sorted(str(case) for run in runs for case in run) == sorted(map(str, cases()))
    for run in runs:
        assert len({case.layout for case in run}) == 1
        repeated = [case.role for case in run if case.outcome == "repeated"]
        assert all(repeated.count(role) <= 3 for role in repeated)


def test_the_table_of_results_says_of_each_cell_what_came_of_it():
    known = {
        "GCS, start, kill, one pool": ["error", 8.6],
        "GCS, score, kill, one pool": ["exit code 0", 1.0],
        "driver, plan, kill, one pool": ["resumed", 0.1],
    }
    lines = table(known).splitlines()
    assert "| GCS | one pool | kill | error | 9 | ? | **not** | ? | ? | ? | ? | ? | ? | ? |" in lines
    assert "| driver | one pool | kill | resumed | ? | ? | ? | ? | ok | ? | ? | ? | ? | ? |" in lines
    marks = [mark for line in lines[2:] for mark in line.split("|")[5:-1]]
    assert sum(mark != " – " for mark in marks) == len(cases())


def test_a_process_is_called_between_two_faults_of_a_run():
    """Else the second fault would hit a process that is stopped or dead already."""
    noticed_late = ("advantages", "update", "transfer", "checkpoint", "evaluation")
    for run in batches(cases()):
        for role in ("reference", "judge"):  # whose results a step waits for after its log-probs, and then no more
            late = [case.phase in noticed_late for case in run if case.role == role and case.outcome == "repeated"]
            assert late == sorted(late), [str(case) for case in run]

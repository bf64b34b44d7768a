"""Runs as jobs of a cluster of two nodes whose job server asks for a token: submitted, stopped, resumed, refused."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.commands import DEADLINE_S, committed, records, steps, until, without_times
from tests.end_to_end.machines import Machines, asked, holders, two_nodes
from tests.end_to_end.settings import REFERENCE, UNEVEN
from tests.installs import add_unfortunate_files

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# A role of the user's own, found in the uploaded folder; on both nodes it sees the secret and the environment.
ROLE = """
import os, random, types
from rlpack.workers.reward import RewardWorker
from rlpack.worker import sharded

class Watched(RewardWorker):
    @sharded()
    def score(self, shard):
        assert os.environ["JUDGE_PASSWORD"] == "open sesame" and os.environ["JUDGE_COLOUR"] == "red"
        return super().score(shard)
"""
JOB = ("roles.reward.target=watched:Watched", "job.env_vars.JUDGE_COLOUR=red", "job.secret_names=[JUDGE_PASSWORD]")


@dataclass
class Said:
    """What a command that has ended said."""

    code: int
    out: str
    err: str
    took_s: float


@dataclass
class Jobs:
    """A run that was stopped as one job and resumed as another."""

    run_dir: Path
    submitted: Said
    first: str
    stopped: Said
    saved: list[int]
    logged: int
    left: dict[str, list[str]]
    resumed: Said


def rlpack(machines: Machines, folder: Path, *words: str, **environment: str) -> Said:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rlpack", *words],
        cwd=folder,
        env=machines.environment | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return Said(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    (folder / "secrets").mkdir()
    (folder / "secrets" / "JUDGE_PASSWORD").write_text("open sesame\n")
    with two_nodes(folder) as machines:
        yield machines


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "watched.py").write_text(ROLE)
    add_unfortunate_files(folder)
    return folder


@pytest.fixture(scope="module")
def jobs(machines: Machines, project: Path, tmp_path_factory) -> Jobs:
    run_dir = tmp_path_factory.mktemp("shared") / "run"
    secrets_dir = Path(machines.environment["RAY_AUTH_TOKEN_PATH"]).parent / "secrets"
    overrides = [*UNEVEN, *REFERENCE, *JOB, f"job.secrets_dir={secrets_dir}", "trainer.steps=9", f"run_dir={run_dir}"]
    submitted = rlpack(machines, project, "submit", "--address", machines.url, "--", *overrides)
    assert submitted.code == 0, submitted.err
    first = submitted.out.split()[1].rstrip(",")

    def trains() -> bool:
        state = asked(machines, f"/api/jobs/{first}")
        assert state["status"] in {"PENDING", "RUNNING"}, state["message"]
        return any(record["phase"] == "train" and record["step"] >= 2 for record in records(run_dir))

    until(trains, DEADLINE_S)
    stopped = rlpack(machines, project, "stop", first, "--address", machines.url)
    saved, logged = committed(run_dir, "train"), steps(run_dir, "train")[-1]
    left = holders(machines)
    way_on = shlex.split(stopped.out.partition("resume: rlpack ")[2])
    return Jobs(run_dir, submitted, first, stopped, saved, logged, left, rlpack(machines, project, *followed(way_on)))


def followed(words: Sequence[str]) -> list[str]:
    return [*words[:1], "--follow", *words[1:]]


def test_after_submission_the_log_and_stop_commands_are_printed(jobs, machines):
    assert f"rlpack logs {jobs.first} --address {machines.url} --follow" in jobs.submitted.out
    assert f"rlpack stop {jobs.first} --address {machines.url}" in jobs.submitted.out


def test_a_stopped_job_finishes_its_step_saves_and_frees_all_it_held(jobs):
    assert (jobs.stopped.code, jobs.stopped.err) == (0, "")
    assert "\nSTOPPED\n" in jobs.stopped.out
    assert 2 <= jobs.logged < 9
    assert jobs.saved[-1] == jobs.logged
    assert jobs.left == {"groups": [], "actors": []}


def test_the_printed_command_resumes_it_and_follows_it_to_its_end(jobs):
    assert jobs.resumed.code == 0, jobs.resumed.err
    assert f"resumed after step {jobs.logged} of train" in jobs.resumed.out
    assert "held-out accuracy" in jobs.resumed.out
    assert "SUCCEEDED" in jobs.resumed.err


def test_every_figure_is_that_of_the_same_run_without_a_job(jobs, uninterrupted):
    found, expected = records(jobs.run_dir), records(uninterrupted.run_dir)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert without_times(one) == without_times(other)


def test_jobs_are_listed_with_their_state_and_directory(jobs, machines, project):
    listed = rlpack(machines, project, "jobs", "--address", machines.url).out.splitlines()
    (line,) = [line for line in listed if line.startswith(jobs.first)]
    assert "STOPPED" in line
    assert line.endswith(str(jobs.run_dir))
    assert any("SUCCEEDED     0" in line for line in listed)


def test_the_log_of_a_job_says_how_to_go_on_and_can_be_read_afterwards(jobs, machines, project):
    heard = rlpack(machines, project, "logs", jobs.first, "--address", machines.url)
    assert heard.code == 0
    assert "interrupted: finishing the step, then saving" in heard.out
    assert f"run_dir={jobs.run_dir} resume=auto to resume from its last checkpoint" in heard.out
    assert "is deleted" not in heard.out


def test_a_job_that_has_ended_is_not_stopped_again(jobs, machines, project):
    again = rlpack(machines, project, "stop", jobs.first, "--address", machines.url)
    assert (again.code, again.out) == (0, f"job {jobs.first} has already ended: STOPPED\n")


def test_the_secret_is_nowhere_but_where_it_was(jobs, machines, project):
    assert "open sesame" not in json.dumps(asked(machines, "/api/jobs/"))
    texts = [path.read_text(errors="replace") for path in jobs.run_dir.rglob("*") if path.is_file()]
    assert not any("open sesame" in text for text in [*texts, jobs.submitted.out, jobs.resumed.out, jobs.resumed.err])
    assert "JUDGE_PASSWORD" in (jobs.run_dir / "config.yaml").read_text()


def test_followed_a_job_ends_the_command_with_its_own_exit_code(machines, project, tmp_path):
    run_dir = tmp_path / "run"
    said = rlpack(
        *(machines, project, "submit", "--address", machines.url, "--follow", "--"),
        *("job.secret_names=[NOBODYS_KEY]", f"run_dir={run_dir}"),
    )
    assert said.code == 2
    assert "job.secret_names holds NOBODYS_KEY, which is neither in the environment" in said.out
    assert "FAILED, exit code 2" in said.err
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (("jobs",), {"RAY_AUTH_TOKEN": "wrong", "RAY_AUTH_TOKEN_PATH": ""}, "rejects the token; set RAY_AUTH_MODE"),
        (("jobs",), {"RAY_AUTH_MODE": "disabled"}, "asks for a token; set RAY_AUTH_MODE=token"),
        (("logs", "raysubmit_nobodys"), {}, "has no job raysubmit_nobodys; `rlpack jobs` lists those it has"),
        (("logs", "raysubmit_nobodys", "--follow"), {}, "has no job raysubmit_nobodys"),
        (("stop", "raysubmit_nobodys"), {}, "has no job raysubmit_nobodys"),
        (
            ("submit", "--", "run_dir=/nowhere/run", "placement.pools.main.ranks=3"),
            {},
            "the pools main ask for 3 CPU, the cluster has 2 (2 CPU, 0 GPU free); lower placement.pools",
        ),
        (
            ("submit", "--", "run_dir=/nowhere/run", "placement.pools.main.cpus_per_rank=2"),
            {},
            "ask for 4 CPU, the cluster has 2",
        ),
        (
            ("submit", "--", "run_dir=/nowhere/run", "placement.pools.main.ranks=1", "job.driver_cpus=2"),
            {},
            "the pools main and the driver (job.driver_cpus 2) ask for 3 CPU",
        ),
        (
            ("submit", "--", "run_dir=/nowhere/run", "placement.pools.main={ranks: 1, cpus_per_rank: 2}"),
            {},
            "1 ranks of 2 CPU and 0 GPU, each on one node; the cluster's 2 nodes have room for 0 of them",
        ),
        (("submit", "--", "run_dir=/nowhere/run", "placement=one_gpu"), {}, "ask for 4 CPU, the cluster has 2"),
    ],
)
def test_what_the_cluster_refuses_is_one_line_at_once(machines, project, words, environment, message):
    said = rlpack(machines, project, words[0], "--address", machines.url, *words[1:], **environment)
    assert (said.code, said.out) == (2, "")
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.took_s < 120

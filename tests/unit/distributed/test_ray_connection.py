"""Starting Ray on a busy machine, with Ray's own start replaced by one that registers late or never."""

import json
import os
import re
import sys
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
import ray
from ray._private import services
from ray._private.worker import print_worker_logs
from ray.job_config import JobConfig
from ray.runtime_env.runtime_env import RuntimeEnv, _merge_runtime_env

from rlpack.config.schema import Placement
from rlpack.distributed.errors import PlacementError
from rlpack.distributed.ray_connection import connect
from rlpack.installation import RAY_JOB


def ray_that_registers(monkeypatch: pytest.MonkeyPatch, answers: Iterator[bool]) -> list[dict[str, str]]:
    """Make `ray.init` ask for its node as Ray does, with these answers; return what it was told."""
    told: list[dict[str, str]] = []

    def get_node(gcs_address: str, node_id: str) -> dict[str, str]:
        if not next(answers):
            raise RuntimeError("not registered")
        return {"node_id": node_id, "gcs_address": gcs_address}

    def init(**settings: object) -> None:
        told.append(services.get_node("127.0.0.1:6379", "abc"))

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray, "init", init)
    return told


def test_a_node_that_registers_late_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    told = ray_that_registers(monkeypatch, chain([False] * 5, repeat(True)))
    asked = services.get_node
    connect(Placement())
    assert told == [{"node_id": "abc", "gcs_address": "127.0.0.1:6379"}]
    assert services.get_node is asked


def test_a_node_that_never_registers_is_one_error_that_names_the_deadline(monkeypatch: pytest.MonkeyPatch):
    ray_that_registers(monkeypatch, repeat(False))
    limit = r"within placement.start_timeout_s=0.2 s; \d+ cores have a load of \d+: "
    with pytest.raises(PlacementError, match=limit + re.escape("wait until other programs have ended")):
        connect(Placement(start_timeout_s=0.2))


def test_ray_colors_no_prefix_in_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv("RAY_COLOR_PREFIX", raising=False)
    ray_that_registers(monkeypatch, repeat(True))
    connect(Placement())
    print_worker_logs({"pid": "12", "actor_name": "Rank", "lines": ["a line"]}, sys.stdout)
    assert capsys.readouterr().out == "(Rank pid=12) a line\n"


@pytest.mark.parametrize(
    ("job", "merged"),
    [
        (
            {"env_vars": {"PYTHONPATH": "/shared/code", "COLOUR": "red"}},
            {"PYTHONPATH": "/shared/code", "COLOUR": "red"},
        ),
        ({"env_vars": {"COLOUR": "red"}}, {"PYTHONPATH": "/files:/shared/code", "COLOUR": "red"}),
        ({}, {"PYTHONPATH": "/files:/shared/code"}),
        (None, {"PYTHONPATH": "/files:/shared/code"}),
    ],
)
def test_ranks_of_a_job_get_its_python_path_once(
    monkeypatch: pytest.MonkeyPatch, job: dict[str, object] | None, merged: dict[str, str]
):
    given: list[RuntimeEnv | None] = []

    def init(*, runtime_env: RuntimeEnv | None, **settings: object) -> None:
        given.append(runtime_env)
        raise ConnectionError("not now")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("PYTHONPATH", "/files:/shared/code")  # Ray puts the job's files before the job's own path
    monkeypatch.setenv(RAY_JOB, json.dumps({"runtime_env": job, "metadata": {}}))
    with pytest.raises(PlacementError, match=r"no Ray cluster answers at .*: not now; start one"):
        connect(Placement(address="auto"))
    of_job = JobConfig.from_json(json.loads(os.environ[RAY_JOB])).runtime_env
    assert _merge_runtime_env(RuntimeEnv(**of_job or {}), given[0]) == {"env_vars": merged}

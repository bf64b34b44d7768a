"""A Ray that can't start on this machine says so, and why, before its own deadlines."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from rlpack.distributed import local_ray
from rlpack.distributed.errors import PlacementError
from rlpack.distributed.local_ray import check_room


def test_a_full_folder_for_rays_files_is_refused_with_the_variable_that_moves_it(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/proc/nowhere")  # no file has room there
    with pytest.raises(
        PlacementError, match=r"^Ray did not start .*: /proc, where its files and logs go, has 0 .*free; "
    ):
        check_room()


def test_a_folder_that_may_not_be_written_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "new"))
    check_room()
    monkeypatch.setattr(local_ray.os, "access", lambda path, mode: False)
    with pytest.raises(PlacementError, match=rf": {tmp_path}, .*, can't be written by user \d+; .*RAY_TMPDIR"):
        check_room()


def test_the_wait_for_the_gcs_ends_with_the_gcs():
    dead: list[tuple[str, None]] = []
    node: Any = SimpleNamespace(dead_processes=lambda: dead, get_logs_dir_path=lambda: "/logs")
    answers = iter([RuntimeError("no port yet"), 6379])

    def wait_for_port(folder: str, *, timeout_ms: int) -> int:
        answer = next(answers, RuntimeError("no port yet"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    wait = local_ray._while_gcs_runs(wait_for_port, [node])
    assert wait("session", timeout_ms=30_000) == 6379
    dead.append(("gcs_server", None))
    began = time.monotonic()
    with pytest.raises(local_ray._DaemonEndedError, match="gcs_server ended while it started, see /logs"):
        wait("session", timeout_ms=30_000)
    assert time.monotonic() - began < 10
    dead.clear()
    with pytest.raises(RuntimeError, match="no port yet"):
        wait("session", timeout_ms=10)


def test_no_attempt_to_start_ray_begins_after_the_deadline():
    attempts = []

    def start() -> None:
        attempts.append(time.monotonic())
        raise local_ray._DaemonEndedError("Ray's gcs_server ended while it started")

    with pytest.raises(PlacementError, match=r"Ray's gcs_server ended while it started; .*start_timeout_s"):
        local_ray._start_within_attempts(start, time.monotonic())
    assert len(attempts) == 1
    with pytest.raises(PlacementError):
        local_ray._start_within_attempts(start, time.monotonic() + 60)
    assert len(attempts) == 1 + local_ray._ATTEMPTS

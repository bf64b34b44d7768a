import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlpack.cli.main import main
from rlpack.observe import run_lock
from rlpack.observe.errors import RunDirectoryError, RunTakenOverError
from rlpack.observe.run_lock import lock_run_dir

HOLD = """
import sys, time
from pathlib import Path
from rlpack.observe.run_lock import lock_run_dir
try:
    with lock_run_dir(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


def begin(run_dir: Path) -> subprocess.Popen[str]:
    """Start another process that takes the lock and keeps it until its standard input ends."""
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def holder(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Run another process that holds the directory inside the block."""
    with begin(run_dir) as process:
        assert said(process) == "held"
        try:
            yield process
        finally:
            process.kill()


def files(run_dir: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_ino) for path in run_dir.rglob("*") if path.is_file()}


def leave_record(run_dir: Path, **changes: object) -> None:
    """Leave the lock file of a process that is gone."""
    run_dir.mkdir(exist_ok=True)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    record = {
        "host": "here", "machine": run_lock._machine(), "pid": gone.pid, "process_start": 1, "since": "2026-01-02",
        "nonce": "0",
    }  # fmt: skip
    (run_dir / "run.lock").write_text(json.dumps(record | changes) + "\n")


def test_a_second_process_is_refused_at_once_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with holder(run_dir) as other:
        before, began = files(run_dir), time.monotonic()
        with pytest.raises(RunDirectoryError) as refused, lock_run_dir(run_dir):
            pass
        assert time.monotonic() - began < 4.0
        assert files(run_dir) == before
        assert f"run_dir={run_dir} is in use by process {other.pid} on {os.uname().nodename}, since 20" in str(
            refused.value
        )
        assert "wait until that run ends, stop it, or choose another run_dir" in str(refused.value)


def test_a_second_rlpack_train_ends_with_2_before_ray_starts_or_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start_ray(config: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("rlpack.cli.train._load_while_ray_starts", start_ray)
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints" / "train" / ".tmp-4-00").mkdir(parents=True)  # a save in progress
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    with holder(run_dir) as other:
        before = files(run_dir)
        assert main(["train", f"run_dir={run_dir}", "resume=auto"]) == 2
        assert files(run_dir) == before
        assert (run_dir / "checkpoints" / "train" / ".tmp-4-00").is_dir()
    assert f"is in use by process {other.pid} on" in capsys.readouterr().err


def test_of_many_processes_that_start_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    processes = [begin(tmp_path / "run") for _ in range(6)]
    answers = [said(process) for process in processes]
    for process in processes:
        process.communicate("")
    assert answers.count("held") == 1
    assert all(answer == "held" or answer.startswith("RunDirectoryError: ") for answer in answers)


def test_a_released_directory_is_as_before_and_can_be_taken_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "mine"
    for _ in range(2):
        with lock_run_dir(run_dir):
            assert [path.name for path in run_dir.iterdir()] == ["run.lock"]
        assert list(tmp_path.iterdir()) == []
    run_dir.mkdir(parents=True)
    with lock_run_dir(run_dir):
        pass
    assert list(run_dir.iterdir()) == []


def test_an_error_releases_the_directory(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock_run_dir(tmp_path):
        raise KeyError
    with holder(tmp_path):
        pass


def test_a_killed_process_leaves_a_record_that_the_next_takes_over_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holder(tmp_path) as killed:
        killed.kill()
        killed.wait()
        began = time.monotonic()
        with lock_run_dir(tmp_path):
            assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
        assert time.monotonic() - began < 4.0
    assert f"run_dir={tmp_path} was left by process {killed.pid} on" in caplog.text
    assert "taking it over" in caplog.text


def test_a_killed_process_that_nobody_has_reaped_yet_is_gone(tmp_path: Path) -> None:
    with holder(tmp_path) as killed:
        killed.kill()
        time.sleep(0.2)  # a zombie until `wait`, below
        with lock_run_dir(tmp_path):
            pass


def test_a_record_of_another_process_with_the_same_id_is_stale(tmp_path: Path) -> None:
    leave_record(tmp_path, pid=os.getpid())
    with lock_run_dir(tmp_path) as lock:
        lock.check()


def test_a_process_on_another_machine_that_is_alive_is_named_with_the_way_to_take_over(tmp_path: Path) -> None:
    leave_record(tmp_path, host="node-7", machine="another")
    beat = "import os, sys, time\nwhile True: time.sleep(0.2); os.utime(sys.argv[1])"
    with subprocess.Popen([sys.executable, "-c", beat, str(tmp_path / "run.lock")]) as alive:
        try:
            with (
                pytest.raises(RunDirectoryError, match=r"on node-7, since 2026-01-02") as refused,
                lock_run_dir(tmp_path),
            ):
                pass
        finally:
            alive.kill()
    assert f"if that process is surely gone, delete {tmp_path / 'run.lock'}" in str(refused.value)
    assert json.loads((tmp_path / "run.lock").read_text())["host"] == "node-7"


@pytest.mark.parametrize("text", [None, "", "{", '{"pid": 3}'])
def test_a_process_on_another_machine_without_a_heartbeat_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    monkeypatch.setattr(run_lock, "WATCH_S", 0.6)
    leave_record(tmp_path, host="node-7", machine="another")
    if text is not None:
        (tmp_path / "run.lock").write_text(text)
    with lock_run_dir(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert ("node-7" in caplog.text) == (text is None)


def test_a_heartbeat_of_yesterday_is_not_watched(tmp_path: Path) -> None:
    leave_record(tmp_path, host="node-7", machine="another")
    yesterday = time.time() - 86400
    os.utime(tmp_path / "run.lock", (yesterday, yesterday))
    began = time.monotonic()
    with lock_run_dir(tmp_path):
        assert time.monotonic() - began < 4.0


def test_the_owner_shows_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.05)
    with lock_run_dir(tmp_path):
        seen = set()
        deadline = time.monotonic() + 5
        while len(seen) < 3 and time.monotonic() < deadline:
            seen.add((tmp_path / "run.lock").stat().st_mtime_ns)
            time.sleep(0.02)
        assert len(seen) == 3


@pytest.mark.parametrize("how", ["deleted", "overwritten", "replaced"])
def test_a_process_whose_directory_was_taken_over_stops_before_it_writes_again(tmp_path: Path, how: str) -> None:
    file = tmp_path / "run.lock"
    with lock_run_dir(tmp_path) as lock:
        lock.check()
        text = file.read_text()
        if how != "overwritten":
            file.unlink()
        if how != "deleted":
            file.write_text(text.replace("nonce", "other"))
        with pytest.raises(RunTakenOverError, match="was taken over"):
            lock.check()
    assert file.exists() == (how != "deleted")  # it is the other process's


def test_a_storage_without_file_locks_still_keeps_a_second_process_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("rlpack.observe.run_lock.fcntl.lockf", no_locks)
    with (
        holder(tmp_path) as other,
        pytest.raises(RunDirectoryError, match=f"process {other.pid}"),
        lock_run_dir(tmp_path),
    ):
        pass
    assert "No locks available" in caplog.text


def test_a_block_inside_another_shares_its_lock(tmp_path: Path) -> None:
    with lock_run_dir(tmp_path) as outer:
        with lock_run_dir(tmp_path / ".") as inner:
            assert inner is outer
        outer.check()
        with begin(tmp_path) as other:
            assert said(other).startswith("RunDirectoryError: ")


def test_a_directory_that_cannot_be_made_names_run_dir(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunDirectoryError, match=r"run_dir=.*/file/run can't be written"),
        lock_run_dir(tmp_path / "file" / "run"),
    ):
        pass


def test_what_a_linked_lock_leads_to_is_not_touched(tmp_path: Path) -> None:
    run_dir, precious = tmp_path / "run", tmp_path / "precious"
    run_dir.mkdir()
    precious.write_text("precious")
    (run_dir / "run.lock").symlink_to(precious)
    with (
        pytest.raises(RunDirectoryError, match=r"run\.lock is not a regular file, so run_dir=.*; delete it"),
        lock_run_dir(run_dir),
    ):
        pass
    assert precious.read_text() == "precious"


def test_a_copy_of_a_running_runs_directory_can_be_used_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir, copy = tmp_path / "run", tmp_path / "copy"
    with holder(run_dir):
        shutil.copytree(run_dir, copy)
        began = time.monotonic()
        with lock_run_dir(copy):
            assert time.monotonic() - began < 4.0
            assert json.loads((copy / "run.lock").read_text())["pid"] == os.getpid()
        with pytest.raises(RunDirectoryError, match="is in use by process"), lock_run_dir(run_dir):
            pass
    assert f"{copy / 'run.lock'} was copied from another run directory" in caplog.text


@pytest.mark.parametrize("record", [{"pid": "1\0"}, {"machine": [1]}, {"host": None}])
def test_a_record_of_other_types_names_nobody(tmp_path: Path, record: dict[str, object]) -> None:
    leave_record(tmp_path / "run", **record)
    os.utime(tmp_path / "run" / "run.lock", (1, 1))
    with lock_run_dir(tmp_path / "run"):
        pass

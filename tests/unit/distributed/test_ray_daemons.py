"""Nothing of a run's Ray outlives its driver, and a driver does not hang on a Ray that has ended."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlpack.distributed import ray_reaper, ray_watch
from rlpack.distributed.answers import ask_ray
from rlpack.distributed.errors import ClusterError

DRIVER = """
import subprocess, sys, time
from rlpack.distributed.ray_daemons import RayDaemons
from rlpack.distributed.run_token import RunToken

token = RunToken()
daemons = RayDaemons(token)
start = daemons.starting(subprocess.Popen)
# One that has started another, which ignores what asks it to end; and one of another run.
one = start(["sh", "-c", "trap '' TERM HUP; (trap '' TERM HUP; sleep 300) & exec sleep 300"])
other = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(daemons._reaper.pid, one.pid, other.pid, token.folder, flush=True)
if sys.argv[1] == "closes":
    daemons.close()
    print("closed", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("how", ["closes", "is killed"])
def test_what_a_driver_started_ends_with_it_or_when_it_says_so(how):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, how], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        *pids, folder = driver.stdout.readline().split()
        reaper, one, other = (psutil.Process(int(pid)) for pid in pids)
        ours = [one, *one.children(recursive=True)]
        if how == "is killed":
            driver.send_signal(signal.SIGKILL)
            driver.wait(10)
        else:
            assert driver.stdout.readline() == "closed\n"
        deadline = time.monotonic() + 10
        while not all(is_gone(process) for process in [*ours, reaper]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(is_gone(process) for process in [*ours, reaper])
        assert not Path(folder).exists()
        assert other.is_running()
        other.kill()
    finally:
        driver.kill()
        driver.wait(10)


ENDED_BY_RAY = """
import os, sys, time
from pathlib import Path
from rlpack.distributed.ray_daemons import RayDaemons
from rlpack.distributed.run_token import RunToken

logs, last = Path(sys.argv[1]), sys.argv[2]
(logs / f"python-core-driver-01ff_{os.getpid()}.log").write_text(f"[I 7 7] core.cc:1: hello\\n[W 7 7] {last}\\n")
daemons = RayDaemons(RunToken())
daemons.watch(str(logs), 6.0)
daemons.log_to(logs / "run.log")
print(daemons._reaper.pid, flush=True)
os._exit(1)
"""


@pytest.mark.parametrize("is_by_ray", [True, False])
def test_a_driver_that_ray_ends_without_a_message_gets_one_afterwards(tmp_path: Path, is_by_ray: bool):
    last = (
        "connection.cc:216: The connection to the plasma store is failed. Terminate the process." if is_by_ray else ""
    )
    (tmp_path / "run.log").write_text("what was logged before\n")
    done = subprocess.run(
        [sys.executable, "-c", ENDED_BY_RAY, tmp_path, last], capture_output=True, text=True, timeout=30, check=False
    )
    message = "because the raylet, which holds the object store, ended during the run"
    assert (message in done.stderr, done.returncode) == (is_by_ray, 1)
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert lines[0] == "what was logged before"
    assert len(lines) == 1 + is_by_ray
    assert all(message in line and str(tmp_path) in line and "resume=auto" in line for line in lines[1:])
    psutil.wait_procs([process for process in psutil.process_iter() if process.pid == int(done.stdout)], timeout=10)


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended; its parent may not have asked for its exit code yet."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_session_whose_id_another_process_has_by_now_is_left_alone():
    other = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        stat = ray_reaper._stat(other.pid)
        assert stat is not None
        assert list(ray_reaper._members({other.pid: stat[2]})) == [other.pid]
        assert list(ray_reaper._members({other.pid: stat[2] - 1})) == []
    finally:
        other.kill()
        other.wait(10)


STUCK = """
import subprocess, sys, time
from rlpack.distributed import ray_watch
from rlpack.distributed.errors import ClusterError
from rlpack.distributed.ray_daemons import RayDaemons
from rlpack.distributed.run_token import RunToken

ray_watch._STUCK_S = 0.5
daemons = RayDaemons(RunToken())
start = daemons.starting(subprocess.Popen)
gcs, raylet = (start([f"/ray/{name}", "300"], executable="/bin/sleep") for name in ("gcs_server", "raylet"))
daemons.watch("/tmp/ray/session_x/logs", 6.0)
daemons.raise_if_ended()
print(raylet.pid, flush=True)
gcs.kill()
if sys.argv[1] == "asks":
    gcs.wait(10)
    try:
        daemons.raise_if_ended()
    except ClusterError as error:
        print(error)
    time.sleep(1.0)
    daemons.kill()
    sys.exit(7)
time.sleep(300)
"""


@pytest.mark.parametrize(("what", "code"), [("asks", 7), ("is stuck", 1)])
def test_a_driver_is_told_that_a_daemon_ended_and_is_ended_if_it_never_asks(what, code):
    began = time.monotonic()
    command = [sys.executable, "-c", STUCK, what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert time.monotonic() - began < 30
    pid, _, told = done.stdout.partition("\n")
    message = told if what == "asks" else done.stderr
    assert message.startswith("Ray's gcs_server (process ")
    assert ") was killed by SIGKILL during the run, which can't continue without it; " in message
    assert not psutil.pid_exists(int(pid)) or is_gone(psutil.Process(int(pid)))


LATE = """
import ctypes, subprocess, sys
from rlpack.distributed.errors import PlacementError
from rlpack.distributed.ray_daemons import RayDaemons
from rlpack.distributed.run_token import RunToken

daemons = RayDaemons(RunToken())
raylet = daemons.starting(subprocess.Popen)(["sleep", "300"])
daemons.end_start_after(1.0, PlacementError("Ray did not start\\non this machine"))
if sys.argv[1] == "in time":
    daemons.watch("/tmp/ray/session_x/logs", 6.0)
print(raylet.pid, flush=True)
ctypes.PyDLL(None).sleep(4)  # with Python's lock held, as Ray does while it waits for its first workers
print(raylet.poll(), flush=True)
"""


@pytest.mark.parametrize("when", ["late", "in time"])
def test_daemons_of_a_start_that_hangs_in_ray_are_ended_and_the_error_is_printed(when: str):
    command = [sys.executable, "-c", LATE, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    is_late = when == "late"
    assert done.stderr == ("rlpack train: Ray did not start on this machine\n" if is_late else "")
    assert done.stdout.split()[1] == (str(-signal.SIGKILL) if is_late else "None")
    pid = int(done.stdout.split()[0])
    psutil.wait_procs([process for process in psutil.process_iter() if process.pid == pid], timeout=10)


class Ending:
    """Stands in for daemons of which one ends after two looks."""

    looks = 0
    silence_s = 0.0

    def raise_if_ended(self) -> None:
        self.looks += 1
        if self.looks > 2:
            raise ClusterError("Ray's gcs_server (process 1) was killed by SIGKILL", "/logs")


def test_a_question_to_ray_is_given_up_when_ray_ends(monkeypatch):
    monkeypatch.setattr(ray_watch, "_CURRENT", [Ending()])
    never = threading.Event()
    began = time.monotonic()
    with pytest.raises(ClusterError, match="gcs_server"):
        ask_ray(lambda: never.wait(60))
    assert time.monotonic() - began < 20
    never.set()
    monkeypatch.setattr(ray_watch, "_CURRENT", [Ending()])
    assert ask_ray(lambda: 3) == 3
    monkeypatch.setattr(ray_watch, "_CURRENT", [Ending()])
    with pytest.raises(ZeroDivisionError):
        ask_ray(lambda: 1 // 0)

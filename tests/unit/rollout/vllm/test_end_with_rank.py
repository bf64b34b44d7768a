"""vLLM's processes end with their rank: trees of processes as vLLM starts them, without vLLM."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 20.0
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's prctl and pidfd_open")

# A rank that starts EngineCore, which has the model itself or starts two workers. Processes with the model print their
# ids and those of their parents.
TREE = """
import multiprocessing, os, sys, time
from rlpack.rollout.vllm.end_with_rank import RANK_VARIABLE, end_with_rank

def run_model():
    end_with_rank()
    print(os.getpid(), os.getppid(), flush=True)
    time.sleep(600)

def start(target):
    multiprocessing.get_context(sys.argv[2]).Process(target=target).start()

def run_engine_core():
    for _ in range(2):
        start(run_model)
    time.sleep(600)

if __name__ == "__main__":
    os.environ[RANK_VARIABLE] = str(os.getpid())
    start(run_model if sys.argv[1] == "one" else run_engine_core)
    time.sleep(600)
"""


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def alive_at_the_deadline(processes: list[psutil.Process]) -> list[psutil.Process]:
    end = time.monotonic() + DEADLINE_S
    while any(map(is_running, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    return [process for process in processes if is_running(process)]


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(("devices", "num_models"), [("one", 1), ("two", 2)])
def test_all_processes_of_an_engine_end_with_a_killed_rank(tmp_path: Path, method: str, devices: str, num_models: int):
    script = tmp_path / "rank.py"
    script.write_text(TREE)
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, str(script), devices, method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as rank:
        assert rank.stdout is not None
        lines = [rank.stdout.readline().split() for _ in range(num_models)]
        processes = [psutil.Process(pid) for pid in {int(word) for line in lines for word in line} - {rank.pid}]
        assert len(processes) == {"one": 1, "two": 3}[devices]
        rank.send_signal(signal.SIGKILL)
        left = alive_at_the_deadline(processes)
        for process in left:
            process.kill()
    assert left == []

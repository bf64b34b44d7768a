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
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from rlpack.rollout.vllm.end_with_rank import RANK_VARIABLE, end_with_rank

def run_model():
    end_with_rank()
    os.write(1, f"{os.getpid()} {os.getppid()}\\n".encode())  # in one piece: two processes print
    time.sleep(600)

def run_worker(is_ready):
    end_with_rank()
    is_ready.set()
    time.sleep(600)

def start(target, *arguments):
    process = multiprocessing.get_context(sys.argv[2]).Process(target=target, args=arguments)
    process.start()
    return process

def run_engine_core():
    for _ in range(2):
        start(run_model)
    time.sleep(600)

def run_threads():
    def start_worker():
        is_ready = multiprocessing.get_context(sys.argv[2]).Event()
        process = start(run_worker, is_ready)
        is_ready.wait()
        return process

    with ThreadPoolExecutor(2) as pool:
        workers = [started.result() for started in [pool.submit(start_worker) for _ in range(2)]]
    ended = wait([worker.sentinel for worker in workers], 0.5)
    print(len(ended), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    os.environ[RANK_VARIABLE] = str(os.getpid())
    start({"one": run_model, "two": run_engine_core, "threads": run_threads}[sys.argv[1]])
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


def start_rank(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    script = folder / "rank.py"
    script.write_text(TREE)
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    return subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True, env=variables)


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(
    ("devices", "num_models", "killed"), [("one", 1, "rank"), ("two", 2, "rank"), ("two", 2, "parent")]
)
def test_all_processes_with_a_model_end_with_their_rank_and_their_parent(
    tmp_path: Path, method: str, devices: str, num_models: int, killed: str
):
    with start_rank(tmp_path, devices, method) as rank:
        assert rank.stdout is not None
        lines = [[int(word) for word in rank.stdout.readline().split()] for _ in range(num_models)]
        processes = [psutil.Process(pid) for pid in {pid for line in lines for pid in line} - {rank.pid}]
        assert len(processes) == {"one": 1, "two": 3}[devices]
        os.kill(rank.pid if killed == "rank" else lines[0][1], signal.SIGKILL)
        left = alive_at_the_deadline(processes)
        for process in left:
            process.kill()
        rank.kill()
    assert left == []


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_outlive_the_threads_that_started_them(tmp_path: Path, method: str):
    with start_rank(tmp_path, "threads", method) as rank:
        assert rank.stdout is not None
        num_ended = int(rank.stdout.readline())
        for process in (*psutil.Process(rank.pid).children(recursive=True), rank):
            process.kill()
    assert num_ended == 0

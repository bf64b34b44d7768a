"""The processes of an engine end together."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import psutil

from rlpack.rollout.vllm.start_engine import kill

DEADLINE_S = 10.0


def start_another(sender: Connection) -> None:
    """Start a process, as vLLM does for each GPU, and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    sender.send(child.pid)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_an_engine_that_hangs_is_killed_with_the_processes_that_it_started():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=start_another, args=(sender,), daemon=False)
    process.start()
    assert receiver.poll(DEADLINE_S)
    child = psutil.Process(receiver.recv())
    kill([process])
    assert process.exitcode == -signal.SIGKILL
    end = time.monotonic() + DEADLINE_S
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.01)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

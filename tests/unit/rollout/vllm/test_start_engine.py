"""The processes of an engine end together."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch

from rlpack.rollout.vllm import start_engine
from rlpack.rollout.vllm.deadlines import Deadline
from rlpack.rollout.vllm.end_with_rank import RANK_VARIABLE
from rlpack.rollout.vllm.event_loop import EventLoop
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


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that starts an engine without vLLM: instead of vLLM's front end, it calls a function."""
    loop, deadline = EventLoop("test"), Deadline(DEADLINE_S, "a test")

    def start(on_start: Callable[[], None], *, on_gpu: bool) -> None:
        async def front_end(*arguments: Any) -> None:
            on_start()

        monkeypatch.setattr(start_engine, "_start", front_end)
        arguments = {"enforce_eager": True}
        start_engine.start_engine(arguments, loop, deadline=deadline, on_gpu=on_gpu, deterministic=False)

    monkeypatch.setattr(start_engine, "installation_problem", lambda **device: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield start
    loop.close()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_vllms_processes_get_the_id_of_the_rank_with_which_they_end(starting: Callable[..., None], on_gpu: bool):
    given: list[str | None] = []
    starting(lambda: given.append(os.environ.get(RANK_VARIABLE)), on_gpu=on_gpu)
    assert given == [str(os.getpid())]
    assert RANK_VARIABLE not in os.environ


@pytest.mark.parametrize(("on_gpu", "expected"), [(True, ["empty_cache", "start"]), (False, ["start"])])
def test_memory_that_a_trainer_has_cached_is_freed_before_an_engine_starts_on_gpus(
    starting: Callable[..., None], monkeypatch: pytest.MonkeyPatch, on_gpu: bool, expected: list[str]
):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    starting(lambda: calls.append("start"), on_gpu=on_gpu)
    assert calls == expected

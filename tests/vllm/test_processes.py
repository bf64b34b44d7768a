"""vLLM's process: what is said when it dies, hangs or doesn't start, and that it never outlives its rank."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from tests.vllm.engines import prompts_of, sampled, start

# Long rows of many prompts: minutes of work.
LONG = SamplingParams(max_new_tokens=2000)
PROMPTS = prompts_of(*[4] * 64)
TIMEOUT_S = 8.0
GRACE_S = 2.0
ENDED_WITHIN_S = 10.0


def long_engine(**rollout) -> VLLMEngine:
    return start("qwen2", tied=False, max_length=2048, **({"kv_cache_gb": 0.5} | rollout))


def children() -> list[psutil.Process]:
    """Return this process's children, but multiprocessing's tracker of resources, which stays."""
    alive = psutil.Process().children(recursive=True)
    return [child for child in alive if is_running(child) and "resource_tracker" not in " ".join(child.cmdline())]


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def no_child_is_left() -> Iterator[None]:
    before = {child.pid for child in children()}
    yield
    until(lambda: {child.pid for child in children()} <= before, ENDED_WITHIN_S)
    assert [child for child in children() if child.pid not in before] == []


def after(delay_s: float, action: Callable[[], None]) -> Callable[[], float]:
    """Run an action later, in a thread; return a function that says when it ran."""
    ran: list[float] = []

    def act() -> None:
        time.sleep(delay_s)
        ran.append(time.monotonic())
        action()

    threading.Thread(target=act, daemon=True).start()
    return lambda: ran[0]


def test_the_end_of_its_process_is_named_within_2_s_by_every_call(no_child_is_left: None):
    engine = long_engine()
    try:
        (process,) = engine._started.processes
        killed_at = after(1.0, lambda: os.kill(process.pid, signal.SIGKILL))
        with pytest.raises(EngineError) as caught:
            sampled(engine, PROMPTS, LONG)
        assert time.monotonic() - killed_at() < GRACE_S
        assert "vLLM failed at policy version 0: vLLM's process was killed by SIGKILL" in str(caught.value)
        assert not engine.is_alive
        begin = time.monotonic()
        for call in (
            lambda: sampled(engine, PROMPTS, LONG),
            lambda: engine.logprobs(PROMPTS.values.view(64, 4)),
            lambda: setattr(engine, "policy_version", 1),
        ):
            with pytest.raises(EngineError, match="killed by SIGKILL"):
                call()
        assert time.monotonic() - begin < 3 * GRACE_S
    finally:
        engine.close()
    engine.close()  # a second time changes nothing


def test_a_stopped_process_costs_a_row_its_deadline_and_can_be_closed(no_child_is_left: None):
    engine = long_engine(request_timeout_s=TIMEOUT_S)
    try:
        (process,) = engine._started.processes
        os.kill(process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(EngineError, match=r"no response within rollout\.request_timeout_s=8 s at policy version 0"):
            sampled(engine, PROMPTS, LONG)
        assert TIMEOUT_S <= time.monotonic() - begin < TIMEOUT_S + GRACE_S
        assert engine.is_alive  # as far as anyone can tell
    finally:
        begin = time.monotonic()
        engine.close()
        assert time.monotonic() - begin < 20


def test_a_row_that_takes_too_long_is_given_up_and_the_engine_answers_the_next(no_child_is_left: None):
    engine = long_engine(request_timeout_s=2.0)
    try:
        with pytest.raises(EngineError, match=r"rollout\.request_timeout_s=2 s"):
            sampled(engine, PROMPTS, LONG)
        made = sampled(engine, prompts_of(4), SamplingParams(max_new_tokens=2))
        assert made.token_ids.lengths.tolist() == [2]
    finally:
        engine.close()


def test_starting_and_generating_write_nothing_to_the_console(capfd, caplog: pytest.LogCaptureFixture):
    """vLLM's notices are in the run's log instead."""
    with caplog.at_level(logging.INFO):
        engine = start("qwen2", tied=False)
        try:
            sampled(engine, prompts_of(4), SamplingParams(max_new_tokens=2))
        finally:
            engine.close()
    assert capfd.readouterr() == ("", "")
    assert "vLLM logged:" in caplog.text
    assert "NUMA" in caplog.text or "Triton" in caplog.text


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        pytest.param({"vllm": {"kv_cache_dtype": "nonsense"}}, "cache_dtype .*'nonsense'", id="a bad argument"),
        pytest.param({"vllm": {"max_num_batched_tokens": 16}}, "max_num_batched_tokens", id="arguments that collide"),
        pytest.param({"kv_cache_gb": 1e6}, r"[Mm]emory|allocate", id="no memory for the cache"),
    ],
)
def test_an_engine_that_does_not_start_says_why_and_leaves_no_process(no_child_is_left: None, rollout, words: str):
    before = threading.active_count()
    with pytest.raises(EngineError, match=rf"^vLLM did not start: .*(?:{words})") as caught:
        start("qwen2", tied=False, **rollout)
    assert "\n" not in str(caught.value)
    assert until(lambda: threading.active_count() <= before, ENDED_WITHIN_S)


def test_closing_ends_all_processes_and_threads(no_child_is_left: None):
    others = set(threading.enumerate())  # the engine that tests share may run
    engine = start("qwen2", tied=False)
    (process,) = engine._started.processes
    assert process in multiprocessing.active_children()
    sampled(engine, prompts_of(4), SamplingParams(max_new_tokens=2))
    engine.close()
    assert not psutil.pid_exists(process.pid)
    assert "rlpack-vllm" not in {thread.name for thread in set(threading.enumerate()) - others}


RANK = """
import sys, time
from tests.vllm.engines import start

if __name__ == "__main__":
    engine = start("qwen2", tied=False)
    print(engine._started.processes[0].pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_vllms_process_ends_with_a_rank_that_is_killed(tmp_path: Path, how: signal.Signals):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as rank:
        assert rank.stdout is not None
        engine = psutil.Process(int(next(line for line in rank.stdout if line.strip().isdecimal())))
        assert is_running(engine)
        rank.send_signal(how)
        rank.wait(ENDED_WITHIN_S)
    ended = until(lambda: not is_running(engine), ENDED_WITHIN_S)
    if not ended:
        engine.kill()
    assert ended

"""Coroutines from synchronous code: every call ends at its deadline, and errors pass through."""

import asyncio
import threading
import time

import pytest

from rlpack.role_call import restart_call_clock, role_call
from rlpack.rollout.errors import EngineDeadlineError, EngineError
from rlpack.rollout.vllm.deadlines import Deadline
from rlpack.rollout.vllm.event_loop import EventLoop

DEADLINE_S = 0.2
DEADLINE = Deadline(DEADLINE_S, "some.key=0.2")
LATEST_S = 5.0  # far below the 30 s that the coroutines take, far above what a slow machine adds

LATEST = Deadline(LATEST_S, "some.key=5")


@pytest.fixture
def loop():
    made = EventLoop("tested-loop")
    yield made
    made.close()


async def sleeps():
    await asyncio.sleep(30)


async def ignores_cancellation():
    end = time.monotonic() + 3
    while time.monotonic() < end:
        try:
            await asyncio.sleep(end - time.monotonic())
        except asyncio.CancelledError:
            continue


async def blocks_its_thread():
    time.sleep(15)


async def waits_for_nothing():
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("work", [sleeps, ignores_cancellation, blocks_its_thread, waits_for_nothing])
def test_the_deadline_is_kept_whatever_the_coroutine_does(loop, work):
    start = time.monotonic()
    with pytest.raises(EngineDeadlineError, match=r"^vLLM did not load something within 0\.2 s \(some\.key=0\.2\)$"):
        loop.run(work(), DEADLINE, "load something")
    assert DEADLINE_S <= time.monotonic() - start < 10


def test_calls_of_one_call_of_a_role_have_a_deadline_together_and_those_after_a_start_have_it_again(loop):
    deadline = LATEST._replace(together=Deadline(0.5, "half of that"))

    def end_of_the_next() -> float:
        start = time.monotonic()
        text = r"^vLLM did not load something within 0\.5 s \(half of that\), which one call of its rank has for all"
        with pytest.raises(EngineDeadlineError, match=text):
            loop.run(sleeps(), deadline, "load something")
        return time.monotonic() - start

    with role_call():
        loop.run(asyncio.sleep(0.4), deadline, "load another")
        assert end_of_the_next() < 0.3
        restart_call_clock()  # as once an engine has started
        assert 0.4 < end_of_the_next() < 2.5
    with role_call():
        assert 0.4 < end_of_the_next() < 2.5
    assert loop.run(asyncio.sleep(0.6, "done"), deadline, "load something") == "done"  # within no call of a role


def test_a_result_is_returned_and_the_coroutine_runs_in_the_loops_own_thread(loop):
    async def name():
        return threading.current_thread().name

    assert loop.run(name(), LATEST, "answer") == "tested-loop"


@pytest.mark.parametrize("error", [ValueError("a reason"), TimeoutError("vLLM's own"), EngineError("request 3")])
def test_an_error_of_the_coroutine_passes_through(loop, error):
    async def fails():
        raise error

    with pytest.raises(type(error)) as caught:
        loop.run(fails(), LATEST, "answer")
    assert str(caught.value) == str(error)


def test_a_coroutine_is_cancelled_at_its_deadline_and_the_loop_goes_on(loop):
    cancelled = threading.Event()

    async def waits():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(EngineError):
        loop.run(waits(), DEADLINE, "answer")
    assert cancelled.wait(LATEST_S)

    async def one():
        return 1

    assert loop.run(one(), LATEST, "answer") == 1


def test_closing_cancels_what_still_runs_and_ends_the_thread():
    loop, begun, ended = EventLoop("closed-loop"), threading.Event(), threading.Event()

    async def in_background():
        begun.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    async def start():
        return asyncio.ensure_future(in_background())

    task = loop.run(start(), LATEST, "start")
    assert begun.wait(LATEST_S)
    start_time = time.monotonic()
    loop.close()
    assert ended.is_set()
    assert task.cancelled()
    assert time.monotonic() - start_time < LATEST_S
    assert "closed-loop" not in {thread.name for thread in threading.enumerate()}
    loop.close()  # a second time changes nothing


def test_a_closed_loop_refuses_at_once():
    loop = EventLoop("tested-loop")
    loop.close()
    start = time.monotonic()
    with pytest.raises(EngineError, match="vLLM can't load something: its engine is closed"):
        loop.run(sleeps(), LATEST, "load something")
    assert time.monotonic() - start < LATEST_S


def test_closing_ends_in_time_even_if_a_coroutine_blocks_the_thread():
    loop = EventLoop("tested-loop")
    with pytest.raises(EngineError):
        loop.run(blocks_its_thread(), DEADLINE, "answer")
    start = time.monotonic()
    loop.close()
    assert time.monotonic() - start < 10

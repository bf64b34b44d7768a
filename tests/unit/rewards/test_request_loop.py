"""The event loop that the calls of a role share."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlpack.rewards.request_loop import THREAD, RequestLoop


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def test_calls_share_the_slots_in_the_order_of_the_calls():
    loop, taken, has_begun, ends = RequestLoop(num_slots=1), list[int](), threading.Event(), threading.Event()

    async def call(slots: asyncio.Semaphore, number: int) -> int:
        async with slots:
            taken.append(number)
            has_begun.set()
            while number == 0 and not ends.is_set():
                await asyncio.sleep(0.005)
        return number

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(loop.run, lambda slots: call(slots, 0))]
        assert has_begun.wait(30)
        for number in (1, 2, 3):
            waits = threading.Event()

            async def later(slots: asyncio.Semaphore, number: int = number, waits: threading.Event = waits) -> int:
                asyncio.get_running_loop().call_soon(waits.set)  # once this waits for a slot
                return await call(slots, number)

            calls.append(threads.submit(loop.run, later))
            assert waits.wait(30)
        assert taken == [0]
        ends.set()
        assert [one.result(30) for one in calls] == [0, 1, 2, 3]
    assert taken == [0, 1, 2, 3]


def test_an_error_of_one_call_reaches_its_caller_alone():
    loop, has_failed = RequestLoop(num_slots=2), threading.Event()

    async def fail(slots: asyncio.Semaphore) -> int:
        async with slots:
            raise KeyError("mine")

    async def wait(slots: asyncio.Semaphore) -> int:
        async with slots:
            while not has_failed.is_set():
                await asyncio.sleep(0.005)
        return 5

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(loop.run, wait)
        with pytest.raises(KeyError, match="mine"):
            loop.run(fail)
        assert not other.done()
        has_failed.set()
        assert other.result(30) == 5


def test_the_thread_is_a_daemon_that_ends_with_the_last_call_and_starts_again_with_the_next():
    loop = RequestLoop(num_slots=1)

    async def serving(slots: asyncio.Semaphore) -> threading.Thread:
        async with slots:
            return threading.current_thread()

    for _ in range(2):
        thread = loop.run(serving)
        thread.join(30)
        assert (thread.daemon, thread.is_alive()) == (True, False)
    assert loop_threads() == []


def test_what_a_call_leaves_behind_ends_with_the_thread():
    loop, ended = RequestLoop(num_slots=1), threading.Event()

    async def linger() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def leave(slots: asyncio.Semaphore) -> asyncio.Task[None]:
        task = asyncio.create_task(linger())
        await asyncio.sleep(0)
        return task

    assert loop.run(leave) is not None
    assert ended.wait(30)

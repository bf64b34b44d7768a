"""A thread with an event loop: runs vLLM's coroutines from synchronous code, each with a deadline."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from rlpack.role_call import call_began
from rlpack.rollout.errors import EngineDeadlineError, EngineError
from rlpack.rollout.vllm.deadlines import Deadline

T = TypeVar("T")

# Time that a cancelled coroutine gets to clean up.
_CANCEL_S = 2.0


class EventLoop:
    """An event loop in a daemon thread.

    Invariant (tests/unit/rollout/vllm/test_event_loop.py): every call ends at its deadline, whatever its coroutine
    does.
    """

    def __init__(self, name: str) -> None:
        """Start the thread; `name` shows in stack dumps."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], deadline: Deadline, what: str) -> T:
        """Run a coroutine and return its result; arguments as for `start`.

        Raises:
            EngineDeadlineError: the deadline passed, and the coroutine has been cancelled.
            EngineError: the loop is closed.
        """
        return self.start(coroutine, deadline, what).result()

    def start(self, coroutine: Coroutine[Any, Any, T], deadline: Deadline, what: str) -> "StartedCall[T]":
        """Start a coroutine and return at once.

        Args:
            coroutine: what to run.
            deadline: how long it may take from now, and the key that sets it.
            what: what it does, for the error.

        Raises:
            EngineError: the loop is closed.
        """
        if not self._thread.is_alive():
            coroutine.close()
            raise EngineError(f"vLLM can't {what}: its engine is closed")
        return StartedCall(asyncio.run_coroutine_threadsafe(coroutine, self._loop), deadline, what)

    def close(self) -> None:
        """Cancel running coroutines, and end the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
        self._thread.join(timeout=_CANCEL_S)
        if not self._thread.is_alive():
            self._loop.close()


class StartedCall(Generic[T]):
    """A running coroutine with a deadline."""

    def __init__(self, future: "concurrent.futures.Future[T]", deadline: Deadline, what: str) -> None:
        """Wrap a running coroutine; its deadline begins now."""
        self._future, self._deadline, self._what = future, deadline, what
        self._end = time.monotonic() + deadline.seconds

    def result(self) -> T:
        """Wait for the coroutine and return its result.

        Raises:
            EngineDeadlineError: the deadline passed, and the coroutine has been cancelled.
        """
        end, limit = self._end, str(self._deadline)
        began, together = call_began(), self._deadline.together
        if began is not None and together is not None and began + together.seconds < end:
            end = began + together.seconds
            limit = f"{together}, which one call of its rank has for all calls of vLLM"
        try:
            return self._future.result(timeout=max(0.0, end - time.monotonic()))
        except concurrent.futures.TimeoutError as error:
            if self._future.done():  # the coroutine's own error
                raise
            self._future.cancel()
            raise EngineDeadlineError(f"vLLM did not {self._what} within {limit}") from error


async def _cancel_all() -> None:
    """Cancel all other tasks of the running loop, then stop it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=_CANCEL_S / 2) if tasks else None
    asyncio.get_running_loop().stop()


async def gather(requests: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return all results; the first failure cancels the other requests, which aborts them in vLLM."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

"""An event loop for the requests of one role: calls in several threads share it, and slots for their requests.

Invariants (tests/unit/rewards/test_request_loop.py):

1. All calls share the slots, first come, first served.
2. Calls don't affect each other: each gets its own result or its own error.
3. The loop's thread runs as long as there are calls, so there is nothing to close.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# Name of a loop's thread.
THREAD = "score-requests"


class _Loop(NamedTuple):
    """A running event loop, and slots that belong to it."""

    events: asyncio.AbstractEventLoop
    slots: asyncio.Semaphore


class RequestLoop:
    """Runs coroutines of several threads on one event loop.

    >>> async def double(slots, number):
    ...     async with slots:
    ...         return 2 * number
    >>> RequestLoop(num_slots=1).run(lambda slots: double(slots, 3))
    6
    """

    def __init__(self, num_slots: int) -> None:
        """Share this many slots among all calls."""
        self._num_slots = num_slots
        self._lock = threading.Lock()
        self._num_calls = 0
        self._loop: _Loop | None = None

    def run(self, call: Callable[[asyncio.Semaphore], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine, made from the slots, and return its result.

        It has no deadline, but each of its requests does.
        """
        loop = self._enter()
        try:
            return asyncio.run_coroutine_threadsafe(call(loop.slots), loop.events).result()
        finally:
            self._leave(loop)

    def _enter(self) -> _Loop:
        """Count a call; the first one starts the loop."""
        with self._lock:
            if self._loop is None:
                loop = _Loop(asyncio.new_event_loop(), asyncio.Semaphore(self._num_slots))
                # A daemon, so that it can't keep the process from exiting.
                threading.Thread(target=_serve, args=(loop.events,), name=THREAD, daemon=True).start()
                self._loop = loop
            self._num_calls += 1
            return self._loop

    def _leave(self, loop: _Loop) -> None:
        """Count the end of a call; the last one ends the loop."""
        with self._lock:
            self._num_calls -= 1
            if not self._num_calls:
                self._loop = None
                loop.events.call_soon_threadsafe(loop.events.stop)


def _serve(events: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, then close it."""
    with asyncio.Runner(loop_factory=lambda: events) as runner:
        runner.get_loop().run_forever()

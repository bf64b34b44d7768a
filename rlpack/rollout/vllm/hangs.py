"""Hangs: ends vLLM's process if it hangs, so that the engine can be replaced like one that died.

It hangs if it misses the deadline of a call that loads weights, or reads or changes the engine's state. A request may
also miss its deadline because the engine has too much to do, so the process is then asked whether it still answers. If
it doesn't, it is killed: all rows in flight fail at once, and are generated elsewhere, instead of each at its own
deadline.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from rlpack.rollout.errors import EngineDeadlineError, EngineError
from rlpack.rollout.vllm.start_engine import kill

logger = logging.getLogger(__name__)

# Longest time that vLLM's process takes to answer a call unless it hangs: it answers between two iterations.
_LONGEST_S = 60.0


class Hangs:
    """Ends the process of one engine if it hangs.

    Attributes:
        cause: why it was killed; None if it was not.
    """

    def __init__(
        self, front_end: Any, processes: Sequence[BaseProcess], request_s: float, fail_rows: Callable[[str], None]
    ) -> None:
        """Watch an engine.

        Args:
            front_end: a `vllm.v1.engine.async_llm.AsyncLLM`.
            processes: vLLM's processes.
            request_s: deadline of a request; a process that is asked whether it hangs has as much time, but at most a
                minute.
            fail_rows: fails all rows in flight with a reason, since vLLM leaves some requests to a dead process waiting
                (0.32); called in the event loop.
        """
        self.cause: str | None = None
        self._front_end, self._processes, self._fail_rows = front_end, processes, fail_rows
        self._limit_s = min(_LONGEST_S, request_s)
        self._check: asyncio.Task[None] | None = None

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Kill the process if a call in the block misses its deadline."""
        try:
            yield
        except EngineError as error:
            if EngineDeadlineError in (type(error), type(error.__cause__)):
                self._end(str(error))
            raise

    def check(self) -> None:
        """Ask the process whether it hangs, in the background, and kill it if it does; call it in the event loop."""
        if self._check is None or self._check.done():
            self._check = asyncio.ensure_future(self._end_if_hung())

    async def _end_if_hung(self) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._front_end.is_sleeping()
        except TimeoutError:
            reason = f"a request missed its deadline, and then the process did not answer for {self._limit_s:g} s"
            await asyncio.to_thread(self._end, reason)
            self._fail_rows(self.cause or reason)
        except Exception as error:  # noqa: BLE001 - if the process died, its requests fail without this
            logger.warning("vLLM can't be asked whether it hangs: %s", error)

    def _end(self, reason: str) -> None:
        self.cause = f"vLLM's process hung and was killed: {reason}"
        kill(self._processes)

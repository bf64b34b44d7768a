"""The requests of rows to vLLM: each row is one request, or several after interruptions.

    begin ──► running ──► answered or failed ──► finished
                │  ▲
      interrupt │  │ resume: the prompt and what was sampled are the next request's prompt
                ▼  │
              waiting

Invariants (tests/vllm/test_interruption.py):

1. every started row is answered once, or fails once, unless it was cancelled;
2. between `interrupt` and `resume` vLLM runs no request of a row;
3. a token keeps the log-prob and the policy version that it was sampled with.
"""

import asyncio
import queue
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rlpack.rollout.engine import FinishedRow
from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.requests import continuation_seed, joined, to_prompt, to_sampling

# Deadline of vLLM's own calls, in seconds.
_CONTROL_S = 300.0
# Time in which vLLM ends the requests that it aborts, in seconds; those that are left are aborted again.
_ABORT_S = 1.0
# Longest interruption, in seconds; the calls that send weights have shorter deadlines.
_PAUSE_S = 7200.0


class RefusedError(EngineError):
    """vLLM refused a request before it ran; it may be sent again."""


class Row(NamedTuple):
    """A row to generate a response for.

    Attributes:
        key: identifies the row.
        prompt: its token ids, int64 [n].
        seed: seed of its random numbers.
        params: how tokens are sampled.
    """

    key: int
    prompt: np.ndarray
    seed: int
    params: SamplingParams


# Runs one request, a prompt and the arguments of `vllm.SamplingParams`, and returns its `vllm.RequestOutput`. Raises
# `RefusedError` if vLLM doesn't run it.
Ask = Callable[[dict[str, Any], dict[str, Any]], Any]


class RowRequests:
    """The rows in flight; coroutines run in the engine's event loop."""

    def __init__(self, front_end: Any, ask: Ask, explain: Callable[[Exception], str]) -> None:
        """Start without rows.

        Args:
            front_end: a `vllm.v1.engine.async_llm.AsyncLLM`.
            ask: runs a request.
            explain: returns the cause of an error that vLLM raised.

        Attributes:
            keeps_cache: whether interrupted rows continue with the keys and values that older weights computed.
        """
        self.keeps_cache = False
        self._front_end, self._ask, self._explain = front_end, ask, explain
        self._version = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._done: queue.SimpleQueue[FinishedRow] = queue.SimpleQueue()
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._num_asking = 0
        self._death: str | None = None

    async def begin(self, rows: Sequence[Row], version: int) -> None:
        """Start rows, at the policy version that the engine has."""
        self._version = version
        for row in rows:
            task = asyncio.ensure_future(self._respond(row, self._done))
            self._tasks[row.key] = task
            task.add_done_callback(partial(self._forget, row.key))

    def _forget(self, key: int, task: asyncio.Task[None]) -> None:
        """Drop the task of a row that ended, unless another row has its key by now."""
        if self._tasks.get(key) is task:
            del self._tasks[key]

    def finished(self, timeout_s: float) -> list[FinishedRow]:
        """Return the rows that ended; see `StreamingEngine.finished`. Call it from outside the loop."""
        rows: list[FinishedRow] = []
        try:
            rows.append(self._done.get(timeout=timeout_s))
            while True:
                rows.append(self._done.get_nowait())
        except queue.Empty:
            return rows

    async def cancel(self, keys: Sequence[int] | None = None) -> None:
        """Cancel rows, by default all, and abort their requests in vLLM.

        Results that are there already are dropped if all rows are cancelled, and otherwise still returned.
        """
        tasks = {task for key, task in self._tasks.items() if keys is None or key in set(keys)}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CONTROL_S / 2)
        if keys is None:
            self._done = queue.SimpleQueue()

    def fail(self, reason: str) -> None:
        """Fail all rows in flight: vLLM's process was killed. Call it in the loop."""
        self._death = reason
        for task in list(self._tasks.values()):
            task.cancel()

    async def interrupt(self) -> None:
        """Stop all requests; what they sampled is kept.

        Raises:
            EngineError: requests are left that vLLM has not ended within a deadline.
        """
        self._may_ask.clear()
        if not self._num_asking:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CONTROL_S / 2
        while self._num_asking:
            if loop.time() >= deadline:
                text = f"vLLM did not end {self._num_asking} interrupted requests within {_CONTROL_S / 2:g} s"
                raise EngineError(text)
            # Again for a request that was still in transit: vLLM aborts only those that it has. Until it resumes, it
            # refuses those that arrive (0.33), or lets them wait (0.32).
            await self._front_end.pause_generation(mode="abort", clear_cache=False)
            await self._front_end.resume_generation()
            await self._wait_for_ends(loop.time() + _ABORT_S)

    async def _wait_for_ends(self, end: float) -> None:
        """Wait until vLLM runs no request of a row, at most until `end`, in the loop's time."""
        while self._num_asking and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.002)

    async def resume(self, version: int) -> None:
        """Continue interrupted rows, at the policy version that the engine has now."""
        self._version = version
        self._may_ask.set()

    async def _respond(self, row: Row, done: queue.SimpleQueue[FinishedRow]) -> None:
        """Put the result of a row, or its failure, into a queue."""
        try:
            answer = FinishedRow(row.key, await self._answer(row), "", self._version)
        except asyncio.CancelledError:
            if self._death is None and self._is_cancelled():
                raise
            failure = self._death or f"vLLM cancelled a request at policy version {self._version}"
            answer = FinishedRow(row.key, None, failure, self._version)
        except EngineError as error:
            answer = FinishedRow(row.key, None, str(error), self._version)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is a failure of the row
            failure = f"vLLM failed at policy version {self._version}: {self._explain(error)}"
            answer = FinishedRow(row.key, None, failure, self._version)
        done.put(answer)

    @staticmethod
    def _is_cancelled() -> bool:
        """Return whether the current row was cancelled, rather than something within vLLM that it awaits."""
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0

    async def _answer(self, row: Row) -> Any:
        """Return the response to a row, like a `vllm.CompletionOutput`; continue interrupted requests."""
        parts: list[Any] = []
        sampled: list[int] = []
        salt: int | None = None
        while True:
            async with asyncio.timeout(_PAUSE_S):
                await self._may_ask.wait()
            salt = salt if salt is not None and self.keeps_cache else self._version
            prompt = to_prompt([*row.prompt.tolist(), *sampled], salt)
            sampling = to_sampling(row.params, continuation_seed(row.seed, len(sampled)))
            sampling["max_tokens"] -= len(sampled)
            self._num_asking += 1
            try:
                output = (await self._ask(prompt, sampling)).outputs[0]
            except RefusedError:
                if self._may_ask.is_set():
                    raise
                continue  # it reached vLLM during the pause of an interruption
            finally:
                self._num_asking -= 1
            parts.append(output)
            if output.finish_reason != "abort" or self._may_ask.is_set():
                return joined(parts)
            sampled += output.token_ids

"""The reward pool: reward functions run in processes that can be ended at any moment, whatever they do.

    rows of every function ──► calls of at most `rows_per_call` rows ──► any idle worker ──► one result per row

Invariants (tests/unit/rewards/pool):
1. Every row of every function gets exactly one result.
2. An overdue call is ended by SIGKILL, with its process and all descendants. No signal handler and no thread is
   involved, so code that never yields can't delay it.
3. A call of several rows that raised, died or was overdue is repeated row by row, so no row fails because of another.
4. A killed worker is replaced at once.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlpack.rewards.errors import PoolError, RewardError
from rlpack.rewards.pool import protocol as wire
from rlpack.rewards.pool.call_queue import CallQueue, FunctionSpec, PoolCall, PoolSettings
from rlpack.rewards.pool.processes import Event, Processes, WorkerHandle, printable
from rlpack.rewards.reward_result import MAX_REWARD, PROBLEMS, SKIPPED, Problem, RewardResult
from rlpack.rewards.signatures import Signature, signature_from_json

# Coroutines time out inside the worker at the deadline; the worker is killed only this much later.
_ASYNC_GRACE_S = 0.5
_REPLACE_TIMEOUT_S = 2.0
_START_TIMEOUT_S = 120.0
COULD_NOT_START = "a reward process could not start: "


class RewardPool:
    """Worker processes that run reward functions."""

    def __init__(self, functions: Mapping[str, FunctionSpec], settings: PoolSettings | None = None) -> None:
        """Start the workers without waiting for them."""
        self._functions = functions
        self._settings = settings = settings or PoolSettings()
        self._signatures: dict[str, Signature] = {}
        self._running: dict[int, PoolCall] = {}  # by worker number
        self._num_calls = 0
        self._queue = CallQueue(functions, self._signatures, {}, 0)
        loadable = {name: asdict(function) for name, function in functions.items()}
        self._processes = Processes(loadable, settings)
        for _ in range(settings.processes):
            self._processes.start()

    @property
    def output_bytes(self) -> int:
        """Return the bytes written to standard output and error so far."""
        return self._processes.output_bytes

    @property
    def is_ready(self) -> bool:
        """Whether every worker is running and has loaded its functions."""
        workers = self._processes.workers.values()
        return len(workers) == self._settings.processes and all(worker.is_ready for worker in workers)

    @property
    def output(self) -> str:
        """Return the end of the output of the workers that are running, and of the last one that exited."""
        return self._processes.output()

    def close(self) -> None:
        """End all processes and remove their files."""
        self._processes.close()

    def wait(self, condition: Callable[[], bool] | None = None, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait until every worker is ready, or for the condition.

        Raises:
            RewardError: a function can't be loaded.
            PoolError: the workers don't start, or can't be confined.
        """
        deadline = time.monotonic() + timeout_s
        while not (condition() if condition else self.is_ready):
            if time.monotonic() > deadline:
                raise PoolError(
                    f"the reward processes were not ready within {timeout_s:g} s; they import "
                    f"{', '.join(function.target for function in self._functions.values())}"
                )
            self._handle_events(deadline)

    def signatures(self) -> Mapping[str, Signature]:
        """Return how each function is called; waits for the first worker."""
        self.wait(lambda: bool(self._signatures))
        return self._signatures

    def run(
        self, columns: Mapping[str, Sequence[Any]], num_rows: int, max_failed_rows: float = float("inf")
    ) -> dict[str, list[RewardResult]]:
        """Return every function's result on every row.

        Args:
            columns: `prompt`, `completion` and the dataset's columns by name, `num_rows` entries each.
            num_rows: B.
            max_failed_rows: number of rows that may fail; after one more, the remaining rows are skipped and count as
                failed.

        Raises:
            RewardError: a function can't be loaded, or a column can't be sent to it.
            PoolError: the workers don't start, or can't be confined.
        """
        self._queue = CallQueue(self._functions, self.signatures(), columns, num_rows, max_failed_rows)
        self._kill_running()  # calls that are left of a batch that ended with an error
        self._queue.add_all(self._settings)
        deadline = time.monotonic() + self._settings.batch_timeout_s
        while self._queue.waiting or self._running:
            if time.monotonic() > deadline:
                detail = f"the batch took longer than reward.batch_timeout_s={self._settings.batch_timeout_s:g}"
                self._abandon_batch("timeout", detail)
                break
            if self._queue.too_many_failed:
                self._abandon_batch("error", f"skipped {SKIPPED}")
                break
            self._send_calls()
            self._handle_events(min([deadline, *(call.deadline for call in self._running.values())]))
            self._kill_overdue()
        self._wait_for_replacements()
        return self._queue.results()

    def _send_calls(self) -> None:
        """Send waiting calls to idle workers."""
        for worker in list(self._processes.workers.values()):
            if not self._queue.waiting:
                return
            if not worker.is_ready or worker.is_dying or worker.number in self._running:
                continue
            call = self._queue.pop()
            self._num_calls += 1
            self._processes.send(worker, self._queue.encode(self._num_calls, call))
            self._running[worker.number] = call
            self._restart_clock(call)

    def _restart_clock(self, call: PoolCall) -> None:
        grace_s = _ASYNC_GRACE_S if self._signatures[call.function].is_async else 0.0
        call.deadline = time.monotonic() + self._functions[call.function].timeout_s + grace_s

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for number, call in list(self._running.items()):
            if now >= call.deadline:
                limit = self._functions[call.function].timeout_s
                self._queue.record_failure(self._running.pop(number), "timeout", f"took longer than {limit:g} s")
                self._processes.kill(self._processes.workers[number])

    def _abandon_batch(self, problem: Problem, detail: str) -> None:
        """Fail every row without a result, and kill busy workers."""
        for call in self._kill_running():
            self._queue.fail_pending(call, problem, detail)
        while self._queue.waiting:
            self._queue.fail_pending(self._queue.pop(), problem, detail)

    def _kill_running(self) -> list[PoolCall]:
        """Kill the workers that are running calls, and return these calls."""
        calls = list(self._running.values())
        for number in self._running:
            self._processes.kill(self._processes.workers[number])
        self._running.clear()
        return calls

    def _wait_for_replacements(self) -> None:
        """Wait until every killed worker is replaced, which takes milliseconds."""
        deadline = time.monotonic() + _REPLACE_TIMEOUT_S
        while any(worker.is_dying for worker in self._processes.workers.values()) and time.monotonic() < deadline:
            self._handle_events(deadline)

    def _handle_events(self, until: float) -> None:
        """Wait for events of the workers until the `time.monotonic()` time `until`, and handle them."""
        for event in self._processes.poll(until - time.monotonic()):
            self._handle_event(event)

    def _handle_event(self, event: Event) -> None:
        """Handle one message, or the end of a worker."""
        worker = event.worker
        if event.kind == "exited":
            self._replace(worker, event.text)
        elif worker.is_dying and event.kind == "invalid":
            pass
        elif event.kind == "invalid" or not self._handle_message(worker, event.message):
            call = self._running.pop(worker.number, None)
            if call is not None:
                self._queue.record_failure(call, "killed", "its process sent an invalid message")
            if worker.number in self._processes.workers:
                self._processes.kill(worker)

    def _replace(self, worker: WorkerHandle, cause: str) -> None:
        output = f"; it wrote: …{worker.output_tail[-300:]}" if worker.output_tail else ""
        if not worker.is_ready:
            raise PoolError(f"{COULD_NOT_START}{cause}{output}")
        call = self._running.pop(worker.number, None)
        if call is not None:
            self._queue.record_failure(call, "killed", cause + output)
        self._processes.start()

    def _handle_message(self, worker: WorkerHandle, message: wire.WireMessage) -> bool:
        """Handle a worker's message; return False if it is not a valid one."""
        match message:
            case {"failed": str(text)} if not worker.is_ready:
                raise RewardError(printable(text))
            case {"ready": dict(entries)} if not worker.is_ready and entries.keys() == self._functions.keys():
                return self._mark_ready(worker, entries)
        call = self._running.get(worker.number)
        if call is None:
            return worker.is_dying  # a late message about an abandoned call
        match message:
            case {"row": int(index), "result": [float(value) | int(value), problem, str(text)]} if (
                index in call.pending and problem in (None, *PROBLEMS) and abs(value) <= MAX_REWARD
            ):
                result = RewardResult(float(value) if problem is None else 0.0, problem, printable(text))
                self._restart_clock_of_row(call)
                self._queue.record_result(call, index, result)
                return True
            case {"done": int(), "leftovers": bool(leftovers)} if not call.pending:
                del self._running[worker.number]
                if leftovers and worker.number in self._processes.workers:
                    self._processes.kill(worker)
                return True
        return False

    def _mark_ready(self, worker: WorkerHandle, entries: Mapping[str, Any]) -> bool:
        """Store the signatures that a worker sent; return False if they are invalid."""
        signatures = {name: signature_from_json(entry) for name, entry in entries.items()}
        self._signatures = {name: signature for name, signature in signatures.items() if signature is not None}
        worker.is_ready = len(self._signatures) == len(signatures)
        return worker.is_ready

    def _restart_clock_of_row(self, call: PoolCall) -> None:
        signature = self._signatures[call.function]
        if signature.kind != "batched" and not signature.is_async:
            self._restart_clock(call)

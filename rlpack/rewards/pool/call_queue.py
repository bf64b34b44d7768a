"""A batch in the pool: the queue of calls, and the results so far. No processes are involved here."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpack.rewards.errors import RewardError
from rlpack.rewards.pool import protocol as wire
from rlpack.rewards.pool.limits import Limits
from rlpack.rewards.reward_result import Problem, RewardResult
from rlpack.rewards.signatures import Signature


@dataclass(frozen=True)
class FunctionSpec:
    """A function that the pool runs.

    Attributes:
        target: package.module:function.
        arguments: keyword arguments of every call.
        timeout_s: deadline of a row, or of a whole call for batched functions.
        key: the configuration key, for messages.
        is_called: whether the pool calls it; otherwise it is only imported, and may have any parameters.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 10.0
    key: str = "reward.function"
    is_called: bool = True


@dataclass(frozen=True)
class PoolSettings:
    """The size and the limits of a pool.

    Attributes:
        processes: number of worker processes.
        rows_per_call: most rows of one call; an async function works on them concurrently.
        batch_timeout_s: deadline of a batch, over all functions.
        strict: block the network, and changes to modes, owners, times and locks of files.
        env_vars: names of further environment variables that workers see.
        hidden: files and directories that workers can't read, in addition to credentials (`hidden_paths`).
        limits: resource limits of each worker.
    """

    processes: int = 2
    rows_per_call: int = 16
    batch_timeout_s: float = 600.0
    strict: bool = False
    env_vars: tuple[str, ...] = ()
    hidden: tuple[Path, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass
class PoolCall:
    """Rows that one function scores in one call, waiting or sent to a worker.

    Attributes:
        function: name of the function.
        rows: row numbers in the batch.
        pending: indices into `rows` that have no result yet.
        deadline: deadline of the call, or of its current row, in `time.monotonic()` seconds.
    """

    function: str
    rows: list[int]
    pending: list[int] = field(default_factory=list)
    deadline: float = 0.0


class CallQueue:
    """The calls of one batch that are waiting, and the results so far."""

    def __init__(
        self,
        functions: Mapping[str, FunctionSpec],
        signatures: Mapping[str, Signature],
        columns: Mapping[str, Sequence[Any]],
        num_rows: int,
        max_failed_rows: float = float("inf"),
    ) -> None:
        self.waiting: deque[PoolCall] = deque()
        self._functions = functions
        self._signatures = signatures
        self._columns = columns
        self._num_rows = num_rows
        self._max_failed_rows = max_failed_rows
        self._failed_rows: set[int] = set()
        self._results: dict[str, dict[int, RewardResult]] = {}

    @property
    def too_many_failed(self) -> bool:
        """Whether more rows failed than allowed."""
        return len(self._failed_rows) > self._max_failed_rows

    def add_all(self, settings: PoolSettings) -> None:
        """Queue every row of every function, split so that all processes get work."""
        size = max(1, min(settings.rows_per_call, -(-self._num_rows // settings.processes)))
        rows = list(range(self._num_rows))
        for name in self._functions:
            self._results[name] = {}
            self.waiting += [PoolCall(name, rows[start : start + size]) for start in range(0, len(rows), size)]

    def pop(self) -> PoolCall:
        """Remove and return the first waiting call."""
        call = self.waiting.popleft()
        call.pending = list(range(len(call.rows)))
        return call

    def encode(self, call_id: int, call: PoolCall) -> bytes:
        """Return a call as it is sent to a worker.

        Raises:
            RewardError: a column holds a value that JSON can't represent.
        """
        function = self._functions[call.function]
        signature = self._signatures[call.function]
        names = ["prompt", "completion", *signature.select_columns(self._columns, function.arguments)]
        columns = {name: [self._columns[name][row] for row in call.rows] for name in dict.fromkeys(names)}
        try:
            return wire.pack({"id": call_id, "function": call.function, "rows": len(call.rows), "columns": columns})
        except (TypeError, ValueError, RecursionError) as error:
            name = next(name for name, column in columns.items() if not _is_json(column))
            raise RewardError(
                f"the column {name!r} can't be sent to {function.target}: {error}; store strings, numbers, lists and "
                "objects of them in the dataset, or leave the column out"
            ) from error

    def record_result(self, call: PoolCall, index: int, result: RewardResult) -> None:
        """Store the result of one row, or queue it again by itself if it is an error of a batched call."""
        call.pending.remove(index)
        is_batched = self._signatures[call.function].kind == "batched"
        if result.problem == "error" and is_batched and len(call.rows) > 1:
            self.waiting.append(PoolCall(call.function, [call.rows[index]]))
            return
        self._store(call, index, result)

    def record_failure(self, call: PoolCall, problem: Problem, detail: str) -> None:
        """Handle a call that did not finish: its current or only row failed, all others are queued again."""
        signature = self._signatures[call.function]
        if len(call.rows) > 1 and (signature.kind == "batched" or signature.is_async):
            self.waiting += [PoolCall(call.function, [call.rows[index]]) for index in call.pending]
            return
        rest = call.pending[1:]
        call.pending = call.pending[:1]
        self.fail_pending(call, problem, detail)
        if rest:
            self.waiting.appendleft(PoolCall(call.function, [call.rows[index] for index in rest]))

    def fail_pending(self, call: PoolCall, problem: Problem, detail: str) -> None:
        """Count all rows of a call without a result as failed."""
        for index in call.pending:
            self._store(call, index, RewardResult(problem=problem, detail=detail))
        call.pending = []

    def results(self) -> dict[str, list[RewardResult]]:
        """Return the results of every function, in row order."""
        return {name: [by_row[row] for row in range(self._num_rows)] for name, by_row in self._results.items()}

    def _store(self, call: PoolCall, index: int, result: RewardResult) -> None:
        row = call.rows[index]
        self._results[call.function][row] = result
        if result.failed:
            self._failed_rows.add(row)


def _is_json(column: Any) -> bool:
    try:
        wire.pack({"column": column})
    except (TypeError, ValueError, RecursionError):
        return False
    return True

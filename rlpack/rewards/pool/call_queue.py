"""A batch on its way through the pool: the calls that wait, and the verdicts so far. No processes in here."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpack.rewards.errors import RewardError
from rlpack.rewards.pool import protocol as wire
from rlpack.rewards.pool.limits import Limits
from rlpack.rewards.reward_result import Problem, Verdict
from rlpack.rewards.signatures import Form


@dataclass(frozen=True)
class Target:
    """A function that the pool runs.

    Attributes:
        target: package.module:function.
        arguments: that it gets with every call.
        timeout_s: of a row, or of a call where it takes several rows at once.
        key: of the configuration, for messages.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 10.0
    key: str = "reward.function"


@dataclass(frozen=True)
class PoolSettings:
    """The size and the bounds of a pool.

    Attributes:
        processes: that run functions.
        rows_per_call: most rows that one call gets; an async function works on them at one time.
        batch_timeout_s: of all rows of a call, of all functions together.
        strict: close the network to them and refuse writes outside their scratch directory.
        environment: names of further variables that they see.
        limits: of each process.
    """

    processes: int = 2
    rows_per_call: int = 16
    batch_timeout_s: float = 600.0
    strict: bool = False
    environment: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass
class Call:
    """Rows of one function that a child works on.

    Attributes:
        function: its name.
        rows: their numbers in the batch.
        left: places in `rows` without a verdict so far.
        deadline: of the call, or of the row at work.
    """

    function: str
    rows: list[int]
    left: list[int] = field(default_factory=list)
    deadline: float = 0.0


class Work:
    """A batch on its way through the pool: the calls that wait, and the verdicts so far."""

    def __init__(
        self,
        functions: Mapping[str, Target],
        forms: Mapping[str, Form],
        columns: Mapping[str, Sequence[Any]],
        num_rows: int,
        allowed: float = float("inf"),
    ) -> None:
        self.queue: deque[Call] = deque()
        self._functions = functions
        self._forms = forms
        self._columns = columns
        self._num_rows = num_rows
        self._allowed = allowed
        self._failed: set[int] = set()
        self._verdicts: dict[str, dict[int, Verdict]] = {}

    @property
    def is_hopeless(self) -> bool:
        """Whether more rows failed than may."""
        return len(self._failed) > self._allowed

    def share_out(self, settings: PoolSettings) -> None:
        """Cut every function's rows into calls, at least as many as there are processes where there are rows."""
        size = max(1, min(settings.rows_per_call, -(-self._num_rows // settings.processes)))
        rows = list(range(self._num_rows))
        for name in self._functions:
            self._verdicts[name] = {}
            self.queue += [Call(name, rows[start : start + size]) for start in range(0, len(rows), size)]

    def next(self) -> Call:
        """Take the first call that waits."""
        call = self.queue.popleft()
        call.left = list(range(len(call.rows)))
        return call

    def message(self, number: int, call: Call) -> bytes:
        """Return a call as it is sent.

        Raises:
            RewardError: a column holds what JSON has no form for.
        """
        target = self._functions[call.function]
        form = self._forms[call.function]
        names = ["prompt", "completion", *form.wants(self._columns, target.arguments)]
        columns = {name: [self._columns[name][row] for row in call.rows] for name in dict.fromkeys(names)}
        try:
            return wire.pack({"id": number, "function": call.function, "rows": len(call.rows), "columns": columns})
        except (TypeError, ValueError, RecursionError) as error:
            name = next(name for name, column in columns.items() if not _is_sendable(column))
            raise RewardError(
                f"the column {name!r} can't be sent to {target.target}: {error}; it takes texts, numbers, lists and "
                "objects of them: write it so in the dataset, or leave it out"
            ) from error

    def judge(self, call: Call, place: int, verdict: Verdict) -> None:
        """Take the verdict on one row of a call."""
        call.left.remove(place)
        batched = self._forms[call.function].kind == "batched"
        if verdict.problem == "error" and batched and len(call.rows) > 1:
            self.queue.append(Call(call.function, [call.rows[place]]))
            return
        self._keep(call, place, verdict)

    def fail(self, call: Call, problem: Problem, text: str) -> None:
        """Take it that a call didn't end well: its only row, or the one at work, failed; others are repeated."""
        form = self._forms[call.function]
        left = call.left
        if len(call.rows) == 1 or (form.kind != "batched" and not form.is_async):
            first, left = left[:1], left[1:]
            call.left = first
            self.settle(call, problem, text)
            if left:
                self.queue.appendleft(Call(call.function, [call.rows[place] for place in left]))
            return
        self.queue += [Call(call.function, [call.rows[place]]) for place in left]

    def settle(self, call: Call, problem: Problem, text: str) -> None:
        """Count all rows of a call without a verdict as failed."""
        for place in call.left:
            self._keep(call, place, Verdict(problem=problem, text=text))
        call.left = []

    def result(self) -> dict[str, list[Verdict]]:
        """Return the verdicts, in the rows' order."""
        return {name: [found[row] for row in range(self._num_rows)] for name, found in self._verdicts.items()}

    def _keep(self, call: Call, place: int, verdict: Verdict) -> None:
        self._verdicts[call.function][call.rows[place]] = verdict
        if verdict.failed:
            self._failed.add(call.rows[place])


def _is_sendable(column: Any) -> bool:
    try:
        wire.pack({"column": column})
    except (TypeError, ValueError, RecursionError):
        return False
    return True

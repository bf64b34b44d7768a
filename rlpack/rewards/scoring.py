"""Rewards of a batch: run the functions in the pool, sum them with weights, and quarantine rows without a reward."""

import logging
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from rlpack.rewards.errors import TooManyFailuresError
from rlpack.rewards.pool.call_queue import FunctionSpec, PoolSettings
from rlpack.rewards.pool.pool import RewardPool
from rlpack.rewards.reward_result import FAILURES, MAX_REWARD, SKIPPED, RewardResult

logger = logging.getLogger(__name__)

# The failure rate is measured over at least this many of the last rows; a shorter history counts as this many.
_WINDOW_ROWS = 100
# If this many rows all fail, the function is broken; fewer may be one hard group.
_ALL_FAILED_ROWS = 16
# Characters of the functions' output in the error of functions that fail too often.
_SHOWN_OUTPUT = 500
_FAILURE_CODES = {str(problem): 1 + index for index, problem in enumerate(FAILURES)}


@dataclass(frozen=True)
class BatchRewards:
    """The rewards of a batch of B rows.

    Attributes:
        values: weighted sums, f32 [B]; 0 where quarantined.
        quarantined: rows without a usable reward, bool [B]; advantages leave them out.
        by_function: the unweighted rewards of each function, f32 [B]; NaN where it gave no number.
        failures: 0, or 1 + the problem's index in `FAILURES` for rows on which a function failed, int64 [B].
        rows: the combined result of all functions on each row.
        counts: number of quarantined rows per `rlpack.rewards.reward_result.Problem`.
        output_bytes: bytes that the functions wrote to standard output and error.
    """

    values: Tensor
    quarantined: Tensor
    by_function: dict[str, Tensor]
    failures: Tensor
    rows: Sequence[RewardResult]
    counts: dict[str, int]
    output_bytes: int = 0


class RewardScorer:
    """Weighted reward functions in a pool; raises if they fail too often."""

    def __init__(
        self,
        functions: Mapping[str, FunctionSpec],
        weights: Mapping[str, float],
        settings: PoolSettings,
        *,
        max_failures: float = 0.1,
    ) -> None:
        """Start the pool's processes without waiting for them."""
        self._functions = functions
        self._weights = weights
        self._failure_rate = FailureRate(max_failures)
        self._unrewarded = Counter[str]()  # problems of all rows so far, while none has a reward
        self._unrewarded_prompts: set[Any] = set()
        self._has_rewarded = max_failures >= 1
        self._pool = RewardPool(functions, settings)
        self._output_bytes = 0

    def close(self) -> None:
        """End the pool's processes."""
        self._pool.close()

    def wait(self) -> None:
        """Wait until every process has loaded every function.

        Raises:
            RewardError: a function can't be loaded.
            PoolError: the processes don't start, or can't be confined as configured.
        """
        self._pool.wait()

    def score(self, columns: Mapping[str, Sequence[Any]], num_rows: int) -> BatchRewards:
        """Return the rewards of a batch.

        A function that returns None for a row adds nothing to it. A row is quarantined if every function returned
        None, or if any of them failed or returned a number that is not finite.

        Args:
            columns: `prompt`, `completion` and the dataset's columns by name, B entries each. Only columns that a
                function names are read.
            num_rows: B.

        Raises:
            TooManyFailuresError: functions failed on more rows than allowed, or gave none of many rows a reward.
            RewardError: a function can't be loaded, or a column can't be sent to it.
            PoolError: the processes don't start.
        """
        used = {"prompt", "completion"}
        for name, signature in self._pool.signatures().items():
            used |= set(signature.select_columns(columns, self._functions[name].arguments))
        inputs = {name: columns[name] for name in columns if name in used}
        results = self._pool.run(inputs, num_rows, self._failure_rate.allowed(num_rows))
        rewards = combine_rewards(results, self._weights, self._count_output())
        first_failure = self._describe_first_failure(results, columns.get("uid"))
        self._warn_of_quarantine(rewards.rows, rewards.counts, first_failure)
        output = self._pool.output[-_SHOWN_OUTPUT:] if first_failure else ""
        self._failure_rate.record(rewards.rows, first_failure + (f"; functions wrote: …{output}" if output else ""))
        self._check_any_reward(rewards, columns["prompt"])
        return rewards

    def _check_any_reward(self, rewards: BatchRewards, prompts: Sequence[Any]) -> None:
        """Raise if no row of this process's first 100 or more has got a reward: a run would train on nothing.

        The rows have to be of several prompts: functions may return None for a single one.
        """
        self._has_rewarded |= not rewards.quarantined.all()
        if self._has_rewarded:
            return
        self._unrewarded.update(rewards.counts)
        self._unrewarded_prompts.update(map(str, prompts))
        if self._unrewarded.total() >= _WINDOW_ROWS and len(self._unrewarded_prompts) >= _ALL_FAILED_ROWS:
            names = ", ".join(function.target for function in self._functions.values())
            reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self._unrewarded.items()))
            raise TooManyFailuresError(
                f"reward function {names}: none of the {self._unrewarded.total()} rows that this process scored has a "
                f"reward ({reasons}); return a number for each row (a function without a return statement gives "
                "None), or set reward.max_failures=1 to go on anyway"
            )

    def _describe_first_failure(
        self, results: Mapping[str, Sequence[RewardResult]], prompts: Sequence[Any] | None
    ) -> str:
        """Describe the first failure, with the names of function and prompt; skipped rows come last.

        Args:
            results: of each function, B entries.
            prompts: ids of the prompts, B entries; None if they have none.
        """
        failures = [(name, row, r) for name, rows in results.items() for row, r in enumerate(rows) if r.failed]
        for name, row, result in sorted(failures, key=lambda failure: failure[2].detail.endswith(SKIPPED)):
            detail = f" ({result.detail})" if result.detail else ""
            prompt = "" if prompts is None else f" (prompt {prompts[row]})"
            return f"{self._functions[name].target} on row {row}{prompt}: {result.problem}{detail}"
        return ""

    def _warn_of_quarantine(self, rows: Sequence[RewardResult], counts: Mapping[str, int], first_failure: str) -> None:
        """Log how many rows of a batch have no usable reward, and why."""
        quarantined = sum(counts.values())
        if not quarantined:
            return
        names = ", ".join(function.target for function in self._functions.values())
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items()))
        share = f"all {len(rows)}" if quarantined == len(rows) else f"{quarantined} of {len(rows)}"
        effect = "no row is left to train on" if quarantined == len(rows) else "no loss counts them"
        hint = f"fix the first failure: {first_failure}" if first_failure else "return finite numbers"
        logger.warning("reward function %s: %s rows are quarantined (%s); %s; %s", names, share, reasons, effect, hint)

    def _count_output(self) -> int:
        """Return the bytes that functions wrote since the last batch; log the end of the output the first time."""
        total, before = self._pool.output_bytes, self._output_bytes
        self._output_bytes = total
        if total and not before:
            logger.warning(
                "reward functions write to standard output or error, %d bytes so far; from now on it is only counted. "
                "The end of it: %s", total, self._pool.output,
            )  # fmt: skip
        return total - before


# By problem, the key of the limit that a function exceeded.
_LIMITS = {"timeout": "reward.timeout_s", "killed": "reward.memory_gb"}


@dataclass
class FailureRate:
    """The rate of failed rows over a sliding window of batches; safe to use from several threads.

    Batches may overlap. Each is allowed what the window leaves at its start, so together they may fail on more rows
    than that before the first of them ends. This is acceptable, because it costs only requests: `record` counts one
    batch after another, and raises as soon as their sum is too large.

    >>> rate = FailureRate(limit=0.1)
    >>> rate.allowed(32)
    10.0

    Attributes:
        limit: largest fraction of rows that may fail; 1 allows everything.
        key: the configuration key, for messages.
        hint: what the user can do, for messages; `{}` is replaced by the limits that rows exceeded.
    """

    limit: float
    key: str = "reward.max_failures"
    hint: str = "Fix the function{}, or raise reward.max_failures"
    _batches: deque[tuple[int, int]] = field(default_factory=deque)  # (rows, failed rows) of each batch
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def allowed(self, num_rows: int) -> float:
        """Return how many of the next `num_rows` rows may fail."""
        with self._lock:
            return self._allowed(num_rows)

    def _allowed(self, num_rows: int) -> float:
        if self.limit >= 1:
            return math.inf
        self._drop_old_batches(num_rows)
        return self.limit * max(_WINDOW_ROWS, self._num_rows + num_rows) - self._num_failed

    def record(self, rows: Sequence[RewardResult], first_failure: str, allowed: float = math.inf) -> None:
        """Count a batch.

        Args:
            rows: its results.
            first_failure: description of its first failure, for the error.
            allowed: number of failed rows that it was allowed. If more failed, rows were skipped, so the run ends even
                if the window, which batches that overlap move, would allow them by now.

        Raises:
            TooManyFailuresError: the rate exceeds the limit, or all rows so far failed and there are at least 16.
        """
        with self._lock:
            self._record(rows, first_failure, allowed)

    def _record(self, rows: Sequence[RewardResult], first_failure: str, allowed: float) -> None:
        problems = Counter(row.problem for row in rows if row.failed)
        failed = problems.total()
        too_many = failed > min(allowed, self._allowed(len(rows)))
        self._batches.append((len(rows), failed))
        if self.limit >= 1 or not failed:
            return
        all_failed = self._num_failed == self._num_rows >= _ALL_FAILED_ROWS
        if too_many or all_failed:
            skipped = sum(row.detail.endswith(SKIPPED) for row in rows)
            counted = {**problems, "error": problems["error"] - skipped, "skipped": skipped}
            reasons = ", ".join(f"{name}: {count}" for name, count in sorted(counted.items(), key=str) if count)
            hint = self.hint.replace("{}", "".join(f", raise {key}" for name, key in _LIMITS.items() if problems[name]))
            raise TooManyFailuresError(
                f"reward functions failed on {failed} of {len(rows)} rows ({reasons}), {self._num_failed} of the last "
                f"{self._num_rows}; {self.key} is {self.limit:g}. The first: {first_failure}. {hint}"
            )

    @property
    def _num_rows(self) -> int:
        return sum(rows for rows, _ in self._batches)

    @property
    def _num_failed(self) -> int:
        return sum(failed for _, failed in self._batches)

    def _drop_old_batches(self, num_rows: int) -> None:
        """Drop batches that leave the window once `num_rows` more rows are counted."""
        while self._batches and self._num_rows - self._batches[0][0] + num_rows >= _WINDOW_ROWS:
            self._batches.popleft()


def combine_rewards(
    results: Mapping[str, Sequence[RewardResult]], weights: Mapping[str, float], output_bytes: int = 0
) -> BatchRewards:
    """Return the rewards of a batch from each function's results.

    >>> rewards = combine_rewards({"a": [RewardResult(1.0)], "b": [RewardResult(3.0)]}, {"a": 1.0, "b": 0.5})
    >>> rewards.values.tolist(), rewards.by_function["b"].tolist()
    ([2.5], [3.0])
    """
    rows = [
        _weighted_sum(row, list(weights.values())) for row in zip(*(results[name] for name in weights), strict=True)
    ]
    problems = [row.problem for row in rows]
    return BatchRewards(
        values=torch.tensor([row.value for row in rows], dtype=torch.float32),
        quarantined=torch.tensor([problem is not None for problem in problems], dtype=torch.bool),
        by_function={name: _to_tensor(column) for name, column in results.items()},
        failures=torch.tensor([_FAILURE_CODES.get(str(problem), 0) for problem in problems], dtype=torch.int64),
        rows=rows,
        counts=dict(Counter(problem for problem in problems if problem)),
        output_bytes=output_bytes,
    )


def _weighted_sum(results: Sequence[RewardResult], weights: Sequence[float]) -> RewardResult:
    """Combine the functions' results on one row."""
    broken = [result for result in results if result.problem not in (None, "none")]
    if broken:  # failures come before numbers that are not finite
        return next((result for result in broken if result.failed), broken[0])
    terms = [weight * result.value for result, weight in zip(results, weights, strict=True) if result.problem is None]
    if not terms:
        return RewardResult(problem="none")
    total = math.fsum(terms)
    return RewardResult(total) if abs(total) <= MAX_REWARD else RewardResult(problem="infinite")


def _to_tensor(results: Sequence[RewardResult]) -> Tensor:
    """Return a function's rewards, f32 [B]; NaN where it gave no number."""
    return torch.tensor([r.value if r.problem is None else math.nan for r in results], dtype=torch.float32)

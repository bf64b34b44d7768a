"""Rewards of a batch from several functions: run in the pool, summed with weights, checked before they reach a loss."""

import logging
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlpack.rewards.errors import TooManyFailuresError
from rlpack.rewards.pool.call_queue import PoolSettings, Target
from rlpack.rewards.pool.pool import Pool
from rlpack.rewards.reward_result import FAILURES, GIVEN_UP, LARGEST, Verdict

logger = logging.getLogger(__name__)

# A rate of failures is that of the last rows, at least so many of them; until then, that of so many.
_WINDOW_ROWS = 100
# So many rows, all that there were, are a function that doesn't work; fewer may be one hard group.
_HOPELESS_ROWS = 16
_FAILURE = {str(problem): 1 + place for place, problem in enumerate(FAILURES)}


@dataclass(frozen=True)
class Scores:
    """The rewards of a batch.

    Attributes:
        values: weighted sums, f32 [B]; 0 where quarantined.
        quarantined: rows without a usable reward, bool [B]; they take no part in advantages.
        parts: what each function gave, unweighted, f32 [B]; NaN where it gave no number.
        failures: 0, or for a row on which a function failed 1 + the place of the problem in `FAILURES`, int64 [B].
        rows: the verdict on each row, of all functions together.
        counts: how many rows are quarantined for each reason (`rlpack.rewards.reward_result.Problem`).
        output_bytes: what the functions wrote to their standard output and error.
    """

    values: Tensor
    quarantined: Tensor
    parts: dict[str, Tensor]
    failures: Tensor
    rows: Sequence[Verdict]
    counts: dict[str, int]
    output_bytes: int = 0


class Scorer:
    """Reward functions in their pool, with weights, and with the rate of failures that ends a run."""

    def __init__(
        self,
        functions: Mapping[str, Target],
        weights: Mapping[str, float],
        settings: PoolSettings,
        *,
        max_failures: float = 0.1,
    ) -> None:
        """Start the pool's processes, and wait for none, so that they start while others do."""
        self._functions = functions
        self._weights = weights
        self._failures = FailureRate(max_failures)
        self._pool = Pool(functions, settings)
        self._written = 0

    def close(self) -> None:
        """End the pool's processes."""
        self._pool.close()

    def wait(self) -> None:
        """Wait until every function is loaded, in every process.

        Raises:
            RewardError: one can't be.
            PoolError: the processes don't start, or can't be confined as they should.
        """
        self._pool.wait()

    def score(self, columns: Mapping[str, Sequence[Any]], num_rows: int) -> Scores:
        """Return the rewards of a batch.

        A function that returns None of a row has nothing to say of it and adds nothing; where all have nothing to say,
        or one gave no finite number or failed, the row is quarantined.

        Args:
            columns: `prompt`, `completion` and the dataset's by name, B entries each; only those are read that a
                function names.
            num_rows: B.

        Raises:
            TooManyFailuresError: functions failed on more rows than may be.
            RewardError: a function can't be loaded, or a column can't be sent to it.
            PoolError: the processes don't start.
        """
        forms = self._pool.forms()
        wanted = {"prompt", "completion"}
        wanted |= {name for key, form in forms.items() for name in form.wants(columns, self._functions[key].arguments)}
        read = {name: columns[name] for name in columns if name in wanted}
        verdicts = self._pool.run(read, num_rows, self._failures.allowed(num_rows))
        scores = scores_of(verdicts, self._weights, self._count_output())
        self._warn_of_quarantine(scores.rows, scores.counts)
        self._failures.take(scores.rows, self._first_failure(verdicts))
        return scores

    def _first_failure(self, verdicts: Mapping[str, Sequence[Verdict]]) -> str:
        """Return the first failure of any function, with the function's name: one that shows what is wrong, if any."""
        failures = [(name, row, v) for name, found in verdicts.items() for row, v in enumerate(found) if v.failed]
        for name, row, verdict in sorted(failures, key=lambda failure: failure[2].text.endswith(GIVEN_UP)):
            text = f" ({verdict.text})" if verdict.text else ""
            return f"{self._functions[name].target} on row {row}: {verdict.problem}{text}"
        return ""

    def _warn_of_quarantine(self, rows: Sequence[Verdict], counts: Mapping[str, int]) -> None:
        """Say how many rows of a batch have no usable reward, and that nothing trains where that is all of them."""
        quarantined = sum(counts.values())
        if not quarantined:
            return
        names = ", ".join(target.target for target in self._functions.values())
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items()))
        share = f"all {len(rows)}" if quarantined == len(rows) else f"{quarantined} of {len(rows)}"
        way_out = "none of them trains; return finite numbers" if quarantined == len(rows) else "they don't train"
        texts = [row.text for row in rows if row.failed and row.text]
        first = f"; the first failure: {texts[0]}" if texts else ""
        logger.warning("reward function %s: %s rows are quarantined (%s); %s%s", names, share, reasons, way_out, first)

    def _count_output(self) -> int:
        """Return what the functions wrote since the last batch; the first time its end is shown."""
        written, before = self._pool.output_bytes, self._written
        self._written = written
        if written and not before:
            logger.warning(
                "reward functions write to standard output or error, %d bytes so far; from now on it is only counted. "
                "The end of it: %s", written, self._pool.output,
            )  # fmt: skip
        return written - before


@dataclass
class FailureRate:
    """How many of the last rows a function failed on.

    >>> rate = FailureRate(limit=0.1)
    >>> rate.allowed(32)
    10.0

    Attributes:
        limit: largest share of rows that may fail; 1 allows everything.
        key: of the configuration, for messages.
        ways_out: what can be done, for messages.
    """

    limit: float
    key: str = "reward.max_failures"
    ways_out: str = "Mend the function, or raise reward.timeout_s, reward.memory_gb or reward.max_failures"
    _calls: deque[tuple[int, int]] = field(default_factory=deque)

    def allowed(self, rows: int) -> float:
        """Return how many of the next `rows` rows may fail."""
        if self.limit >= 1:
            return math.inf
        self._forget(rows)
        seen = sum(count for count, _ in self._calls)
        return self.limit * max(_WINDOW_ROWS, seen + rows) - sum(failed for _, failed in self._calls)

    def take(self, rows: Sequence[Verdict], first: str) -> None:
        """Count a batch.

        Raises:
            TooManyFailuresError: more of the last rows failed than may, or all of several rows did.
        """
        problems = Counter(row.problem for row in rows if row.failed)
        failed = problems.total()
        too_many = failed > self.allowed(len(rows))
        self._calls.append((len(rows), failed))
        if self.limit >= 1 or not failed:
            return
        seen = sum(count for count, _ in self._calls)
        all_failed = sum(count for _, count in self._calls) == seen >= _HOPELESS_ROWS
        if too_many or all_failed:
            reasons = ", ".join(f"{problem}: {count}" for problem, count in sorted(problems.items(), key=str))
            raise TooManyFailuresError(
                f"reward functions failed on {failed} of {len(rows)} rows ({reasons}), "
                f"{sum(count for _, count in self._calls)} of the last {seen}; {self.key} is {self.limit:g}. "
                f"The first: {first}. {self.ways_out}"
            )

    def _forget(self, rows: int) -> None:
        """Let go of batches that the window needs no more once `rows` have come."""
        while self._calls and sum(count for count, _ in self._calls) - self._calls[0][0] + rows >= _WINDOW_ROWS:
            self._calls.popleft()


def scores_of(verdicts: Mapping[str, Sequence[Verdict]], weights: Mapping[str, float], output_bytes: int = 0) -> Scores:
    """Return the rewards of a batch, from each function's verdicts on its rows.

    >>> scores = scores_of({"a": [Verdict(1.0)], "b": [Verdict(3.0)]}, {"a": 1.0, "b": 0.5})
    >>> scores.values.tolist(), scores.parts["b"].tolist()
    ([2.5], [3.0])
    """
    rows = [_sum_of(row, list(weights.values())) for row in zip(*(verdicts[name] for name in weights), strict=True)]
    problems = [row.problem for row in rows]
    return Scores(
        values=torch.tensor([row.value for row in rows], dtype=torch.float32),
        quarantined=torch.tensor([problem is not None for problem in problems], dtype=torch.bool),
        parts={name: _column(found) for name, found in verdicts.items()},
        failures=torch.tensor([_FAILURE.get(str(problem), 0) for problem in problems], dtype=torch.int64),
        rows=rows,
        counts=dict(Counter(problem for problem in problems if problem)),
        output_bytes=output_bytes,
    )


def _sum_of(verdicts: Sequence[Verdict], weights: Sequence[float]) -> Verdict:
    """Return the functions' words on one row as one."""
    broken = [verdict for verdict in verdicts if verdict.problem not in (None, "none")]
    if broken:  # what is counted as a failure of a function comes before a number that is none
        return next((verdict for verdict in broken if str(verdict.problem) in _FAILURE), broken[0])
    said = [weight * one.value for one, weight in zip(verdicts, weights, strict=True) if one.problem is None]
    total = math.fsum(said)
    if not said:
        return Verdict(problem="none")
    return Verdict(total) if abs(total) <= LARGEST else Verdict(problem="infinite")


def _column(verdicts: Sequence[Verdict]) -> Tensor:
    """Return what a function gave, f32 [B], NaN where that is no number."""
    return torch.tensor([v.value if v.problem is None else math.nan for v in verdicts], dtype=torch.float32)

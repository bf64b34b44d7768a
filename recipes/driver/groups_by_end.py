"""The groups of one batch as they end and are scored, for steps that don't wait for all of them.

Invariants (tests/unit/recipes/driver/test_late_groups.py):

1. every group that is added is popped once;
2. counts are available no later than the groups that were scored with them, so popping the last groups of a batch and
   then the counts yields all counts.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from rlpack.background_call import BackgroundCall
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.distributed.results import placeholder_rows
from rlpack.recipes.driver.draws import Batch, scored_rows
from rlpack.recipes.driver.step_context import StepContext

# Scoring metrics that are counts, and therefore add up over parts.
_COUNTED = frozenset(
    f"reward/{name}" for name in ("timeouts", "errors", "killed", "invalid", "output_bytes", "retries")
)
# Threads that wait for scores of one batch. A role scores in about the order of its calls, so few finished scores have
# to wait for a thread.
MOST_THREADS = 16
# Interval at which a wait for another thread can be interrupted.
_LOOK_S = 1.0


class GroupsByEnd:
    """Whole groups of one batch, each available once it is scored."""

    def __init__(self, context: StepContext) -> None:
        """Start without groups.

        Args:
            context: context of the batch; its lease holds the payloads that scoring stores.
        """
        self._context = context
        self._changed = threading.Condition(threading.RLock())
        self._num_scoring = self._num_ended = self._num_threads = 0
        self._parts: deque[Batch] = deque()
        self._all: list[BatchedDataDict] = []
        self._ended: list[BatchedDataDict] = []
        self._counts: dict[str, float] = {}
        self._error: BaseException | None = None

    def add(self, part: Batch) -> None:
        """Add groups whose rewards are pending; one of `MOST_THREADS` threads waits for the rewards."""
        with self._changed:
            self._num_scoring += 1
            self._parts.append(part)
            if self._num_threads == MOST_THREADS:
                return
            self._num_threads += 1
        BackgroundCall(self._score_parts, name="score")

    def add_scored(self, rollouts: BatchedDataDict) -> None:
        """Add groups that are already scored."""
        with self._changed:
            self._all.append(rollouts)
            self._ended.append(rollouts)
            self._num_ended += rollouts["group_ids"].unique().numel()
            self._changed.notify_all()

    def wait(self, count: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until `count` groups in total have ended; return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_ended >= count, timeout=timeout_s)

    def all_scored(self) -> BatchedDataDict:
        """Wait until all added groups are scored and return them, or raise the error of scoring.

        Rewards have a deadline, so this ends. The wait is recorded as `time/reward_s`.
        """
        with self._context.timer("reward"), self._changed:
            while self._num_scoring and self._error is None:
                self._changed.wait(_LOOK_S)
            if self._error is not None:
                raise self._error
            return _in_order(self._all)

    def rows(self) -> BatchedDataDict | None:
        """Return the groups that ended and were not popped, in the order of their rows; None if there are none."""
        with self._changed:
            return _in_order(self._ended) if self._ended else None

    def pop(self) -> BatchedDataDict | None:
        """Return the same groups as `rows`, and forget them."""
        with self._changed:
            rows = self.rows()
            self._ended.clear()
        return rows

    @property
    def counts(self) -> dict[str, float]:
        """Return the failures of scoring roles that were counted and not popped."""
        with self._changed:
            return dict(self._counts)

    def pop_counts(self) -> dict[str, float]:
        """Return the failures of scoring roles that were counted since the last call."""
        with self._changed:
            counts, self._counts = self._counts, {}
        return counts

    def add_counts(self, counts: Mapping[str, float]) -> None:
        """Count failures of scoring roles."""
        with self._changed:
            for name in _COUNTED & counts.keys():
                self._counts[name] = self._counts.get(name, 0.0) + counts[name]

    def _score_parts(self) -> None:
        """Make groups available as they are scored, until none is left or one has failed."""
        while True:
            with self._changed:
                if not self._parts or self._error is not None:
                    self._num_threads -= 1
                    return
                part = self._parts.popleft()
            self._score(part)

    def _score(self, part: Batch) -> None:
        """Make groups available once they are scored."""
        own = StepContext(self._context.number, self._context.progress, lease=self._context.lease)
        score = partial(scored_rows, part.score, own, part.rollouts)
        try:
            scored = self._context.lease.run(score)
        except BaseException as error:  # noqa: BLE001 - `all_scored` raises it
            with self._changed:
                self._error = self._error or error  # later ones may be consequences
                self._changed.notify_all()
            return
        with self._changed:
            self._num_scoring -= 1
            self.add_counts(own.metrics)
            self.add_scored(scored)


def concat_scored(parts: Sequence[BatchedDataDict]) -> BatchedDataDict:
    """Concatenate groups that were scored separately.

    A role may return columns of other types for groups of which it got no row, because batching left all of them out.
    Such columns become zeros, or None in lists, with the types of the other groups.

    Raises:
        DataError: the types of groups with rows differ.
    """
    try:
        return BatchedDataDict.concat(parts)
    except DataError:
        have_rows = [bool(part["valid"].any()) for part in parts]
        if all(have_rows) or not any(have_rows):
            raise
    typed = parts[have_rows.index(True)]
    return BatchedDataDict.concat(
        [part if has_rows else _with_types_of(typed, part) for part, has_rows in zip(parts, have_rows, strict=True)]
    )


def _with_types_of(typed: BatchedDataDict, rows: BatchedDataDict) -> BatchedDataDict:
    """Return rows whose columns of other types than those of `typed` are replaced by stand-ins."""
    same = [name for name in typed if name in rows and _have_same_type(rows, typed, name)]
    return placeholder_rows(rows, typed).drop(same).union(rows.keep(same))


def _have_same_type(left: BatchedDataDict, right: BatchedDataDict, name: str) -> bool:
    try:
        BatchedDataDict.concat([left.keep([name]).select([]), right.keep([name]).select([])])
    except DataError:
        return False
    return True


def _in_order(parts: list[BatchedDataDict]) -> BatchedDataDict:
    """Return the rows of parts of one batch in the order of the batch."""
    rows = concat_scored(parts)
    return rows.select(np.argsort(rows.row_ids))

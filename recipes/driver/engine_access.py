"""Access to the engines: any number of generations at once, or one publication of weights.

    generation      with access.generation() as number:     draws batches; evaluates
    publication     with access.publication():              waits until no generation has a call under way

With `rollout.publish=in_flight`, generations continue after a publication, with the new weights: each calls
`wait_for_turn` between its calls. Otherwise, generations have ended before weights are published, and all of these
calls return at once.

Generations share the record of failed engines (`failed`): a failed engine gets no rows from any generation until it is
replaced, which a publication does before it sends weights.

Deadlines: a generation's calls end within their own deadline, so a publication waits at most that long; a generation
waits for a publication, whose calls have deadlines, too, and at most `_LONGEST_S`.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rlpack.distributed.errors import RoleError
from rlpack.recipes.driver.engine_load import EngineLoad
from rlpack.recipes.driver.engine_slots import EngineSlots

# Rank, start of its process, and how many engines of that rank were replaced.
EngineId = tuple[int, int, int]

# Interval at which waits can be interrupted.
_LOOK_S = 1.0
# Longest wait, in seconds: beyond the deadlines of all calls that a wait depends on.
_LONGEST_S = 86400.0


class EngineAccess:
    """Keeps generations and publications apart.

    Invariants (tests/unit/recipes/driver/test_engine_access.py):

    1. while a publication runs, no generation has a call under way;
    2. a waiting publication takes precedence over the next calls of all generations, so it can't wait for ever;
    3. an engine that failed is in `failed` until it was replaced.

    Attributes:
        epoch: number of publications that have ended; engines that failed were replaced by each.
        load: the rows in flight of all generations.
        slots: which generation may give rows to which engine.
        optimizer_steps: after how many optimizer steps the engines' weights were published; None before the first time.
    """

    def __init__(self, *, are_concurrent: bool) -> None:
        """Start with no generations and no publications.

        Args:
            are_concurrent: whether generations run at the same time; otherwise, one that begins supersedes those that
                were given up.
        """
        self.epoch = 0
        self.optimizer_steps: int | None = None
        self.load = EngineLoad()
        self.slots = EngineSlots(self.load, are_concurrent=are_concurrent)
        self._are_concurrent = are_concurrent
        self._changed = threading.Condition()
        self._numbers: set[int] = set()
        self._next = 0
        self._calling: set[int] = set()
        self._num_publishing = 0
        self._needs_engines = False
        self._failed: frozenset[int] = frozenset()
        self._num_starts, self._num_replaced = 1, 0
        self._replaced_at: Counter[int] = Counter()

    @property
    def failed(self) -> frozenset[int]:
        """Return the ranks whose engines failed and are not replaced yet."""
        return self._failed

    def record_failure(self, rank: int) -> None:
        """Note that the engine of a rank can't be used until it is replaced."""
        with self._changed:
            self._failed |= {rank}

    @property
    def num_starts(self) -> int:
        """Return how many times the ranks had been started when their engines were last known to have weights."""
        with self._changed:
            return self._num_starts

    def record_starts(self, num_starts: int, num_ranks: int) -> None:
        """Record how many times the ranks were started; if that changed, all engines are new and have no weights."""
        with self._changed:
            if num_starts > self._num_starts:
                self._num_starts, self._failed = num_starts, frozenset(range(num_ranks))

    def record_replacement(self, num_starts: int) -> None:
        """Record that the engines of all ranks, which had been started `num_starts` times, have weights again."""
        with self._changed:
            self._num_starts, self._failed = num_starts, frozenset()

    def count_replaced(self, are_new: Sequence[bool]) -> None:
        """Count engines that were replaced after they failed, died or did not pass the canary.

        Args:
            are_new: whether the engine of each rank was replaced.
        """
        with self._changed:
            self._num_replaced += sum(are_new)
            self._replaced_at.update({rank: int(is_new) for rank, is_new in enumerate(are_new)})

    def engine_of(self, rank: int) -> EngineId:
        """Return an id that distinguishes the engine of a rank from the rank's earlier ones."""
        with self._changed:
            return rank, self._num_starts, self._replaced_at[rank]

    def pop_metrics(self) -> dict[str, float]:
        """Return how many engines were replaced since the last call; nothing if none was."""
        with self._changed:
            replaced, self._num_replaced = self._num_replaced, 0
        return {"rollout/engines_replaced": float(replaced)} if replaced else {}

    @property
    def needs_engines(self) -> bool:
        """Return whether a generation waits for a publication because all engines failed."""
        return self._needs_engines

    @property
    def oldest(self) -> int:
        """Return the number of the oldest generation that has not ended."""
        with self._changed:
            return min(self._numbers, default=self._next)

    @contextmanager
    def generation(self) -> Iterator[int]:
        """Yield the number of a new generation, which may call the engines until the block ends."""
        with self._changed:
            number, self._next = self._next, self._next + 1
            if not self._are_concurrent:
                self._numbers.clear()
                self._calling.clear()
            self._numbers.add(number)
        try:
            self.wait_for_turn(number)
            yield number
        finally:
            with self._changed:
                self._numbers.discard(number)
                self._calling.discard(number)
                self._changed.notify_all()

    @property
    def is_wanted(self) -> bool:
        """Return whether a publication waits, or runs; a generation then ends its calls and waits for its turn."""
        return self._num_publishing > 0

    def wait_for_turn(self, number: int) -> None:
        """Let publications run; call this without a call under way."""
        with self._changed:
            self._calling.discard(number)
            self._changed.notify_all()
            self._wait(lambda: not self._num_publishing)
            self._calling.add(number)

    def wait_for_engines(self, number: int) -> None:
        """Wait until a publication has ended, which replaces engines that failed.

        Raises:
            RoleError: no publication ended in time.
        """
        with self._changed:
            epoch, self._needs_engines = self.epoch, True
            self._calling.discard(number)
            self._changed.notify_all()
            self._wait(lambda: self.epoch != epoch and not self._num_publishing)
            self._calling.add(number)

    @contextmanager
    def publication(self, of: int | None = None) -> Iterator[None]:
        """Keep generations from calling the engines during the block.

        Args:
            of: number of the generation that publishes, which has no call under way; None if none does.
        """
        with self._changed:
            self._num_publishing += 1
            try:
                self._wait(lambda: not self._are_concurrent or self._calling <= {of})
            except BaseException:
                self._num_publishing -= 1
                raise
        try:
            yield
        finally:
            with self._changed:
                self._num_publishing -= 1
                self.epoch += 1
                self._needs_engines = False
                self._changed.notify_all()

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait for a condition, with the lock held.

        Raises:
            RoleError: the deadline passed.
        """
        end = time.monotonic() + _LONGEST_S
        while not is_over():
            if time.monotonic() > end:
                raise RoleError("rollout", None, "advance", f"no turn within {_LONGEST_S:g} s")
            self._changed.wait(_LOOK_S)

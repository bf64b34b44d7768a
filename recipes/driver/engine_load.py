"""EngineLoad: how many rows streaming engines have in flight, for how long they had none, and how many wait."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlpack.spans import record_values

# The name of the values about rows that wait, in the driver's file of spans.
QUEUE = "router"
# Shorter times are left out: groups that are sent together leave the queue one by one.
_LEAST_US = 1000


class EngineLoad:
    """The rows in flight of each rank, over all generations.

    >>> clock = iter([0.0, 0.0, 0.0, 6.0, 8.0])
    >>> load = EngineLoad(lambda: next(clock))
    >>> load.add(rank=0, rows=4), load.add(rank=1, rows=0), load.add(rank=0, rows=-4)
    (None, None, None)
    >>> load.pop_idle_share()  # rank 0 had nothing to do for 2 of 8 seconds, rank 1 for all 8
    0.625
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without ranks.

        Args:
            clock: returns the time in seconds.
        """
        self._clock, self._lock = clock, threading.Lock()
        self._rows: Counter[int] = Counter()
        self._idle_s: defaultdict[int, float] = defaultdict(float)
        self._since = self._last = clock()
        self._waiting = self._waiting_since_us = 0

    def add(self, rank: int, rows: int) -> None:
        """Count rows that a rank got, or, if negative, that it no longer has."""
        with self._lock:
            self._settle()
            self._rows[rank] += rows

    @contextmanager
    def busy(self, ranks: int) -> Iterator[None]:
        """Count the ranks as busy inside the block: for engines that generate whole batches, which end together."""
        for rank in range(ranks):
            self.add(rank, 1)
        try:
            yield
        finally:
            for rank in range(ranks):
                self.add(rank, -1)

    @property
    def in_flight(self) -> dict[int, int]:
        """Return the rows in flight, by rank."""
        with self._lock:
            return dict(self._rows)

    def pop_idle_share(self) -> float | None:
        """Return the share of the time since the last call in which a rank had no row, averaged over ranks.

        It is None without ranks.
        """
        with self._lock:
            self._settle()
            elapsed, self._since = self._last - self._since, self._last
            idle = sum(self._idle_s.values())
            self._idle_s.clear()
            return idle / elapsed / len(self._rows) if elapsed > 0 and self._rows else None

    def queue(self, rows: int) -> None:
        """Count rows that wait for an engine, or, if negative, that no longer do; the trace gets their number."""
        with self._lock:
            now = int(time.time() * 1e6)
            if self._waiting and now - self._waiting_since_us >= _LEAST_US:
                record_values(QUEUE, self._waiting_since_us, now, {"waiting": self._waiting})
            self._waiting += rows
            self._waiting_since_us = now

    def _settle(self) -> None:
        """Add the time since the last change to the idle time of ranks without rows."""
        now = self._clock()
        for rank, rows in self._rows.items():
            if rows == 0:
                self._idle_s[rank] += now - self._last
        self._last = now

"""When engines finish their responses: a simulation for `rlpack.packing.analysis.running_ahead`.

Responses wait in one queue, first in, first out, for a slot of the engine that generates the fewest responses. All
responses of an engine advance together, one token in `token_s + token_s_per_response · (n - 1)` seconds if it generates
n of them. A response therefore gets faster when others of its engine end.
"""

import heapq
from collections import deque

import numpy as np


class ResponseBatch:
    """The responses of one batch.

    Attributes:
        starts: seconds at which each response gets its slot, f64 [N]; nan until then.
        end: seconds at which the last response that has ended so far ended.
        left: responses that have not ended.
    """

    def __init__(self, lengths: np.ndarray) -> None:
        """Start with all responses queued.

        Args:
            lengths: tokens of each response, [N].
        """
        self.lengths = lengths
        self.starts = np.full(lengths.size, np.nan)
        self.end, self.left = 0.0, int(lengths.size)


class _Engine:
    """One engine.

    Attributes:
        rows: a heap of the responses in its slots: the value of `tokens` at which each ends, its number in the order
            of starts, and its batch.
        tokens: tokens that each slot has generated since the start.
        at_s: time up to which `tokens` counts.
        version: grows with each change of the schedule.
    """

    __slots__ = ("at_s", "rows", "tokens", "version")

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, ResponseBatch]] = []
        self.tokens, self.at_s, self.version = 0.0, 0.0, 0


class Engines:
    """Several engines and their queue.

    >>> engines = Engines(1, 2, token_s=1.0, token_s_per_response=1.0)
    >>> batch = engines.add(0.0, np.array([3, 5]))  # together 2 s a token, and 1 s once the second is alone
    >>> engines.finish(batch)
    8.0
    """

    def __init__(self, count: int, slots: int, token_s: float, token_s_per_response: float = 0.0) -> None:
        """Start with empty slots at time zero.

        Args:
            count: number of engines.
            slots: responses that each generates at a time.
            token_s: seconds per token of a response that is alone in its engine.
            token_s_per_response: seconds that each other response in the engine adds to it.
        """
        self._engines = [_Engine() for _ in range(count)]
        self._slots, self._token_s, self._added_s = slots, token_s, token_s_per_response
        self._queue: deque[tuple[int, ResponseBatch]] = deque()
        self._events: list[tuple[float, int, int]] = []  # when an engine's next response ends, engine, version
        self._busy_s, self._started = 0.0, 0

    def add(self, now: float, lengths: np.ndarray) -> ResponseBatch:
        """Queue a batch at a time that is not before any earlier one."""
        self.run_until(now)
        batch = ResponseBatch(lengths)
        self._queue.extend((row, batch) for row in range(lengths.size))
        free = [(len(engine.rows), number) for number, engine in enumerate(self._engines)]
        heapq.heapify(free)
        changed = set()
        while self._queue and free[0][0] < self._slots:
            running, number = free[0]
            self._start(number, now)
            changed.add(number)
            heapq.heapreplace(free, (running + 1, number))
        for number in changed:
            self._schedule(number)
        return batch

    def finish(self, batch: ResponseBatch) -> float:
        """Run until a batch is complete, and return the time at which it is."""
        while batch.left:
            self._next_event()
        return batch.end

    def run_until(self, now: float) -> None:
        """End all responses that are complete by a time."""
        while self._events and self._events[0][0] <= now:
            self._next_event()

    def pause(self, now: float, pause_s: float) -> None:
        """Generate nothing for a while from `now` on."""
        self.run_until(now)
        for number, engine in enumerate(self._engines):
            self._advance(engine, now)
            engine.at_s = max(engine.at_s, now) + pause_s
            self._schedule(number)

    def busy_until(self, now: float) -> float:
        """Return the seconds that slots have generated up to a time, summed over all slots."""
        self.run_until(now)
        for engine in self._engines:
            self._advance(engine, now)
        return self._busy_s

    def _next_event(self) -> None:
        """End the response that ends first, and start the next one of the queue in its slot."""
        at_s, number, version = heapq.heappop(self._events)
        engine = self._engines[number]
        if version != engine.version:
            return
        self._busy_s += (at_s - engine.at_s) * len(engine.rows)
        engine.tokens, _, batch = heapq.heappop(engine.rows)
        engine.at_s = batch.end = at_s
        batch.left -= 1
        if self._queue:
            self._start(number, at_s)
        self._schedule(number)

    def _start(self, number: int, now: float) -> None:
        """Give the first response of the queue a slot."""
        engine = self._engines[number]
        self._advance(engine, now)
        row, batch = self._queue.popleft()
        batch.starts[row] = max(now, engine.at_s)
        self._started += 1  # of rows that end at the same token, the first goes first
        heapq.heappush(engine.rows, (engine.tokens + float(batch.lengths[row]), self._started, batch))

    def _advance(self, engine: _Engine, now: float) -> None:
        """Count an engine's tokens up to a time."""
        elapsed_s = now - engine.at_s
        if elapsed_s > 0:
            if engine.rows:
                engine.tokens += elapsed_s / self._seconds_per_token(engine)
                self._busy_s += elapsed_s * len(engine.rows)
            engine.at_s = now

    def _schedule(self, number: int) -> None:
        """Push the next end of an engine's response, and invalidate its earlier event."""
        engine = self._engines[number]
        engine.version += 1
        if engine.rows:
            left = max(0.0, engine.rows[0][0] - engine.tokens)
            heapq.heappush(self._events, (engine.at_s + left * self._seconds_per_token(engine), number, engine.version))

    def _seconds_per_token(self, engine: _Engine) -> float:
        return self._token_s + self._added_s * (len(engine.rows) - 1)

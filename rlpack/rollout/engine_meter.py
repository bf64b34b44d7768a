"""EngineMeter: what an engine does over time, for `rlpack trace` and the report.

request ──► begin()          the meter measures from here
iteration ──► add(...)       every `window_s` seconds, and when nothing is left to do, a window is recorded
interruption ──► end()       the window so far is recorded
idle                         nothing is recorded until the next request
"""

import threading
import time
from collections.abc import Callable, Mapping

from rlpack.spans import record_values

# The name of an engine's values in the files of spans.
NAME = "engine"
Record = Callable[[str, int, int, Mapping[str, float]], None]


class EngineMeter:
    """The requests, tokens and cache use of one engine.

    >>> clock, windows = iter([5.0, 5.1, 5.3]), []
    >>> meter = EngineMeter(lambda *window: windows.append(window), lambda: next(clock))
    >>> meter.begin(), meter.add(3, 1, 0.25, 30), meter.add(1, 0, 0.5, 20)
    (None, None, None)
    >>> windows
    [('engine', 5000000, 5300000, {'running': 2.0, 'waiting': 0.5, 'cache': 0.5, 'tokens': 50})]
    """

    def __init__(
        self, record: Record = record_values, clock: Callable[[], float] = time.time, window_s: float = 0.2
    ) -> None:
        """Start idle.

        Args:
            record: takes name, begin and end in microseconds since the epoch, and the values of a window.
            clock: returns the seconds since the epoch.
            window_s: shortest window, in seconds; fewer windows take less time and space.
        """
        self._record, self._clock, self._window_s = record, clock, window_s
        self._lock = threading.Lock()
        self._clear(None)

    def begin(self) -> None:
        """Start to measure, if the engine was idle: a request was sent."""
        with self._lock:
            if self._began is None:
                self._began = self._last = self._clock()

    def add(self, running: int, waiting: int, cache: float, tokens: int) -> None:
        """Count an iteration of the engine.

        Args:
            running: requests that run after it.
            waiting: requests that wait for room.
            cache: share of the KV cache in use.
            tokens: sampled tokens.
        """
        with self._lock:
            is_idle = running + waiting == 0
            if self._began is None:
                if is_idle:
                    return
                self._began = self._clock()
            self._last = self._clock()
            self._iterations += 1
            self._running += running
            self._waiting += waiting
            self._cache = max(self._cache, cache)
            self._tokens += tokens
            if is_idle or self._last - self._began >= self._window_s:
                self._flush(None if is_idle else self._last)

    def end(self) -> None:
        """Record the iterations so far: all requests are stopped."""
        with self._lock:
            if self._began is not None:
                self._flush(None)

    def _flush(self, began: float | None) -> None:
        """Record a window up to the last iteration, and start the next one; with None the engine is idle."""
        if self._iterations and self._began is not None:
            values = {
                "running": round(self._running / self._iterations, 2),
                "waiting": round(self._waiting / self._iterations, 2),
                "cache": round(self._cache, 4),
                "tokens": self._tokens,
            }
            self._record(NAME, int(self._began * 1e6), int(self._last * 1e6), values)
        self._clear(began)

    def _clear(self, began: float | None) -> None:
        self._began, self._last = began, began or 0.0
        self._iterations = self._running = self._waiting = self._tokens = 0
        self._cache = 0.0

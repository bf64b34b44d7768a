"""Restarts of pools, which are limited and counted.

A pool without trained roles is a separate failure domain: if a rank of it dies, or doesn't answer by its deadline,
all ranks of the pool are started again, and the calls that failed are repeated. Roles without state return the same
rows again, since the seeds of random numbers belong to rows. Invariants (tests/unit/distributed/test_restarts.py):

1. a pool is started again at most `MOST_RESTARTS` times in any `WINDOW` consecutive steps; then its error ends the run;
2. every restart is counted in the metrics of one step, by the role that failed.
"""

from collections import Counter, deque
from threading import Lock

from rlpack.distributed.errors import RoleError

MOST_RESTARTS = 3
WINDOW = 100


class Restarts:
    """The restarts of a run.

    >>> restarts = Restarts()
    >>> restarts.record(RoleError("reward", 0, "score", "the process died"), "scorers")
    1
    >>> restarts.pop_metrics()
    {'faults/restarts/reward': 1.0}
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._step = 0
        self._place: tuple[str, int] | None = None
        self._steps_of: dict[str, deque[int]] = {}  # by pool
        self._new: Counter[str] = Counter()
        self._seconds = 0.0

    def begin_step(self, phase: str, number: int) -> None:
        """Count a step; its evaluation, and a repetition of it, belong to it."""
        with self._lock:
            if self._place != (phase, number):
                self._place, self._step = (phase, number), self._step + 1

    def record(self, error: RoleError, pool: str) -> int:
        """Count a restart, and return how many the pool has had in the last `WINDOW` steps, this one included.

        Raises:
            RoleError: `error` itself: the pool was started again too often.
        """
        with self._lock:
            recent = self._steps_of.setdefault(pool, deque(maxlen=MOST_RESTARTS))
            if len(recent) == MOST_RESTARTS and recent[0] > self._step - WINDOW:
                error.hint = (
                    f"pool {pool} was started again {MOST_RESTARTS} times within {WINDOW} steps before; remove "
                    "the cause, which run.log and Ray's logs may name, and resume with resume=auto"
                )
                raise error
            recent.append(self._step)
            self._new[error.role] += 1
            return sum(step > self._step - WINDOW for step in recent)

    def add_seconds(self, seconds: float) -> None:
        """Add what a restart took."""
        with self._lock:
            self._seconds += seconds

    def pop_metrics(self) -> dict[str, float]:
        """Return the restarts since the last call by role, and their time; nothing if there were none."""
        with self._lock:
            metrics = {f"faults/restarts/{role}": float(count) for role, count in self._new.items()}
            if self._seconds:
                metrics["time/restart_s"] = self._seconds
            self._new.clear()
            self._seconds = 0.0
        return metrics

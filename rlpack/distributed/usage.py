"""Resources that calls use on their ranks: time, and peak memory of the rank's process.

Measured on the ranks, because a driver that waits for a call also waits for earlier calls of the same processes.
"""

import logging
import math
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Usage:
    """Resources used by one call, or by several.

    Attributes:
        seconds: time of the slowest rank; for several calls, the sum.
        resident: peak resident memory of a rank's process since its start, in bytes; the maximum over ranks.
        allocated: peak GPU memory of tensors (`torch.cuda.max_memory_allocated`), in bytes; 0 without a GPU.
        reserved: peak GPU memory of PyTorch's allocator (`torch.cuda.max_memory_reserved`), in bytes.
    """

    seconds: float = 0.0
    resident: int = 0
    allocated: int = 0
    reserved: int = 0

    @classmethod
    def since(cls, began: float) -> "Usage":
        """Return the usage of this process for a call that began at the `time.perf_counter()` time `began`."""
        seconds = time.perf_counter() - began
        # Kilobytes on Linux, bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if not torch.cuda.is_initialized():
            return cls(seconds, resident)
        return cls(seconds, resident, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def then(self, other: "Usage") -> "Usage":
        """Return the usage of this and a later call."""
        return merged([self, other], seconds=self.seconds + other.seconds)


class Measured(NamedTuple):
    """The result of a call on a rank, and the resources that it used there."""

    result: Any
    usage: Usage


def merged(usages: Iterable[Usage], seconds: float | None = None) -> Usage:
    """Return the maximum of each number over ranks; `seconds`, if given, overrides the time.

    >>> merged([Usage(1.0, 5), Usage(2.0, 3)])
    Usage(seconds=2.0, resident=5, allocated=0, reserved=0)
    """
    parts = list(usages)
    return Usage(
        max((part.seconds for part in parts), default=0.0) if seconds is None else seconds,
        max((part.resident for part in parts), default=0),
        max((part.allocated for part in parts), default=0),
        max((part.reserved for part in parts), default=0),
    )


class UsageLog:
    """Resources used by a pool's calls since the last request, by role and method; threads may share it."""

    def __init__(self) -> None:
        self._usages: dict[tuple[str, str], Usage] = {}
        self._slow: set[tuple[str, str]] = set()  # calls that a warning has named
        self._lock = Lock()

    def unwrap(self, role: str, method: str, results: Mapping[int, Any], limit_s: float = math.inf) -> dict[int, Any]:
        """Return the results of a call's ranks without their usage, and add it up; ranks may have none.

        The first call of a method that takes over half of `limit_s`, `placement.call_timeout_s` or infinity, causes a
        warning.
        """
        measured = {rank: result for rank, result in results.items() if isinstance(result, Measured)}
        if measured:
            usage = merged(one.usage for one in measured.values())
            with self._lock:
                self._usages[role, method] = self._usages.get((role, method), Usage()).then(usage)
                is_news = usage.seconds > limit_s / 2 and (role, method) not in self._slow
                if is_news:
                    self._slow.add((role, method))
            if is_news:
                logger.warning(
                    "role %s: a call of %s took %.0f s, over half of its deadline, placement.call_timeout_s=%g; a call "
                    "that misses it counts as hung, and its step is lost; raise placement.call_timeout_s if calls may "
                    "take longer",
                    *(role, method, usage.seconds, limit_s),
                )
        return {**results, **{rank: one.result for rank, one in measured.items()}}

    def pop(self, role: str) -> dict[str, Usage]:
        """Return the usage of a role's calls by method, and forget it."""
        with self._lock:
            methods = [method for owner, method in self._usages if owner == role]
            return {method: self._usages.pop((role, method)) for method in methods}

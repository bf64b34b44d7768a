"""Which candidates of `rlpack plan --suggest` fit: their memory is estimated, fastest first, until a few do."""

import time
from collections.abc import Iterator
from typing import Any

from rlpack.models.errors import ModelError
from rlpack.packing import PackingError
from rlpack.recipes.dry_run.estimate_run import Estimator
from rlpack.recipes.dry_run.layout_candidates import Candidate
from rlpack.recipes.dry_run.run_memory import RunMemory

# Maximum number of suggestions, and maximum number of memory estimates to find them.
_MOST, _TRIES = 3, 80
# CPU time limits of the search: once a variant fits, and while none does.
_SECONDS, _MOST_SECONDS = 45.0, 360.0


class LayoutSearch:
    """Finds the first candidates that fit, one of each layout, and estimates as few others as possible.

    Of a family of candidates, the one with the least memory of a device comes first: if a device has less, none of them
    fits. Then come those with smaller microbatches than the candidate's, in ascending order: they take less time to
    estimate, and if one is too large, so is the candidate. If only host memory is too small for what it offloads,
    others may fit. A candidate that can't run rules out no others.
    """

    def __init__(self, ordered: list[Candidate], estimator: Estimator, began: float) -> None:
        self._ordered, self._estimator, self._began = ordered, estimator, began
        by_thrift = sorted(ordered, key=lambda each: each.thrift[2:])
        self._least = {each.family: each for each in by_thrift}
        # Of candidates that differ only in replicas, the one with the least memory, by its slots.
        self._by_slots: dict[tuple[Any, ...], dict[float, Candidate]] = {}
        for each in by_thrift:
            self._by_slots.setdefault(each.comparable, {})[each.slots] = each
        self._too_large: list[tuple[Candidate, bool]] = []  # and whether it is too large for the host
        self._tried: dict[int, RunMemory | None] = {}
        self._found: dict[tuple[int, ...], tuple[Candidate, RunMemory]] = {}

    def run(self) -> tuple[list[tuple[Candidate, RunMemory]], bool]:
        """Return the candidates, and whether the search ended before all were tried."""
        for candidate in self._ordered:
            for each in self._before(candidate):
                if candidate.layout in self._found or self._is_too_large(candidate):
                    break
                if self._is_over(candidate) and id(each) not in self._tried:
                    return list(self._found.values()), True
                memory = self._memory_of(each)
                if each is candidate and memory is not None and memory.excess <= 0:
                    self._found[candidate.layout] = candidate, memory
                    if len(self._found) == _MOST:
                        return list(self._found.values()), False
        return list(self._found.values()), False

    def _is_over(self, candidate: Candidate) -> bool:
        """Return whether nothing more may be estimated for a candidate; for the fastest, time doesn't count."""
        is_late = time.process_time() > self._began + (_SECONDS if self._found else _MOST_SECONDS)
        return len(self._tried) == _TRIES or (is_late and candidate is not self._ordered[0])

    def _before(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield what is estimated for a candidate, which comes last."""
        yield self._least[candidate.family]
        by_slots = self._by_slots[candidate.comparable]
        yield from (by_slots[slots] for slots in sorted(by_slots) if slots <= candidate.slots)
        yield candidate

    def _is_too_large(self, candidate: Candidate) -> bool:
        """Return whether a candidate certainly doesn't fit."""
        return any(candidate.takes_more(one, of_host=of_host) for one, of_host in self._too_large)

    def _memory_of(self, candidate: Candidate) -> RunMemory | None:
        """Return the memory of a candidate, estimated once."""
        if id(candidate) not in self._tried:
            memory = self._tried[id(candidate)] = _memory(candidate, self._estimator)
            self._too_large += [(candidate, of_host) for of_host in _exceeded(memory)]
        return self._tried[id(candidate)]


def _memory(candidate: Candidate, estimator: Estimator) -> RunMemory | None:
    """Return the memory of a candidate; None if another role can't run with what it inherits."""
    try:
        return estimator.memory(candidate.config)
    except (ModelError, PackingError):
        return None


def _exceeded(memory: RunMemory | None) -> Iterator[bool]:
    """Yield False if a device has too little memory, and True if the host has; nothing for a candidate that can't run.

    The memory of ranks on CPUs is that of the host.
    """
    if memory is None:
        return
    if any(pool.on_gpu and pool.limit is not None and pool.peak > pool.limit for pool in memory.pools):
        yield False
    if memory.host_limit is not None and memory.host > memory.host_limit:
        yield True

"""The calls of one pool whose results have not been requested yet; several threads may submit and wait.

Invariants (tests/unit/distributed/test_submitted.py):

1. a call can be held up only by calls that were submitted before it, because a rank runs its calls in this order. Calls
   to single ranks take part in no collective, so they hold up only calls on the same ranks;
2. discarding leaves nothing behind: no call is named in a later error, or delays a later deadline.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import Any
from weakref import WeakValueDictionary

import ray

from rlpack.distributed.calls import Call
from rlpack.distributed.failures import RankCall


@dataclass
class SubmittedCall:
    """A call whose result has not been requested yet.

    Attributes:
        call: the call.
        call_id: id by which ranks know the call.
        calls: its parts on each rank.
        unfinished: the parts that have no known answer yet, by reference.
        num_starts: how many times the ranks had been started when the call was last started.
        actors: actors of all ranks when the call was last started.
        thread: identifier of the thread that submitted it.
        began: `time.monotonic()` when the call was last started.
    """

    call: Call
    call_id: int
    calls: list[RankCall] = field(default_factory=list)
    unfinished: dict[ray.ObjectRef, RankCall] = field(default_factory=dict)
    num_starts: int = 1
    actors: Sequence[Any] = ()
    thread: int = field(default_factory=get_ident)
    began: float = field(default_factory=time.monotonic)

    @property
    def order(self) -> int:
        """Return the place in the order of submission of all calls; -1 before the call is started."""
        return self.calls[0].order if self.calls else -1


@dataclass
class SubmittedCalls:
    """The calls of one pool whose results have not been requested yet, by id, in the order of submission."""

    _calls: dict[int, SubmittedCall] = field(default_factory=dict)
    _awaited: dict[int, SubmittedCall] = field(default_factory=dict)  # someone waits for their results
    # By `SubmittedCall.order`, which a call that is started again changes.
    _by_order: WeakValueDictionary[int, SubmittedCall] = field(default_factory=WeakValueDictionary)
    _lock: Lock = field(default_factory=Lock)

    def add(self, submitted: SubmittedCall) -> None:
        """Add a call that was started."""
        with self._lock:
            self._calls[submitted.call_id] = submitted

    def record_start(self, submitted: SubmittedCall, calls: list[RankCall]) -> None:
        """Record the parts of a call that was started, or started again."""
        with self._lock:
            submitted.calls, submitted.unfinished = calls, {one.ref: one for one in calls}
            submitted.began = time.monotonic()
            self._by_order[submitted.order] = submitted

    def forget_parts(self) -> None:
        """Forget the parts of all calls, whose ranks have ended: they hold up no call.

        Calls that depend on earlier ones (`Call.of_start`) can't be repeated, and are forgotten as a whole.
        """
        with self._lock:
            self._calls = {call_id: one for call_id, one in self._calls.items() if one.call.of_start is None}
            for submitted in (*self._calls.values(), *self._awaited.values()):
                submitted.unfinished = {}

    def all(self) -> list[SubmittedCall]:
        """Return the calls, in the order of submission."""
        with self._lock:
            return list(self._calls.values())

    @contextmanager
    def awaiting(self, submitted: SubmittedCall) -> Iterator[None]:
        """Count a call as one whose result was requested, and forget it after the block, which waits for it."""
        with self._lock:
            self._calls.pop(submitted.call_id, None)
            self._awaited[submitted.call_id] = submitted
        try:
            yield
        finally:
            with self._lock:
                del self._awaited[submitted.call_id]

    def keeps_busy(self, rank: int) -> bool:
        """Return whether a rank runs, or is about to run, a foreground call of another thread."""
        with self._lock:
            return any(
                one.thread != get_ident() and not one.call.background and rank in one.call.called
                for one in (*self._calls.values(), *self._awaited.values())
            )

    def has_others(self, submitted: SubmittedCall) -> bool:
        """Return whether the pool has other calls, whose results may have been requested."""
        with self._lock:
            return any(one != submitted.call_id for one in (*self._calls, *self._awaited))

    def num_awaited_in_background(self) -> int:
        """Return how many calls that run in threads are waited for."""
        with self._lock:
            return sum(one.call.background for one in self._awaited.values())

    def record_answer(self, call: RankCall) -> None:
        """Record that a rank has answered: it no longer holds up later calls."""
        with self._lock:
            submitted = self._by_order.get(call.order)
            if submitted is not None:
                submitted.unfinished.pop(call.ref, None)

    def before(self, calls: list[RankCall]) -> dict[ray.ObjectRef, RankCall]:
        """Return the unfinished parts of the calls that were submitted before the last of `calls`, in their order.

        Some thread may wait for their results.
        """
        last = max((call.order for call in calls), default=-1)
        ranks = {call.rank for call in calls}
        with self._lock:
            return {
                one.ref: one
                for submitted in sorted((*self._calls.values(), *self._awaited.values()), key=lambda one: one.order)
                if submitted.order < last
                for one in submitted.unfinished.values()
                if submitted.call.ranks is None or one.rank in ranks
            }

    def names_in_background(self) -> list[str]:
        """Return the names of the calls that run in threads."""
        with self._lock:
            return [submitted.call.name for submitted in self._calls.values() if submitted.call.background]

    def pop_own(self) -> dict[int, SubmittedCall]:
        """Forget all calls of this thread, and return them by their ids."""
        with self._lock:
            own = {call_id: one for call_id, one in self._calls.items() if one.thread == get_ident()}
            for call_id in own:
                del self._calls[call_id]
        return own

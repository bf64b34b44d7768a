"""The processes of one pool, as Ray actors: calls with a deadline, whose rows go to the object store.

A call is repeated if its ranks were started again (`rlpack.distributed.restartable_pool`).
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import ray

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import OffloadedBatch
from rlpack.distributed.answers import answered
from rlpack.distributed.calls import Call, Pending, Relay
from rlpack.distributed.errors import RanksRestartedError, RoleError, StoreFullError
from rlpack.distributed.failures import RankCall, rank_calls
from rlpack.distributed.object_handles import RowSource
from rlpack.distributed.pool_processes import CLOSE_S
from rlpack.distributed.restartable_pool import LostRanksError, RestartablePool
from rlpack.distributed.shared_arguments import SharedArguments, argument_on_node
from rlpack.distributed.submitted import SubmittedCall
from rlpack.distributed.usage import Usage, UsageLog

logger = logging.getLogger(__name__)

# Weights in transit between pools: one bucket is loaded while the next is gathered.
_RELAYS_IN_FLIGHT = 2
# A rank waits this long for the result of a background call before it answers other calls. While the pool has other
# calls, ranks don't wait, and are asked again after a pause for each background call that is waited for.
_RESULT_S, _PAUSE_S, _LONGEST_PAUSE_S = 0.1, 0.02, 0.5
# Ranks find the rows of a call by its id.
_CALL_IDS = count()


class RayRanks(RestartablePool):
    """The processes of one pool."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Start the processes; arguments are those of `RestartablePool`."""
        super().__init__(*arguments, **named)
        self._usage = UsageLog()
        self._num_loading = 0  # relays and loads under way
        self._row_sources = [
            RowSource(partial(self._actor, rank), partial(self._copy_rows, rank)) for rank in range(self.num_ranks)
        ]

    def submit(self, call: Call) -> Pending[list[Any]]:
        """Start a call on the ranks that it names.

        Results come in the order of the output ranks; token-sized columns of rows stay in the object store. If a
        foreground call fails before its result is requested, the next wait for a later call raises its error.

        Raises:
            StoreFullError: raised by `Pending.result` if the rows of a call don't fit.
            RanksRestartedError: the call depends on earlier ones, before the ranks were started again.
        """
        with self._submitting:
            if call.of_start not in (None, self.num_starts):
                raise RanksRestartedError(RoleError(call.role, None, call.method, "the ranks were started again"))
            submitted = SubmittedCall(call, next(_CALL_IDS))
            self._start(submitted)
            self._submitted.add(submitted)
        return Pending(partial(self._result, submitted), [one.ref for one in submitted.calls])

    def _start(self, submitted: SubmittedCall) -> None:
        """Start a call, or start it again."""
        with self._submitting:
            submitted.num_starts, submitted.actors = self.num_starts, list(self._pool.actors)
            calls = self._submit_to_ranks(submitted.call, submitted.call_id, is_measured=True)
            self._submitted.record_start(submitted, calls)

    def wait_any(self, pending: Sequence[Pending[Any]], timeout_s: float) -> list[int]:
        """Return which calls have answered, by their positions; [] if none has within `timeout_s` seconds.

        Raises:
            ClusterError: a daemon of Ray ended.
        """
        place_of = {ref: place for place, one in enumerate(pending) for ref in one.answers}
        return sorted({place_of[ref] for ref in answered(list(place_of), time.monotonic() + timeout_s)})

    def _result(self, submitted: SubmittedCall) -> list[Any]:
        """Wait for a submitted call and return the results of its output ranks; repeat it after a restart.

        Raises:
            RanksRestartedError: the ranks were started again, and the call can't be repeated.
        """
        with self._submitted.awaiting(submitted):
            while True:
                with self._submitting:  # another thread that restarts the ranks may be starting the call again
                    started = copy(submitted)
                try:
                    return self._collect(started)
                except LostRanksError as lost:
                    self._start_again(lost, started.num_starts)
                    if submitted.call.of_start is not None:
                        raise RanksRestartedError(lost.error) from lost.error
                    self._start_unless(submitted, started.num_starts)

    def _start_unless(self, submitted: SubmittedCall, num_starts: int) -> None:
        """Start a call again, unless the thread that restarted the ranks has done so since `num_starts`."""
        with self._submitting:
            if submitted.num_starts == num_starts:
                self._start(submitted)

    def _collect(self, submitted: SubmittedCall) -> list[Any]:
        """Wait for a call and return the results of its output ranks."""
        call, calls = submitted.call, submitted.calls
        if call.answer_s is not None:
            answers = self._wait(calls, min(call.answer_s, self._call_s), began=submitted.began)
        elif call.background:
            self._wait(calls, self._call_s)
            answers = self._background_results(submitted)
        else:
            answers = self._wait(calls, self._call_s + (self._start_s if call.starts else 0.0))
        results = dict(zip(call.called, answers, strict=True))
        limit_s = self._call_s if call.answer_s is None and not call.starts else math.inf
        results = self._usage.unwrap(call.role, call.method, results, limit_s)
        if not call.returns_rows:
            return [results[rank] for rank in call.outputs]
        for rank in set(call.called) - set(call.outputs):
            submitted.actors[rank].discard.remote(submitted.call_id)
        return self._store_rows(submitted, {rank: results[rank] for rank in call.outputs})

    def _background_results(self, submitted: SubmittedCall) -> list[OffloadedBatch]:
        """Wait for a call that runs in the ranks' threads, and return their rows.

        Ranks are asked again and again rather than once, so that they answer other calls in between, such as those of
        the engines that share their processes. A rank's calls of a role may run one after another, so the deadline
        counts from the last of them that ended, whether its result was requested or not.
        """
        call, began = submitted.call, time.monotonic()
        results: dict[int, OffloadedBatch] = {}
        while waiting := [one.rank for one in submitted.calls if one.rank not in results]:
            # Every other call of a rank would wait for the ranks' waits, of which there may be one per background call.
            wait_s = 0.0 if self._num_loading or self._submitted.has_others(submitted) else _RESULT_S
            refs = [submitted.actors[rank].result.remote(submitted.call_id, wait_s) for rank in waiting]
            asked = rank_calls(refs, call.role, call.method, ranks=waiting)
            found = dict(zip(waiting, self._wait(asked, self._call_s), strict=True))
            now, ended = time.monotonic(), {rank: rows for rank, rows in found.items() if not isinstance(rows, float)}
            results |= ended
            quiet_s = {rank: min(now - began, since) for rank, since in found.items() if isinstance(since, float)}
            late = [one for one in asked if quiet_s.get(one.rank, 0.0) > self._call_s]
            if late:
                raise self._missed(late, self._call_s, {self})
            if not ended and not wait_s:
                time.sleep(min(_PAUSE_S * self._submitted.num_awaited_in_background(), _LONGEST_PAUSE_S))
        return [results[one.rank] for one in submitted.calls]

    def pop_usage(self, role: str) -> dict[str, Usage]:
        """Return what the foreground calls of a role took since the last request, by method."""
        return self._usage.pop(role)

    def apply(self, function: Callable[..., Any], *args: Any) -> Pending[list[Any]]:
        """Start a function on every rank, after the calls that are submitted; the result has one entry per rank."""

        def start() -> tuple[int, list[RankCall]]:
            with self._submitting:
                refs = [actor.apply.remote(function, *args) for actor in self._pool.actors]
                return self.num_starts, rank_calls(refs, f"pool {self._pool.name}", function.__name__)

        def wait() -> list[Any]:
            num_starts, calls = started
            while True:
                try:
                    return self._wait(calls, self._call_s)
                except LostRanksError as lost:
                    self._start_again(lost, num_starts)
                    num_starts, calls = start()

        started = start()
        return Pending(wait)

    def _store_rows(self, submitted: SubmittedCall, rows: dict[int, OffloadedBatch]) -> list[BatchedDataDict]:
        """Store the columns of a call's rows once there is room; return the rows in the order of the ranks.

        They are results of calls, so the driver owns them, and they outlive the ranks.
        """
        call, actors, nodes = submitted.call, submitted.actors, self._pool.nodes
        sizes: Counter[str] = Counter()
        for rank, offloaded in rows.items():
            sizes[nodes[rank]] += sum(offloaded.sizes)
        having = [rank for rank, offloaded in rows.items() if offloaded.sizes]
        try:
            reserved = self._store.reserve(sizes, call.role, call.method)
        except StoreFullError:
            for rank in having:
                actors[rank].discard.remote(submitted.call_id)
            raise
        with reserved as room:
            stored = {
                rank: actors[rank]
                .store_columns.options(num_returns=1 + len(rows[rank].sizes))
                .remote(submitted.call_id)
                for rank in having
            }
            done = [stored[rank].pop(0) for rank in having]  # the others are not fetched to the driver
            timeout_s, began = self._call_s, None
            if call.answer_s is not None:
                timeout_s, began = min(call.answer_s, self._call_s), time.monotonic()
            self._wait(rank_calls(done, call.role, call.method, ranks=having), timeout_s, began=began)
            return [
                offloaded.with_handles(
                    [
                        room.keep(ref, size, nodes[rank], self._row_sources[rank], (call.role, rank))
                        for ref, size in zip(stored.get(rank, []), offloaded.sizes, strict=True)
                    ]
                )
                for rank, offloaded in rows.items()
            ]

    def _actor(self, rank: int) -> Any:
        """Return the actor of a rank, which is another one after a restart."""
        return self._pool.actors[rank]

    def _copy_rows(
        self, rank: int, refs: Sequence[ray.ObjectRef], rows: Sequence[dict[str, np.ndarray]]
    ) -> ray.ObjectRef | None:
        """Start to copy rows of objects of a rank; None if another thread's call keeps the rank busy.

        The caller may hold the lock of another pool, so it doesn't wait for a thread that is submitting a call here.
        """
        if not self._submitting.acquire(timeout=0.0):
            return None
        try:
            busy = self._submitted.keeps_busy(rank)
            return None if busy else self._actor(rank).copy_rows.remote(rows, *refs)
        finally:
            self._submitting.release()

    def discard_submitted(self) -> list[str]:
        """Drop the results of this thread's calls that have not been requested, and return the names of the calls.

        Ranks complete them first, because one that left a collective would block the others in it. Background calls
        take part in none: those that are not running yet are canceled, and the others complete later.

        Raises:
            RoleError: one of them failed, or missed its deadline.
        """
        discarded = self._submitted.pop_own()
        for call_id, submitted in discarded.items():
            try:
                self._wait(list(submitted.unfinished.values()), self._call_s)
            except LostRanksError as lost:
                self._start_again(lost, submitted.num_starts)
                continue
            if submitted.call.returns_rows:
                for rank in submitted.call.called:
                    submitted.actors[rank].discard.remote(call_id)
        return [submitted.call.name for submitted in discarded.values()]

    def relay(self, relays: Sequence[Relay], target: Any, kept: list[Any] | None = None) -> list[Any]:
        """Pass values to all ranks of `target`, and return the results of the last load.

        The driver passes references on and never holds a value. At most `_RELAYS_IN_FLIGHT` values exist at a time:
        each is freed once all ranks of `target` have loaded it, unless `kept` is given: its contents are then replaced
        by the references. If ranks of `target` are started again, all values are passed again.
        """
        assert isinstance(target, RayRanks), "values travel between pools of one cluster"
        while True:
            num_starts = target.num_starts
            try:
                with self._loading(), target._loading():
                    return self._relay_once(relays, target, kept)
            except LostRanksError as lost:
                if self in lost.pools:
                    self.kill(lost.error)
                    target.kill(lost.error)
                    raise lost.error from lost
                target._start_again(lost, num_starts)

    def load_again(self, values: Sequence[Any], relays: Sequence[Relay]) -> list[Any]:
        """Load values that an earlier `relay` kept, without their source, and return the results of the last load."""
        while True:
            num_starts, results = self.num_starts, list[Any]()
            try:
                with self._loading():
                    for value, relay in zip(values, relays, strict=True):
                        results = self._wait(self._load(value, relay), self._call_s)
                return results
            except LostRanksError as lost:
                self._start_again(lost, num_starts)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Count a relay or a load as under way in this block."""
        with self._submitting:
            self._num_loading += 1
        try:
            yield
        finally:
            with self._submitting:
                self._num_loading -= 1

    def _relay_once(self, relays: Sequence[Relay], target: "RayRanks", kept: list[Any] | None) -> list[Any]:
        """Pass values to all ranks of `target`, and return the results of the last load."""
        if kept is not None:
            kept.clear()
        in_flight: deque[list[RankCall]] = deque()
        results: list[Any] = []
        for relay in relays:
            if len(in_flight) == _RELAYS_IN_FLIGHT:
                self._wait(in_flight.popleft(), self._call_s, target)
            value, calls = self._start_relay(relay, target)
            in_flight.append(calls)
            if kept is not None:
                kept.append(value)
            del value
        while in_flight:
            results = self._wait(in_flight.popleft(), self._call_s, target)[self.num_ranks :]
        return results

    def _start_relay(self, relay: Relay, target: "RayRanks") -> tuple[ray.ObjectRef, list[RankCall]]:
        """Start a value's export here and its load on `target`; return a reference to it, and the calls."""
        role, method, args = relay.export
        exports = self._submit_to_ranks(Call(role, method, [args] * self.num_ranks, {}), next(_CALL_IDS))
        value = exports[relay.owner].ref
        loads = target._load(value, relay)
        # Waiting for the value itself would fetch it to the driver.
        exists = self._pool.actors[relay.owner].await_value.remote(value)
        exports[relay.owner] = replace(exports[relay.owner], ref=exists)
        return value, [*exports, *loads]

    def _load(self, value: Any, relay: Relay) -> list[RankCall]:
        """Start the load of a value on all ranks."""
        role, method, args = relay.load
        return self._submit_to_ranks(Call(role, method, [(value, *args)] * self.num_ranks, {}), next(_CALL_IDS))

    def close(self) -> None:
        """Shut the processes down, kill those that don't answer, and free their resources."""
        self.end()
        closed = [actor.close.remote() for actor in self._pool.actors]
        ray.wait(closed, num_returns=len(closed), timeout=CLOSE_S)
        self.kill()

    def _submit_to_ranks(self, call: Call, call_id: int, *, is_measured: bool = False) -> list[RankCall]:
        """Start a call on its ranks; ranks with the same arguments read one object.

        Foreground calls that return rows, and measured ones, answer with `Measured`.
        """
        called = [(self._pool.actors[rank], self._pool.nodes[rank]) for rank in call.called]
        places = [(*place, args) for place, args in zip(called, call.args_of_rank, strict=True)]
        # Copy the rows that other nodes need before any rank starts its call: a busy rank can't copy rows.
        shared = SharedArguments(call.args_of_rank, [node for _, node, _ in places])
        args_of_rank = [[shared.for_node(arg, node) for arg in args] for _, node, args in places]
        kwargs_of_rank = [
            {name: argument_on_node(value, node) for name, value in call.kwargs.items()} for _, node, _ in places
        ]
        refs = []
        with self._submitting:
            for place, (rank, (actor, _, _)) in enumerate(zip(call.called, places, strict=True)):
                target = (call.role, call.method, kwargs_of_rank[place], *args_of_rank[place])
                if call.background:
                    refs.append(actor.submit.remote(call_id, *target))
                elif rank not in call.outputs:
                    refs.append(actor.execute.remote(*target))
                elif call.returns_rows:
                    refs.append(actor.measure.remote("call_rows", call_id, *target))
                elif is_measured:
                    refs.append(actor.measure.remote("call", *target))
                else:
                    refs.append(actor.call.remote(*target))
            kind = {"background": call.background, "starts": call.starts}
            return rank_calls(refs, call.role, call.method, ranks=call.called, **kind)

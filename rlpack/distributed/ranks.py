"""The processes of one pool, as Ray actors: calls with a deadline, and one typed error for every failure.

The first failure kills the pool: the other ranks may be blocked in a collective that can't complete, and would stay so
until its own timeout.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import OffloadedBatch
from rlpack.config.schema import Placement, Pool
from rlpack.config.sections.submission import Submission
from rlpack.distributed.answers import answered, ask_ray, first_answer
from rlpack.distributed.calls import Call, Pending, Relay
from rlpack.distributed.errors import ClusterError, RoleError, StoreFullError
from rlpack.distributed.failures import (
    RankCall,
    deadline_error,
    describe_context,
    describe_error,
    first_cause,
    rank_calls,
)
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.rank_processes import RankProcesses
from rlpack.distributed.ray_store import RayStore
from rlpack.distributed.ray_watch import current, raise_if_ray_ended, ray_ended
from rlpack.distributed.shared_arguments import SharedArguments, argument_on_node
from rlpack.distributed.start_actors import start_actors
from rlpack.distributed.submitted import SubmittedCalls
from rlpack.distributed.usage import Usage, UsageLog
from rlpack.run_log import log_of_node

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
# Weights in transit between pools: one bucket is loaded while the next is gathered.
_RELAYS_IN_FLIGHT = 2
# Ranks find the rows of a call by its id.
_CALL_IDS = count()


class RayRanks:
    """The processes of one pool."""

    def __init__(
        self, name: str, pool: Pool, group: PlacementGroup | None, placement: Placement, store: RayStore
    ) -> None:
        self._name = name
        self._group = group
        self._store = store
        self._nodes: list[str] = []
        self._processes: RankProcesses | None = None
        self._roles: set[str] = set()
        self._submitted = SubmittedCalls()
        # Ranks that got the calls of two threads in different orders could wait for each other in collectives for ever.
        self._submitting = RLock()
        self._usage = UsageLog()
        self._call_s = placement.call_timeout_s
        self._start_s = placement.start_timeout_s
        # The daemons of a run's own Ray are processes of the driver, which ends all ranks with them.
        silence_s = None if placement.address is None else placement.ray_timeout_s
        self._actors: list[Any] = ask_ray(partial(start_actors, name, pool, group, silence_s))

    @property
    def num_ranks(self) -> int:
        """Return the number of processes."""
        return len(self._actors)

    def process_ids(self) -> list[int]:
        """Return the process id of each rank, on its own node."""
        assert self._processes is not None, "init_process_group comes first"
        return self._processes.pids

    def init_process_group(self, job: Submission, log_path: Path | None = None) -> None:
        """Wait until all processes run, load the secrets that the run names, and form the process group.

        The processes append what they log to `log_path`; those on other nodes, to a file of their node next to it.
        """
        role, method = f"pool {self._name}", "start"

        def finish(refs: list[ray.ObjectRef]) -> list[Any]:
            return self._wait(rank_calls(refs, role, method), self._start_s)

        node_ips = finish([actor.node_ip.remote() for actor in self._actors])
        self._nodes = finish([actor.node.remote() for actor in self._actors])
        processes = finish([actor.process_id.remote() for actor in self._actors])
        self._processes = ask_ray(lambda: RankProcesses(self._nodes, processes))
        if (watch := current()) is not None:
            watch.kill_with(self._processes.kill_all)
        if log_path is not None:
            here = ray.get_runtime_context().get_node_id()
            places = zip(self._actors, self._nodes, node_ips, strict=True)
            paths = [(actor, log_path if node == here else log_of_node(log_path, ip)) for actor, node, ip in places]
            finish([actor.open_log.remote(path) for actor, path in paths])
        if job.secret_names:
            finish([actor.load_secrets.remote(job) for actor in self._actors])
        (address,) = finish([self._actors[0].rendezvous.remote(node_ips[0], self._start_s)])
        joins = zip(self._actors, node_ips, strict=True)
        finish([actor.join.remote(address, node_ip, self._call_s) for actor, node_ip in joins])

    def start_role(
        self,
        role: str,
        target: str,
        settings: tuple[Any, ...],
        arguments: dict[str, Any],
        layout: ParallelLayout | None = None,
    ) -> None:
        """Build a role on every rank, by `Class.from_settings(context, *settings, **arguments)`.

        Args:
            role: its name.
            target: its class, `package.module:Class`.
            settings: what it is built from.
            arguments: its own keyword arguments.
            layout: layout of its ranks; None for data-parallel ranks.
        """
        self._roles.add(role)
        shared = ray.put(settings)
        refs = [actor.start_role.remote(role, target, shared, arguments, layout) for actor in self._actors]
        self._wait(rank_calls(refs, role, "start"), self._start_s)

    def submit(self, call: Call) -> Pending[list[Any]]:
        """Start a call on the ranks that it names.

        Results come in the order of the output ranks; token-sized columns of rows stay in the object store. If a
        foreground call fails before its result is requested, the next wait for a later call raises its error.

        Raises:
            StoreFullError: raised by `Pending.result` if the rows of a call don't fit.
        """
        call_id = next(_CALL_IDS)
        with self._submitting:
            calls = self._submit_to_ranks(call, call_id, is_measured=True)
            self._submitted.add(call_id, call, calls)
        return Pending(partial(self._result, call, call_id, calls), [one.ref for one in calls])

    def wait_any(self, pending: Sequence[Pending[Any]], timeout_s: float) -> list[int]:
        """Return which calls have answered, by their positions; [] if none has within `timeout_s` seconds.

        Raises:
            ClusterError: a daemon of Ray ended.
        """
        place_of = {ref: place for place, one in enumerate(pending) for ref in one.answers}
        return sorted({place_of[ref] for ref in answered(list(place_of), time.monotonic() + timeout_s)})

    def _result(self, call: Call, call_id: int, calls: list[RankCall]) -> list[Any]:
        """Wait for a submitted call and return the results of its output ranks."""
        self._submitted.remove(call_id)
        if call.background:
            self._wait(calls, self._call_s)
            refs = [self._actors[one.rank].result.remote(call_id) for one in calls]
            calls = rank_calls(refs, call.role, call.method)
        results = dict(zip(call.called, self._wait(calls, self._call_s), strict=True))
        results = self._usage.unwrap(call.role, call.method, results)
        if not call.returns_rows:
            return [results[rank] for rank in call.outputs]
        for rank in set(call.called) - set(call.outputs):
            self._actors[rank].discard.remote(call_id)
        return self._store_rows(call, call_id, {rank: results[rank] for rank in call.outputs})

    def pop_usage(self, role: str) -> dict[str, Usage]:
        """Return what the foreground calls of a role took since the last request, by method."""
        return self._usage.pop(role)

    def apply(self, function: Callable[..., Any], *args: Any) -> Pending[list[Any]]:
        """Start a function on every rank, after the calls that are submitted; its results are those of all ranks."""
        refs = [actor.apply.remote(function, *args) for actor in self._actors]
        calls = rank_calls(refs, f"pool {self._name}", function.__name__)
        return Pending(lambda: self._wait(calls, self._call_s))

    def _store_rows(self, call: Call, call_id: int, rows: dict[int, OffloadedBatch]) -> list[BatchedDataDict]:
        """Store the columns of a call's rows once there is room; return the rows in the order of the ranks."""
        sizes: Counter[str] = Counter()
        for rank, offloaded in rows.items():
            sizes[self._nodes[rank]] += sum(offloaded.sizes)
        having = [rank for rank, offloaded in rows.items() if offloaded.sizes]
        try:
            reserved = self._store.reserve(sizes, call.role, call.method)
        except StoreFullError:
            for rank in having:
                self._actors[rank].discard.remote(call_id)
            raise
        with reserved as room:
            stored = [self._actors[rank].store_columns.remote(call_id) for rank in having]
            puts = rank_calls(stored, call.role, call.method, ranks=having)
            refs = dict(zip(having, self._wait(puts, self._call_s), strict=True))
            return [
                offloaded.with_handles(
                    [
                        room.keep(ref, size, self._nodes[rank], self._actors[rank], (call.role, rank))
                        for ref, size in zip(refs.get(rank, []), offloaded.sizes, strict=True)
                    ]
                )
                for rank, offloaded in rows.items()
            ]

    def discard_submitted(self) -> list[str]:
        """Drop the results of this thread's calls that have not been requested, and return the names of the calls.

        Ranks complete them first, because one that left a collective would block the others in it. Background calls
        take part in none: those that are not running yet are canceled, and the others complete later.

        Raises:
            RoleError: one of them failed, or missed its deadline.
        """
        discarded = self._submitted.pop_own()
        for call_id, submitted in discarded.items():
            self._wait(list(submitted.unfinished.values()), self._call_s)
            if submitted.call.returns_rows:
                for rank in submitted.call.called:
                    self._actors[rank].discard.remote(call_id)
        return [submitted.call.name for submitted in discarded.values()]

    def relay(self, relays: Sequence[Relay], target: Any) -> list[Any]:
        """Pass values to all ranks of `target`, and return the results of the last load.

        The driver passes references on and never holds a value. At most `_RELAYS_IN_FLIGHT` values exist at a time:
        each is freed once all ranks of `target` have loaded it.
        """
        assert isinstance(target, RayRanks), "values travel between pools of one cluster"
        in_flight: deque[list[RankCall]] = deque()
        results: list[Any] = []
        for relay in relays:
            if len(in_flight) == _RELAYS_IN_FLIGHT:
                self._wait(in_flight.popleft(), self._call_s, target)
            in_flight.append(self._start_relay(relay, target))
        while in_flight:
            results = self._wait(in_flight.popleft(), self._call_s, target)[self.num_ranks :]
        return results

    def _start_relay(self, relay: Relay, target: "RayRanks") -> list[RankCall]:
        """Start a value's export here and its load on `target`."""
        role, method, args = relay.export
        exports = self._submit_to_ranks(Call(role, method, [args] * self.num_ranks, {}), next(_CALL_IDS))
        value = exports[relay.owner].ref
        role, method, args = relay.load
        loads = target._submit_to_ranks(Call(role, method, [(value, *args)] * target.num_ranks, {}), next(_CALL_IDS))
        # Waiting for the value itself would fetch it to the driver.
        exists = self._actors[relay.owner].await_value.remote(value)
        exports[relay.owner] = replace(exports[relay.owner], ref=exists)
        return [*exports, *loads]

    def close(self) -> None:
        """Shut the processes down, kill those that don't answer, and free their resources."""
        ray.wait([actor.close.remote() for actor in self._actors], num_returns=self.num_ranks, timeout=_CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the processes and free their resources."""
        try:
            if not ray_ended():
                ask_ray(self._kill_by_ray, 2 * _CLOSE_S)
                return
        except ClusterError as error:
            logger.debug("Ray doesn't kill pool %s: %s", self._name, error)
        if self._processes is not None:
            self._processes.kill_all()

    def _kill_by_ray(self) -> None:
        """Let Ray's GCS kill the processes, and free their resources."""
        for actor in self._actors:
            ray.kill(actor)
        if self._processes is not None:
            self._processes.close()
        if self._group is not None:
            remove_placement_group(self._group)

    def _submit_to_ranks(self, call: Call, call_id: int, *, is_measured: bool = False) -> list[RankCall]:
        """Start a call on its ranks; ranks with the same arguments read one object.

        Foreground calls that return rows, and measured ones, answer with `Measured`.
        """
        called = [(self._actors[rank], self._nodes[rank]) for rank in call.called]
        places = [(*place, args) for place, args in zip(called, call.args_of_rank, strict=True)]
        # Copy the rows that other nodes need before any rank starts its call: a busy rank can't copy rows.
        shared = SharedArguments(call.args_of_rank)
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
            return rank_calls(refs, call.role, call.method, ranks=call.called, background=call.background)

    def _wait(self, calls: list[RankCall], timeout_s: float, *others: "RayRanks") -> list[Any]:
        """Wait for calls and return their results.

        At the first failure or at the deadline, kill this pool and the `others`, and raise.

        Earlier calls of the same processes run first, awaited or not: the deadline counts from the last of
        them, and their failures are raised at once, because ranks may be blocked in a collective with a failed one.
        """
        pools = {self, *others}
        deadline = time.monotonic() + timeout_s
        results: dict[ray.ObjectRef, Any] = {}
        pending = [call.ref for call in calls]
        earlier = {ref: call for pool in pools for ref, call in pool._submitted.before(calls).items()}
        while pending:
            answer = first_answer([*earlier, *pending], deadline)
            if answer is None:
                late = list(earlier.values()) or [call for call in calls if call.ref in pending]
                stopped = _end_stopped(late, pools)
                _kill(pools)
                raise deadline_error(late, timeout_s, stopped)
            ref, value, error = answer
            if error is not None:
                unfinished = [other for other in (*earlier, *pending) if other != ref]
                under_way = [*earlier.values(), *calls]
                call, cause = first_cause(under_way, ref, unfinished, error)
                raise_if_ray_ended()  # of which deaths are consequences
                call = _call_of_dead_rank(cause, under_way, pools) or call
                _kill(pools)
                raise self._failure(call, cause, earlier) from cause
            if earlier.pop(ref, None) is None:
                results[ref] = value
                pending.remove(ref)
                continue
            for pool in pools:
                pool._submitted.record_answer(ref)
            deadline = time.monotonic() + timeout_s
        return [results[call.ref] for call in calls]

    def _failure(self, call: RankCall, cause: RayError, earlier: dict[ray.ObjectRef, RankCall]) -> RoleError:
        """Return the error for a failed call."""
        if isinstance(cause, RayTaskError) and (producer := self._store.producer_of(cause)):
            text = f"the process that held tokens or texts for {call.role}.{call.method} died"
            return RoleError(*producer, call.method, text)
        context = describe_context(call, cause, earlier, self._submitted.names_in_background())
        return RoleError(call.role, call.rank, call.method, describe_error(cause) + context)


def _call_of_dead_rank(cause: RayError, calls: Sequence[RankCall], pools: set[RayRanks]) -> RankCall | None:
    """Return a call of the process that died; None if no process died, or none of the calls is its own.

    The call may differ from the one whose failure was noticed first.
    """
    if not isinstance(cause, RayActorError):
        return None
    dead = {
        (role, rank)
        for pool in pools
        for rank, actor in enumerate(pool._actors)
        for role in pool._roles
        if actor._actor_id.hex() == cause.actor_id
    }
    own = [call for call in calls if (call.role, call.rank) in dead]
    return next((call for call in own if not call.background), own[0] if own else None)


def _end_stopped(late: Sequence[RankCall], pools: set[RayRanks]) -> dict[RankCall, int]:
    """Kill the processes that are stopped, and return the late calls that they run, with their process ids."""
    stopped: dict[RankCall, int] = {}
    for pool in pools:
        processes = pool._processes
        ranks = [] if processes is None else processes.stopped()
        if processes is not None and ranks:
            own = [call for call in late if call.role in pool._roles and call.rank in ranks]
            stopped |= {call: processes.pids[call.rank] for call in own}
            processes.kill(ranks)
    return stopped


def _kill(pools: set[RayRanks]) -> None:
    for pool in pools:
        pool.kill()

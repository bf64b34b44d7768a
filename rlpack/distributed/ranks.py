"""The processes of one pool, as Ray actors: calls with a deadline, and one typed error for whatever fails.

The first failure kills the pool: the other ranks may be blocked in a collective that can't complete, and would stay so
until its own time-out.
"""

import logging
import os
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import OffloadedBatch, select_rows
from rlpack.config.schema import Placement, Pool
from rlpack.config.sections.submission import Submission
from rlpack.distributed.context import RankContext
from rlpack.distributed.errors import RankError, RoleError, StoreFullError
from rlpack.distributed.object_handles import Reader, localised, parts_of
from rlpack.distributed.process import RankHost
from rlpack.distributed.ray_store import RayStore

logger = logging.getLogger(__name__)

# Neighbours of a rank that dies in a collective may fail a moment before its death is known; so long is a better
# cause than theirs waited for.
_CAUSE_GRACE_S = 1.0
_CLOSE_S = 5.0
# Numbers of calls whose tokens and texts wait on their ranks.
_TICKETS = count()


class _RayHost(RankHost):
    """`RankHost` that knows its place, reads what lies in the object store, and puts away what is to lie there."""

    def node_ip(self) -> str:
        return ray.util.get_node_ip_address()

    def process(self) -> int:
        return os.getpid()

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def call(self, role: str, method: str, kwargs: dict[str, Any], *args: Any) -> Any:
        with _lent([*args, *kwargs.values()]):
            result = super().call(role, method, kwargs, *args)
            return BatchedDataDict(dict(result), row_ids=result.row_ids) if _is_batch(result) else result

    def outline(self, ticket: int, role: str, method: str, kwargs: dict[str, Any], *args: Any) -> OffloadedBatch:
        with _lent([*args, *kwargs.values()]):
            return super().outline(ticket, role, method, kwargs, *args)

    def put(self, ticket: int) -> list[ray.ObjectRef]:
        """Put the parts of an outline away."""
        return [ray.put(part) for part in self.parts(ticket)]

    def cut(self, part: dict[str, Any], rows: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return just these rows (int64 [n]) of a part that lies here, for a rank on another node."""
        return select_rows(part, rows)

    def has(self, value: Any) -> None:
        """Do nothing; Ray calls this only once `value`, which a method of this rank returns, is there."""


@contextmanager
def _lent(values: list[Any]) -> Iterator[None]:
    """Let a role read the batches among its arguments, for as long as its call takes.

    A role that keeps one would otherwise keep the objects, of which the driver believes that they are free.
    """
    batches = [value for value in values if _is_batch(value)]
    parts = [part for batch in batches for part in parts_of(batch)]
    reader = Reader()
    for batch in batches:
        batch.reader = reader
    try:
        yield
    finally:
        reader.close()
        for part in parts:
            part.free()


def _is_batch(value: Any) -> TypeGuard[BatchedDataDict]:
    return isinstance(value, BatchedDataDict)


@dataclass(frozen=True)
class _Call:
    """A call that is under way on one rank."""

    ref: ray.ObjectRef
    role: str
    rank: int
    method: str


def _calls(refs: Sequence[ray.ObjectRef], role: str, method: str) -> list[_Call]:
    return [_Call(ref, role, rank, method) for rank, ref in enumerate(refs)]


class RayRanks:
    """The processes of one pool."""

    def __init__(self, name: str, pool: Pool, group: PlacementGroup, placement: Placement, store: RayStore) -> None:
        self._name = name
        self._group = group
        self._store = store
        self._nodes: list[str] = []
        self._begun: dict[ray.ObjectRef, _Call] = {}  # calls whose rows nobody waits for yet
        self._beside: dict[int, str] = {}  # those in threads, by their tickets
        self._call_s = placement.call_timeout_s
        self._start_s = placement.start_timeout_s
        device = "cuda" if pool.gpus_per_rank > 0 else "cpu"
        actor = ray.remote(_RayHost)
        self._hosts: list[Any] = [
            actor.options(
                num_cpus=pool.cpus_per_rank,
                num_gpus=pool.gpus_per_rank,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            ).remote(RankContext(name, rank, pool.ranks, device), max(1, int(pool.cpus_per_rank)))
            for rank in range(pool.ranks)
        ]

    @property
    def num_ranks(self) -> int:
        """Return the count of processes."""
        return len(self._hosts)

    def processes(self) -> list[int]:
        """Return the process id of each rank, on its own node."""
        refs = [host.process.remote() for host in self._hosts]
        return self._wait(_calls(refs, f"pool {self._name}", "process"), self._call_s)

    def meet(self, job: Submission) -> None:
        """Wait until all processes run, have each find the secrets it needs, and make their process group."""
        role, method = f"pool {self._name}", "start"

        def finish(refs: list[ray.ObjectRef]) -> list[Any]:
            return self._wait(_calls(refs, role, method), self._start_s)

        node_ips = finish([host.node_ip.remote() for host in self._hosts])
        self._nodes = finish([host.node.remote() for host in self._hosts])
        if job.secret_names:
            finish([host.take_secrets.remote(job) for host in self._hosts])
        (address,) = finish([self._hosts[0].rendezvous.remote(node_ips[0], self._start_s)])
        joins = zip(self._hosts, node_ips, strict=True)
        finish([host.join.remote(address, node_ip, self._call_s) for host, node_ip in joins])

    def start(self, role: str, target: str, settings: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        """Build a role on every rank, by `Class.from_settings(context, *settings, **arguments)`."""
        shared = ray.put(settings)
        refs = [host.start.remote(role, target, shared, arguments) for host in self._hosts]
        self._wait(_calls(refs, role, "start"), self._start_s)

    def call(
        self, role: str, method: str, args_of_rank: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Run `method` on as many ranks as there are argument tuples; results in rank order."""
        return self._wait(self._submit(role, method, args_of_rank, kwargs), self._call_s)

    def begin_rows(
        self,
        role: str,
        method: str,
        args_of_rank: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        *,
        beside: bool = False,
    ) -> Callable[[], list[BatchedDataDict]]:
        """Start `method`, which returns rows, before what the ranks do next or `beside` it; return what waits for them.

        Tokens and texts of the rows stay in the object store. Until they are waited for, a failure of a call that is
        not `beside` ends whatever else the pool is asked.

        Raises:
            StoreFullError: on waiting; there is no room for tokens and texts.
        """
        ticket = next(_TICKETS)
        calls = self._submit(role, method, args_of_rank, kwargs, ticket, beside=beside)
        self._begun |= {call.ref: call for call in calls}
        if beside:
            self._beside[ticket] = f"{role}.{method}"

        def finish() -> list[BatchedDataDict]:
            for call in calls:
                self._begun.pop(call.ref, None)
            self._beside.pop(ticket, None)
            if not beside:
                return self._gather(calls, ticket)
            self._wait(calls, self._call_s)
            refs = [self._hosts[call.rank].finish.remote(ticket) for call in calls]
            return self._gather(_calls(refs, role, method), ticket)

        return finish

    def _gather(self, calls: list[_Call], ticket: int) -> list[BatchedDataDict]:
        """Return the rows that calls find, once there is room for their tokens and texts in the object store."""
        role, method = calls[0].role, calls[0].method
        found: list[OffloadedBatch] = self._wait(calls, self._call_s)
        sizes: Counter[str] = Counter()
        for node, outline in zip(self._nodes, found, strict=False):
            sizes[node] += sum(outline.sizes)
        having = [rank for rank, outline in enumerate(found) if outline.sizes]
        try:
            reserved = self._store.reserve(sizes, role, method)
        except StoreFullError:
            for rank in having:
                self._hosts[rank].drop.remote(ticket)
            raise
        with reserved as room:
            puts = [_Call(self._hosts[rank].put.remote(ticket), role, rank, method) for rank in having]
            refs = dict(zip(having, self._wait(puts, self._call_s), strict=True))
            return [
                outline.with_handles(
                    [
                        room.keep(ref, size, self._nodes[rank], self._hosts[rank], (role, rank))
                        for ref, size in zip(refs.get(rank, []), outline.sizes, strict=True)
                    ]
                )
                for rank, outline in enumerate(found)
            ]

    def transfer(self, source: tuple[str, str], target: Any, load: tuple[str, str], extra: tuple[Any, ...]) -> None:
        """Give rank 0's result of `source` (role, method), a collective, to `load` on every rank of `target`.

        The driver passes a reference on and never holds the value.
        """
        assert isinstance(target, RayRanks), "weights travel between pools of one cluster"
        exports = self._submit(*source, [()] * self.num_ranks, {})
        value = exports[0].ref
        loads = target._submit(*load, [(value, *extra)] * target.num_ranks, {})
        # The rank that has the value says whether it was made; to ask for it here would bring it here.
        exports[0] = replace(exports[0], ref=self._hosts[0].has.remote(value))
        self._wait([*exports, *loads], self._call_s, target)

    def close(self) -> None:
        """End the processes, gently where they answer, and free what they held."""
        ray.wait([host.close.remote() for host in self._hosts], num_returns=self.num_ranks, timeout=_CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End the processes at once and free what they held."""
        for host in self._hosts:
            ray.kill(host)
        remove_placement_group(self._group)

    def _submit(
        self,
        role: str,
        method: str,
        args_of_rank: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        ticket: int | None = None,
        *,
        beside: bool = False,
    ) -> list[_Call]:
        """Start a method on the ranks; with a ticket, one that returns rows, whose outlines come back or are kept."""
        # All rows are cut out before any rank starts its call, in which it could not cut for others.
        places = list(zip(self._hosts, self._nodes, args_of_rank, strict=False))
        sent = [[_sent(arg, node) for arg in args] for _, node, args in places]
        named = [{name: _sent(value, node) for name, value in kwargs.items()} for _, node, _ in places]
        refs = []
        for (host, _, _), args, keywords in zip(places, sent, named, strict=True):
            if ticket is None:
                refs.append(host.call.remote(role, method, keywords, *args))
            else:
                start = host.begin if beside else host.outline
                refs.append(start.remote(ticket, role, method, keywords, *args))
        return _calls(refs, role, method)

    def _wait(self, calls: list[_Call], timeout_s: float, *others: "RayRanks") -> list[Any]:
        """Return all results; at the first failure or at the deadline kill this pool and the `others`, and raise.

        Calls that were begun before, and that nobody waits for, come first on the same processes: the time counts
        from the last of them, and a failure or a hang of theirs is said at once, because ranks may be caught in a
        collective with one that has left it.
        """
        pools = {self, *others}
        deadline = time.monotonic() + timeout_s
        results: dict[ray.ObjectRef, Any] = {}
        pending = [call.ref for call in calls]
        begun = {ref: call for pool in pools for ref, call in pool._begun.items()}
        while pending:
            done, _ = ray.wait([*begun, *pending], timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                for pool in pools:
                    pool.kill()
                raise _late(list(begun.values()) or [call for call in calls if call.ref in pending], timeout_s)
            try:
                value = ray.get(done[0])
            except RayError as error:
                unfinished = [ref for ref in (*begun, *pending) if ref != done[0]]
                # A process that dies takes all of its calls along; the blame is not on one that ran beside the others.
                known = sorted([*begun.values(), *calls], key=lambda c: f"{c.role}.{c.method}" in self._beside.values())
                call, cause = _first_cause(known, done[0], unfinished, error)
                for pool in pools:
                    pool.kill()
                if isinstance(cause, RayTaskError) and (maker := self._store.maker_of(cause)):
                    text = f"the process that held tokens or texts for {call.role}.{call.method} died"
                    raise RoleError(*maker, call.method, text) from cause
                context = self._context_of(call, cause, begun)
                raise RoleError(call.role, call.rank, call.method, _describe(cause) + context) from cause
            if begun.pop(done[0], None) is not None:
                for pool in pools:
                    pool._begun.pop(done[0], None)
                deadline = time.monotonic() + timeout_s
                continue
            results[done[0]] = value
            pending.remove(done[0])
        return [results[call.ref] for call in calls]

    def _context_of(self, call: _Call, cause: RayError, begun: dict[ray.ObjectRef, _Call]) -> str:
        """Return what else may explain a failure: calls that had been begun and were under way."""
        before = takewhile(lambda other: other.ref != call.ref, begun.values())
        earlier = [other for other in before if (other.role, other.method) != (call.role, call.method)]
        # What torch raises of a collective in which a rank is missing.
        if earlier and isinstance(cause, RayTaskError) and isinstance(cause.cause, RuntimeError):
            first = earlier[0]
            return f"; rank {first.rank} had not answered {first.role}.{first.method} before, which may be why"
        if isinstance(cause, RayActorError) and self._beside:
            return f"; under way beside: {', '.join(dict.fromkeys(self._beside.values()))}"
        return ""


def _sent(value: Any, node: str) -> Any:
    """Return an argument as a rank on `node` gets it: of a batch on other nodes, only its own rows travel."""
    return localised(value, node) if _is_batch(value) else value


def _first_cause(
    calls: list[_Call], failed: ray.ObjectRef, pending: list[ray.ObjectRef], error: RayError
) -> tuple[_Call, RayError]:
    """Return call and error of the failure that explains the others.

    That is a death; else, in a transfer, a failed export, since a load fails with the error of what it was to get; else
    what came first.
    """
    failures = {failed: error}
    for ref in ray.wait(pending, num_returns=len(pending), timeout=_CAUSE_GRACE_S)[0] if pending else []:
        try:
            ray.get(ref)
        except RayError as other:
            failures[ref] = other
    found = [call for call in calls if call.ref in failures]
    methods = [call.method for call in calls]

    def precedence(call: _Call) -> tuple[bool, int, bool]:
        died = isinstance(failures[call.ref], RayActorError)
        return not died, methods.index(call.method), call.ref != failed

    cause = min(found, key=precedence)
    return cause, failures[cause.ref]


def _describe(error: RayError) -> str:
    """Return what happened in one line; a task's own exception comes with its type and its place in a user's code."""
    if isinstance(error, RayTaskError):
        known = isinstance(error.cause, RankError)
        text = str(error.cause) if known else f"{type(error.cause).__name__}: {error.cause}"
        place = _place(str(error))  # which holds the traceback
        return text if place in text else text + place
    if isinstance(error, RayActorError):
        return (
            "the process died; its log, in the Ray session's logs folder, says why (out of memory, a signal, a crash)"
        )
    return f"{type(error).__name__}: {error}"


def _place(trace: str) -> str:
    """Return the last line of a traceback that is a user's own code: not rlpack's, no package's and not Python's."""
    ours = [str(Path(__file__).resolve().parents[1])]
    others = (*ours, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    frames = [frame for frame in re.findall(r'File "(.+?)", line (\d+)', trace) if not frame[0].startswith(others)]
    return " ({}, line {})".format(*frames[-1]) if frames else ""


def _late(calls: list[_Call], timeout_s: float) -> RoleError:
    ranks = ", ".join(str(call.rank) for call in calls if call.role == calls[0].role)
    return RoleError(
        calls[0].role,
        calls[0].rank,
        calls[0].method,
        f"no answer from rank(s) {ranks} within {timeout_s:g} s; "
        "raise placement.call_timeout_s or placement.start_timeout_s if the work takes longer",
    )

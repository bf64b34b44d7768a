"""The processes of one pool, as Ray actors: calls with a deadline, and one typed error for whatever fails.

The first failure kills the pool: the other ranks may be blocked in a collective that can't complete, and would stay so
until its own time-out.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpack.config.schema import Placement, Pool
from rlpack.distributed.context import RankContext
from rlpack.distributed.errors import RoleError
from rlpack.distributed.host import RankHost

logger = logging.getLogger(__name__)

# Neighbours of a rank that dies in a collective may fail a moment before its death is known; so long is a better
# cause than theirs waited for.
_CAUSE_GRACE_S = 1.0
_CLOSE_S = 5.0


class _RayHost(RankHost):
    """`RankHost` that knows its node's address."""

    def node_ip(self) -> str:
        return ray.util.get_node_ip_address()


class RayRanks:
    """The processes of one pool."""

    def __init__(self, name: str, pool: Pool, group: PlacementGroup, placement: Placement) -> None:
        self._name = name
        self._group = group
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

    def meet(self) -> None:
        """Wait until all processes run, and make their process group."""
        where = (f"pool {self._name}", "start", self._start_s)
        node_ips = self._wait([host.node_ip.remote() for host in self._hosts], *where)
        (address,) = self._wait([self._hosts[0].rendezvous.remote(node_ips[0], self._start_s)], *where)
        joins = zip(self._hosts, node_ips, strict=True)
        self._wait([host.join.remote(address, node_ip, self._call_s) for host, node_ip in joins], *where)

    def start(self, role: str, target: str, settings: tuple[Any, ...]) -> None:
        """Build a role on every rank."""
        shared = ray.put(settings)
        self._wait([host.start.remote(role, target, shared) for host in self._hosts], role, "start", self._start_s)

    def call(
        self, role: str, method: str, args_of_rank: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Run `method` on as many ranks as there are argument tuples; results in rank order."""
        return self._wait(self._submit(role, method, args_of_rank, kwargs), role, method, self._call_s)

    def transfer(self, source: tuple[str, str], target: Any, load: tuple[str, str], extra: tuple[Any, ...]) -> None:
        """Give rank 0's result of `source` (role, method), a collective, to `load` on every rank of `target`.

        The driver passes a reference on and never holds the value.
        """
        assert isinstance(target, RayRanks), "weights travel between pools of one cluster"
        exported = self._submit(*source, [()] * self.num_ranks, {})
        loaded = target._submit(*load, [(exported[0], *extra)] * target.num_ranks, {})
        self._wait([*exported[1:], *loaded], load[0], f"{source[1]} or {load[1]}", self._call_s)

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
        self, role: str, method: str, args_of_rank: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]
    ) -> list[ray.ObjectRef]:
        hosts = self._hosts[: len(args_of_rank)]
        return [host.call.remote(role, method, *args, **kwargs) for host, args in zip(hosts, args_of_rank, strict=True)]

    def _wait(self, refs: list[ray.ObjectRef], role: str, method: str, timeout_s: float) -> list[Any]:
        """Return all results, or kill the pool and raise at the first failure or at the deadline."""
        deadline = time.monotonic() + timeout_s
        results: dict[ray.ObjectRef, Any] = {}
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                self.kill()
                late = [refs.index(ref) for ref in pending]
                raise RoleError(role, late[0], method, _late(late, timeout_s))
            try:
                results[done[0]] = ray.get(done[0])
            except RayError as error:
                rank, cause = self._first_cause(refs, done[0], pending, error)
                self.kill()
                raise RoleError(role, rank, method, _describe(cause)) from cause
        return [results[ref] for ref in refs]

    def _first_cause(
        self, refs: list[ray.ObjectRef], failed: ray.ObjectRef, pending: list[ray.ObjectRef], error: RayError
    ) -> tuple[int, RayError]:
        """Return rank and error of the failure that explains the others: a death, else what came first."""
        failures = {failed: error}
        for ref in ray.wait(pending, num_returns=len(pending), timeout=_CAUSE_GRACE_S)[0] if pending else []:
            try:
                ray.get(ref)
            except RayError as other:
                failures[ref] = other
        cause = next((ref for ref, found in failures.items() if isinstance(found, RayActorError)), failed)
        return refs.index(cause) % self.num_ranks, failures[cause]


def _describe(error: RayError) -> str:
    """Return what happened in one line; a task's own exception comes with its type."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError):
        return (
            "the process died; its log, in the Ray session's logs folder, says why (out of memory, a signal, a crash)"
        )
    return f"{type(error).__name__}: {error}"


def _late(ranks: list[int], timeout_s: float) -> str:
    return (
        f"no answer from rank(s) {', '.join(map(str, ranks))} within {timeout_s:g} s; "
        "raise placement.call_timeout_s or placement.start_timeout_s if the work takes longer"
    )

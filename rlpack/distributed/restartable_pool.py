"""A pool of ranks that can be restarted; every failure of a wait becomes one typed error.

The first failure kills the pool: the other ranks may be blocked in a collective that can't complete, and would stay
blocked until it times out. If no role of the pool is trained, and a process died or hung, the pool is then started
again and the calls that have no result yet are repeated (`rlpack.distributed.restarts`). An exception of a role is not
repeated.

Invariants of restarts (tests/distributed/test_restarts.py):

1. a repeated call gets the arguments that it had, and its results are stored under the same lease. Rows that an earlier
   call returned outlive the rank that computed them: the driver owns them in the object store;
2. calls that are not waited for yet are repeated, too, in the order of their submission; those of `@one_rank` methods
   aren't, since a rank may hold rows of earlier ones: they raise `RanksRestartedError`;
3. before any call is repeated, the roles are built, and the functions given to `after_restart` have run.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, NoReturn

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from rlpack.config.schema import Placement, Pool
from rlpack.config.sections.submission import Submission
from rlpack.distributed.answers import arrived
from rlpack.distributed.errors import RoleError
from rlpack.distributed.failures import (
    RankCall,
    RankPlace,
    deadline_error,
    describe_context,
    describe_error,
    error_beside_stopped,
    first_cause,
    lost_node_error,
    rank_calls,
    role_error,
)
from rlpack.distributed.first_failure import FirstFailure
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.pool_processes import BuiltRole, PoolProcesses
from rlpack.distributed.ray_store import RayStore
from rlpack.distributed.ray_watch import raise_if_ray_ended
from rlpack.distributed.reservations import ReservedDevices
from rlpack.distributed.restarts import MOST_RESTARTS, WINDOW, Restarts
from rlpack.distributed.submitted import SubmittedCall, SubmittedCalls

logger = logging.getLogger(__name__)

# Advice after a death or a hang that ends a run.
_RESUME = "resume=auto continues from the newest checkpoint, and supervise=N does so by itself"


class LostRanksError(Exception):
    """Processes of pools that can be started again died, or hung.

    Attributes:
        error: the error that ends the run if they can't be restarted.
        pools: the pools that lost processes.
    """

    def __init__(self, error: RoleError, pools: set["RestartablePool"]) -> None:
        super().__init__(error)
        self.error, self.pools = error, pools


class RestartablePool(ABC):
    """The processes of one pool.

    Attributes:
        is_restartable: whether the processes are started again after a death or a hang: none of their roles is trained.
        num_starts: how many times they were started.
    """

    def __init__(
        self,
        name: str,
        pool: Pool,
        reserved: ReservedDevices | None,
        placement: Placement,
        store: RayStore,
        restarts: Restarts | None = None,
    ) -> None:
        self.is_restartable = False
        self.num_starts = 1
        self._pool = PoolProcesses(name, pool, reserved, placement)
        self._store = store
        self._restarts = Restarts() if restarts is None else restarts
        self._after_restart: dict[Any, Callable[[], None]] = {}
        self._is_restarting = self._is_ended = False
        self._failure, self._submitted = FirstFailure(), SubmittedCalls()
        # Held by restarts and submissions: ranks that got calls in different orders could wait for each other for ever.
        self._submitting = RLock()
        self._call_s = placement.call_timeout_s
        self._start_s = placement.start_timeout_s

    @property
    def num_ranks(self) -> int:
        """Return the number of processes."""
        return len(self._pool.actors)

    @property
    def nodes(self) -> list[str]:
        """Return Ray's id of the node of each process."""
        return self._pool.nodes

    def process_ids(self) -> list[int]:
        """Return the process id of each rank, on its own node."""
        assert self._pool.processes is not None, "init_process_group comes first"
        return self._pool.processes.pids

    def init_process_group(self, job: Submission, log_path: Path | None = None) -> None:
        """Wait until all processes run, load the secrets that the run names, and form the process group.

        The processes append what they log to `log_path`; those on other nodes, to a file of their node next to it.
        """
        self._pool.start(job, log_path, self._finish_start)

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
        try:
            self._pool.build(role, BuiltRole(target, ray.put(settings), arguments, layout), self._finish_start)
        except LostRanksError as lost:
            self._start_again(lost, self.num_starts)  # which builds it, too

    def end(self) -> None:
        """Let no later loss start the processes again: threads may still wait for calls when a run ends."""
        self._is_ended = True

    def kill(self, failure: BaseException | None = None) -> None:
        """Kill the processes, for a failure if given, and free their resources; nothing starts them again.

        Other threads that wait for calls raise the first failure, rather than the death of the processes.
        """
        self.end()
        self._failure.record(failure)
        self._pool.kill()

    @abstractmethod
    def _start(self, submitted: SubmittedCall) -> None:
        """Start a call, or start it again."""

    def after_restart(self, key: Any, function: Callable[[], None]) -> None:
        """Call a function after each restart, instead of an earlier one with this key; then calls are repeated."""
        self._after_restart.pop(key, None)
        self._after_restart[key] = function

    def _finish_start(self, role: str, method: str, refs: list[ray.ObjectRef]) -> list[Any]:
        return self._wait(rank_calls(refs, role, method), self._start_s)

    def _start_again(self, lost: LostRanksError, num_starts: int) -> None:
        """Restart the processes, unless another thread has done so, and repeat the calls that no thread waits for.

        Args:
            lost: the error of the call that failed.
            num_starts: value of `self.num_starts` when that call was started.

        Raises:
            RoleError: that of `lost`, since the role was started again too often, or the pool was ended; or a process
                failed to start.
            LostRanksError: a function given to `after_restart` made the call; the restart begins again.
        """
        with self._submitting:
            if self._is_restarting:
                raise lost
            if num_starts != self.num_starts:
                return
            self._raise_if_ended(lost)
            self._is_restarting = True
            try:
                self._restart(lost)
            except BaseException as error:
                self.kill(error)
                raise
            finally:
                self._is_restarting = False
            for submitted in self._submitted.all():
                if submitted.call.of_start is None:
                    self._start(submitted)

    def _restart(self, lost: LostRanksError) -> None:
        """Start the processes and their roles again, until they run or were started too often."""
        began = time.perf_counter()
        self._submitted.forget_parts()
        while True:
            self._raise_if_ended(lost)
            number = self._restarts.record(lost.error, self._pool.name)
            logger.warning(
                "%s; pool %s is started again and the call repeated (restart %d of at most %d in %d steps)",
                *(lost.error, self._pool.name, number, MOST_RESTARTS, WINDOW),
            )
            self.num_starts += 1
            try:
                self._pool.start_again(self._finish_start)
                for function in list(self._after_restart.values()):
                    function()
                break
            except LostRanksError as again:
                lost = again
        self._raise_if_ended(lost)
        seconds = time.perf_counter() - began
        self._restarts.add_seconds(seconds)
        logger.warning("pool %s runs again after %.1f s", self._pool.name, seconds)

    def _raise_if_ended(self, lost: LostRanksError) -> None:
        if failure := self._failure.again():
            raise failure
        if self._is_ended:
            raise lost.error from lost

    def _wait(
        self, calls: list[RankCall], timeout_s: float, *others: "RestartablePool", began: float | None = None
    ) -> list[Any]:
        """Wait for calls and return their results.

        At the first failure or at the deadline, kill this pool and the `others`, and raise.

        Earlier calls of the same processes run first, awaited or not: the deadline counts from the last of them, and
        their failures are raised at once, because ranks may be blocked in a collective with a failed one. For calls
        with their own deadline it counts from `began`, or from the last earlier call; the earlier calls themselves may
        take as long as any call of the pool, and those that start engines as long as a start.
        """
        pools = {self, *others}
        results: dict[ray.ObjectRef, Any] = {}
        pending = {call.ref: call for call in calls}
        earlier = {ref: call for pool in pools for ref, call in pool._submitted.before(calls).items()}

        def limit() -> float:
            longest_s = max(timeout_s, self._call_s) if earlier and began is not None else timeout_s
            return longest_s + (self._start_s if any(call.starts for call in earlier.values()) else 0.0)

        deadline = (time.monotonic() if began is None or earlier else began) + (limit_s := limit())
        while pending:
            answers = arrived([*earlier, *pending], deadline)
            if not answers:
                late = list((earlier or pending).values())
                raise self._missed(late, limit_s, pools, is_own=began is not None and not earlier)
            for answer in answers:
                if answer.error is not None:
                    unfinished = [one for ref, one in {**earlier, **pending}.items() if ref != answer.ref]
                    self._raise_failure(answer.ref, answer.error, earlier, calls, unfinished, pools)
                is_earlier = answer.ref in earlier
                call = (earlier if is_earlier else pending).pop(answer.ref)
                for pool in pools:
                    pool._submitted.record_answer(call)
                if is_earlier:
                    deadline = time.monotonic() + (limit_s := limit())
                else:
                    results[answer.ref] = answer.value
        return [results[call.ref] for call in calls]

    def _raise_failure(
        self,
        failed: ray.ObjectRef,
        error: RayError,
        earlier: dict[ray.ObjectRef, RankCall],
        calls: list[RankCall],
        unfinished: list[RankCall],
        pools: set["RestartablePool"],
    ) -> NoReturn:
        """Kill pools and raise the failure of a rank, or the one that explains it.

        Args:
            failed: the first failed call that was noticed.
            error: its error.
            earlier: calls that hold up those that are waited for, by reference.
            calls: the calls that are waited for.
            unfinished: those of both that have no known answer, without the failed one.
            pools: pools to kill.
        """
        under_way = [*earlier.values(), *calls]
        call, cause = first_cause(under_way, failed, [other.ref for other in unfinished], error)
        raise_if_ray_ended()  # of which deaths are consequences
        if isinstance(cause, RayTaskError):  # maybe of a collective that a stopped process doesn't reach
            stopped = _end_stopped(unfinished, pools)
            if stopped:
                raise _killed(pools, _hung(stopped, pools), error_beside_stopped(call, cause, stopped), cause)
        dead = _pools_of_dead(cause, call, pools)
        call = _call_of_dead_rank(cause, call, under_way, pools)
        place = _place_of_dead(cause, call, pools)
        raise _killed(pools, dead, self._describe_failure(call, cause, earlier, place), cause)

    def _missed(
        self, late: list[RankCall], limit_s: float, pools: set["RestartablePool"], *, is_own: bool = False
    ) -> RoleError | LostRanksError:
        """Kill pools whose calls are late, and return the error to raise; arguments as for `deadline_error`."""
        stopped = _end_stopped(late, pools)
        missed = deadline_error(late, limit_s, stopped, place=_place_of(late[0], pools), is_own=is_own)
        if self._is_restarting and not stopped and (ranks_of := self._pool.lost_nodes()):
            missed = lost_node_error(late[0], limit_s, self._pool.name, ranks_of)
        return _killed(pools, _hung(stopped or late, pools), missed)

    def _describe_failure(
        self, call: RankCall, cause: RayError, earlier: dict[ray.ObjectRef, RankCall], place: RankPlace | None
    ) -> RoleError:
        """Return the error for a failed call; `place` is that of the process that died, if one did."""
        if isinstance(cause, RayTaskError) and (producer := self._store.producer_of(cause)):
            text = f"the process that held tokens or texts for {call.role}.{call.method} died"
            return RoleError(*producer, call.method, text)
        refs = ray.wait([*earlier], num_returns=len(earlier), timeout=0)[1] if earlier else []  # others answered since
        unanswered = {ref: earlier[ref] for ref in refs}
        context = describe_context(call, cause, unanswered, self._submitted.names_in_background())
        return role_error(call, cause, describe_error(cause, place) + context)


def _call_of_dead_rank(
    cause: RayError, failed: RankCall, calls: Sequence[RankCall], pools: set[RestartablePool]
) -> RankCall:
    """Return a call of the process that died; `failed` if no process died, or none of the calls is its own.

    The call may differ from the one whose failure was noticed first, unless the error doesn't say which process died.
    """
    if not isinstance(cause, RayActorError):
        return failed
    dead = {(role, pool._pool.rank_of(cause.actor_id)) for pool in pools for role in pool._pool.roles}
    own = [call for call in calls if (call.role, call.rank) in dead]
    return next((call for call in own if not call.background), own[0] if own else failed)


def _pools_of_dead(cause: RayError, failed: RankCall, pools: set[RestartablePool]) -> set[RestartablePool]:
    """Return the pools whose process died, now or before a restart."""
    if isinstance(cause, OutOfMemoryError) and not isinstance(cause, RayTaskError):  # it names no process
        return {pool for pool in pools if failed.role in (*pool._pool.roles, f"pool {pool._pool.name}")}
    return {pool for pool in pools if isinstance(cause, RayActorError) and pool._pool.has_had(cause.actor_id)}


def _place_of_dead(cause: RayError, failed: RankCall, pools: set[RestartablePool]) -> RankPlace | None:
    """Return the process that died; None if none did, or it is none of these pools'."""
    death = cause.cause if isinstance(cause, RayTaskError) else cause
    if isinstance(death, RayActorError):
        found = (pool._pool.place_of_actor(death.actor_id) for pool in pools)
        return next((place for place in found if place is not None), None)
    # That of another process, which the call got data from, names none.
    return _place_of(failed, pools) if isinstance(cause, OutOfMemoryError) and death is cause else None


def _place_of(call: RankCall, pools: set[RestartablePool]) -> RankPlace | None:
    """Return the process that runs a call; None if it is not known yet."""
    own = [pool._pool for pool in pools if call.role in (*pool._pool.roles, f"pool {pool._pool.name}")]
    return own[0].place_of(call.rank) if own else None


def _hung(calls: Iterable[RankCall], pools: set[RestartablePool]) -> set[RestartablePool]:
    """Return the pools of calls that don't answer."""
    return {pool for pool in pools if any(call.role in pool._pool.roles for call in calls)}


def _end_stopped(late: Sequence[RankCall], pools: set[RestartablePool]) -> dict[RankCall, RankPlace]:
    """Kill the processes that are stopped, and return the late calls that they run, with these processes."""
    stopped: dict[RankCall, RankPlace] = {}
    for pool in pools:
        processes = pool._pool.processes
        ranks = [] if processes is None else processes.stopped()
        if processes is not None and ranks:
            own = [call for call in late if call.role in pool._pool.roles and call.rank in ranks]
            stopped |= {call: place for call in own if (place := pool._pool.place_of(call.rank)) is not None}
            processes.kill(ranks)
    return stopped


def _killed(
    pools: set[RestartablePool], lost: set[RestartablePool], error: RoleError, cause: RayError | None = None
) -> RoleError | LostRanksError:
    """Kill pools, and return the error to raise; nothing is killed if all pools that are lost can be started again.

    If another thread has killed one of them for a failure, the error is that failure.
    """
    for pool in lost:
        if failure := pool._failure.again():
            return failure
    error.__cause__ = cause
    if lost and all(pool.is_restartable for pool in lost):
        return LostRanksError(error, lost)
    error.hint = _RESUME if lost else error.hint
    for pool in pools:
        pool.kill(error)
    return error

"""The router: sends groups of requests to the engines of streaming rollout ranks, and again where an engine fails.

    driver                                   rank r (one engine)
    ------                                   -------------------
    groups ─► rank with the fewest tokens ─► advance(new groups): begin them, wait until some groups end
           ◄─ groups that ended ───────────  rows, and why a row failed

One call per rank is under way; it returns as soon as a group ends, and the next call brings new groups. Ranks never
wait for each other. A rank waits for a group that ends, for at most `call_s`; the driver waits for the first rank that
returns.

Invariants (tests/unit/recipes/driver/test_router.py):

1. every group is returned once, whole; all its rows come from one engine;
2. a rank has at most `capacity` rows in flight, or a single larger group;
3. a group goes to the rank whose requests in flight have the fewest tokens, prompts and longest responses together;
4. a group that fails is sent again, to another engine if there is one, at most `MOST_ATTEMPTS` times in all. An engine
   that failed gets no more groups, of this generation or another, until it is replaced: before the next generation
   begins, if that is possible then, or if no other is left. If the ranks are started again, all groups in flight have
   failed, and all engines are without weights;
5. while weights are published, no call is under way (`rlpack.recipes.driver.engine_access`);
6. a rank that does not answer a call by its deadline is named then, whatever the others do.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.columns import lengths_of
from rlpack.distributed.calls import Pending
from rlpack.distributed.errors import RanksRestartedError, RoleError
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.rollout.types import SamplingParams
from rlpack.workers.rollout import RolloutWorker

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 3
# How much longer than its own longest wait a call may take: it begins requests, waits for the calls of other
# generations, and turns tokens into text. A rank that takes longer hangs.
_SLACK_S = 30.0
# Longest wait of the driver between two looks at the calls.
_WAIT_S = 10.0


class _CallUnderWay(NamedTuple):
    """A call of a rank.

    Attributes:
        pending: its result.
        deadline: `time.monotonic()` by which the rank has answered unless it hangs.
    """

    pending: Pending[BatchedDataDict]
    deadline: float


class Router:
    """Generates one batch."""

    def __init__(
        self,
        group: WorkerGroup[RolloutWorker],
        params: SamplingParams,
        *,
        capacity: int,
        access: EngineAccess,
        replace_engines: Callable[[int, bool], bool],
        call_s: float = 1.0,
    ) -> None:
        """Take the engines.

        Args:
            group: the rollout role.
            params: how tokens are sampled.
            capacity: rows that an engine runs at once.
            access: turns of generations and publications.
            replace_engines: starts new engines for those that failed, with the same weights; called with the number of
                the generation, and whether no engine is left. It returns False if only a publication can do that; if
                none is left, that is then waited for.
            call_s: longest wait of a call for a group that ends, in seconds: how late a rank with work gets the groups
                of a failed one, and how long a publication waits.

        Attributes:
            repeated: how many rows were sent again.
        """
        self.repeated = 0
        self._group, self._params, self._capacity = group, params, capacity
        self._access, self._replace_engines, self._call_s = access, replace_engines, call_s
        self._num_starts = group.ranks.num_starts

    def run(self, prompts: BatchedDataDict) -> Iterator[BatchedDataDict]:
        """Yield whole groups as they end, with the ids of their rows in `prompts`.

        Args:
            prompts: `input_ids`, `seeds`, `group_ids` (rows of a group are adjacent) and `uid`.

        Raises:
            RoleError: a rank raised, died or missed its deadline, or a group failed `MOST_ATTEMPTS` times.
        """
        self._prompts = prompts
        ids = prompts["group_ids"].numpy()
        starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1)) if ids.size else np.zeros(0, dtype=np.int64)
        self._rows = dict(enumerate(np.split(np.arange(ids.size), starts[1:]))) if ids.size else {}
        lengths = lengths_of(prompts["input_ids"])
        assert lengths is not None, "prompts are rows of tokens"
        self._tokens = lengths.numpy() + self._params.max_new_tokens
        self._group_of = np.repeat(np.arange(len(self._rows)), [rows.size for rows in self._rows.values()])
        self._place_of = {row_id: place for place, row_id in enumerate(prompts.row_ids.tolist())}
        self._attempts: Counter[int] = Counter()
        self._waiting = deque(self._rows)
        self._access.load.queue(self._num_waiting())
        self._in_flight: dict[int, set[int]] = {rank: set() for rank in range(self._group.num_ranks)}
        for rank in self._in_flight:
            self._access.load.add(rank, 0)
        try:
            with self._access.generation() as self._generation:
                yield from self._run()
        finally:  # rows are left if a rank failed, or nobody asks for the others
            for rank in self._in_flight:
                self._access.load.add(rank, -self._num_rows(rank))
            self._access.load.queue(-self._num_waiting())

    def _run(self) -> Iterator[BatchedDataDict]:
        """Yield whole groups as they end."""
        calls: dict[int, _CallUnderWay] = {}
        self._access.record_starts(self._num_starts, self._group.num_ranks)
        if self._access.failed and self._healthy:
            self._replace_engines(self._generation, False)
        while self._waiting or any(self._in_flight.values()):
            if self._access.is_wanted and not calls:
                self._access.wait_for_turn(self._generation)
            if self._num_starts != self._group.ranks.num_starts:
                self._lose_all(calls)
            if not self._healthy and not calls:
                self._get_engines()
            if not self._access.is_wanted:
                self._send(calls)
            for rank in self._answered(calls) if calls else []:
                try:
                    ended = calls.pop(rank).pending.result()
                except RanksRestartedError:
                    break  # the other calls are lost, too
                yield from self._accept(rank, ended)

    def _answered(self, calls: dict[int, _CallUnderWay]) -> list[int]:
        """Wait for calls, and return the ranks that have answered, or hang."""
        ranks, nearest = list(calls), min(call.deadline for call in calls.values())
        timeout_s = max(0.0, min(_WAIT_S, nearest - time.monotonic()))
        places = self._group.ranks.wait_any([call.pending for call in calls.values()], timeout_s)
        now = time.monotonic()
        hanging = [rank for rank, call in calls.items() if call.deadline <= now]
        return list(dict.fromkeys([*(ranks[place] for place in places), *hanging]))

    @property
    def _healthy(self) -> set[int]:
        """Return the ranks whose engines can answer."""
        return self._in_flight.keys() - self._access.failed

    def _lose_all(self, calls: dict[int, _CallUnderWay]) -> None:
        """Queue all groups in flight again: the ranks were started again, and none of their engines has weights.

        Raises:
            RoleError: a group failed too often.
        """
        self._num_starts = self._group.ranks.num_starts
        self._access.record_starts(self._num_starts, self._group.num_ranks)
        calls.clear()
        for rank, groups in self._in_flight.items():
            self._access.load.add(rank, -self._num_rows(rank))
            lost, self._in_flight[rank] = sorted(groups), set()
            if lost:
                self._repeat(rank, lost, "its process was started again")

    def _get_engines(self) -> None:
        """Get new engines in place of all that failed; no call is under way."""
        if not self._replace_engines(self._generation, True):
            self._access.wait_for_engines(self._generation)

    def _send(self, calls: dict[int, _CallUnderWay]) -> None:
        """Add calls to all ranks that have none and have something to do."""
        outboxes = self._assign(free=self._healthy - calls.keys())
        for rank in self._in_flight:
            if rank not in calls and (outboxes[rank] or self._in_flight[rank]):
                try:
                    calls[rank] = self._advance(rank, outboxes[rank])
                except RanksRestartedError:
                    return  # the other calls are lost, too

    def _assign(self, free: set[int]) -> dict[int, list[int]]:
        """Assign waiting groups to ranks that have no call under way, and return the groups of each rank."""
        outboxes: dict[int, list[int]] = {rank: [] for rank in self._in_flight}
        while self._waiting:
            group = self._waiting[0]
            size = self._rows[group].size
            open_ranks = [
                rank for rank in free if not self._in_flight[rank] or self._num_rows(rank) + size <= self._capacity
            ]
            if not open_ranks:
                break
            rank = min(open_ranks, key=lambda rank: (self._num_tokens(rank), rank))
            self._waiting.popleft()
            self._access.load.queue(-size)
            self._in_flight[rank].add(group)
            self._access.load.add(rank, size)
            outboxes[rank].append(group)
        return outboxes

    def _advance(self, rank: int, groups: list[int]) -> _CallUnderWay:
        """Start a call that brings groups to a rank and returns those that end."""
        places = [self._rows[group] for group in groups]
        rows = self._prompts.select(np.concatenate(places) if places else np.zeros(0, dtype=np.int64))
        turn = (self._generation, self._access.oldest, self._call_s)
        method = RolloutWorker.advance
        answer_s = self._call_s + _SLACK_S
        deadline = time.monotonic() + answer_s
        pending = self._group.submit_to(
            *(rank, method, rows, self._params, *turn), of_start=self._num_starts, answer_s=answer_s
        )
        return _CallUnderWay(pending, deadline)

    def _accept(self, rank: int, ended: BatchedDataDict) -> Iterator[BatchedDataDict]:
        """Yield the groups that a rank answered, and queue those that failed."""
        places = np.array([self._place_of[row_id] for row_id in ended.row_ids.tolist()], dtype=np.int64)
        self._in_flight[rank] -= set(self._group_of[places].tolist())
        self._access.load.add(rank, -ended.num_rows)
        has_failed = np.array([bool(failure) for failure in ended["engine_failure"]], dtype=bool)
        if has_failed.any():
            failure = next(filter(None, ended["engine_failure"]))
            self._access.record_failure(rank)
            self._repeat(rank, np.unique(self._group_of[places[has_failed]]).tolist(), failure)
        if not has_failed.all():
            yield ended.select(np.flatnonzero(~has_failed)).drop(["engine_failure"])

    def _repeat(self, rank: int, groups: list[int], failure: str) -> None:
        """Queue groups that failed on a rank, before all others.

        Raises:
            RoleError: one of them failed too often.
        """
        rows = sum(self._rows[group].size for group in groups)
        self.repeated += rows
        for group in reversed(groups):
            self._attempts[group] += 1
            if self._attempts[group] == MOST_ATTEMPTS:
                uid = self._prompts["uid"][self._rows[group][0]]
                text = f"prompt {uid} failed {MOST_ATTEMPTS} times on its engines, the last time with: {failure}"
                raise RoleError(self._group.role, rank, RolloutWorker.advance.__name__, text)
            self._waiting.appendleft(group)
            self._access.load.queue(self._rows[group].size)
        logger.warning(
            "the engine of role %s, rank %d, failed: %s; %d rows are generated again from the same seeds",
            *(self._group.role, rank, failure, rows),
        )

    def _num_waiting(self) -> int:
        return sum(self._rows[group].size for group in self._waiting)

    def _num_rows(self, rank: int) -> int:
        return sum(self._rows[group].size for group in self._in_flight[rank])

    def _num_tokens(self, rank: int) -> int:
        return sum(int(self._tokens[self._rows[group]].sum()) for group in self._in_flight[rank])

"""The router: sends groups of requests to the engines of streaming rollout ranks, and again where rows fail.

    driver                                   rank r (one engine)
    ------                                   -------------------
    groups ─► rank with the fewest tokens ─► advance(new rows): begin them, wait until some end
           ◄─ rows that ended ─────────────  rows, and why a row failed

One call per rank is under way; it returns as soon as a group ends or there is room for waiting rows, and the next call
brings new ones. Ranks never wait for each other. A rank waits for rows that end, for at most `call_s`; the driver waits
for the first rank that returns.

Invariants (tests/unit/recipes/driver/test_router.py):

1. every group is returned once, whole. It is sent to one engine, so that its prompt is computed once;
2. a rank gets another group as soon as it has fewer than `capacity` rows in flight, so at most `capacity` - 1 rows and
   that group; the engine itself queues those that it has no room for. A row that ended makes room at once;
3. a group goes to the rank whose requests in flight have the fewest tokens, prompts and longest responses together.
   Routers that run at the same time share the ranks, those of earlier steps first
   (`rlpack.recipes.driver.engine_slots`);
4. a row that fails is sent again from its seed, at most `MOST_REPEATS` times, and counted. A row fails if its response
   can't be used. It then goes to another engine if there is one, such as its engine's successor; while that engine has
   no room, later groups of this generation go to others. A row also fails if its engine does. A failed engine gets no
   more rows, from this generation or another, until it is replaced: before the next generation begins, if that is
   possible then, or once no engine is left and those that still answer have completed their other rows. An engine that
   was replaced has lost its rows in flight. If the ranks are started again, all rows in flight have failed, and all
   engines are without weights;
5. while weights are published, no call is under way (`rlpack.recipes.driver.engine_access`);
6. a rank that does not answer a call by its deadline is named then, whatever the others do.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.columns import lengths_of
from rlpack.counted import counted
from rlpack.distributed.calls import Pending
from rlpack.distributed.errors import RanksRestartedError, RowError, RowFailure
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.recipes.driver.engine_access import EngineAccess, EngineId
from rlpack.recipes.driver.engine_slots import Turn
from rlpack.rollout.types import SamplingParams
from rlpack.workers.rollout import FAILURE_COLUMNS, RolloutWorker

logger = logging.getLogger(__name__)

MOST_REPEATS = 3
# How much longer than its own longest wait a call may take: it begins requests, waits for the calls of other
# generations, and turns tokens into text. A rank that takes longer hangs.
_SLACK_S = 30.0
# Longest wait of the driver between two looks at the calls.
_WAIT_S = 10.0
# Answered rows that are kept together; a group that becomes complete is selected from all parts with rows of it.
_PART_ROWS = 32


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
        turn: Turn = (0, 0),
        call_s: float = 1.0,
    ) -> None:
        """Prepare to generate on the engines of `group`.

        Args:
            group: the rollout role.
            params: how tokens are sampled.
            capacity: rows that an engine runs at once.
            access: turns of generations and publications, the engines that failed, and what all routers have in flight.
            replace_engines: starts new engines for those that failed, with the same weights; called with the number of
                the generation, and whether no engine is left. It returns False if only a publication can do that; if
                none is left, that is then waited for.
            turn: which of the routers that run at the same time gets room first.
            call_s: longest wait of a call for rows that end, in seconds: how late a rank with work gets the rows of a
                failed one, and how long a publication waits.

        Attributes:
            repeated: how many rows were sent again.
        """
        self.repeated = 0
        self._group, self._params, self._capacity = group, params, capacity
        self._access, self._replace_engines, self._turn, self._call_s = access, replace_engines, turn, call_s
        self._num_starts = 0

    def run(self, prompts: BatchedDataDict) -> Generator[BatchedDataDict]:
        """Yield whole groups as they end, with the ids of their rows in `prompts`.

        Args:
            prompts: `input_ids`, `seeds`, `group_ids` (rows of a group are adjacent) and `uid`.

        Raises:
            RoleError: a rank raised, died or missed its deadline.
            RowError: a row failed after `MOST_REPEATS` repetitions.
        """
        self._prompts, self._no_rows = prompts, prompts.select([])
        ids = prompts["group_ids"].numpy()
        self._group_of = np.cumsum(np.diff(ids, prepend=ids[:1]) != 0)
        self._left = np.bincount(self._group_of)  # rows that have not ended, by group
        lengths = lengths_of(prompts["input_ids"])
        assert lengths is not None, "prompts are rows of tokens"
        self._tokens: list[int] = (lengths + self._params.max_new_tokens).tolist()
        self._place_of = {row_id: place for place, row_id in enumerate(prompts.row_ids.tolist())}
        self._failures: Counter[int] = Counter()
        self._avoided: dict[int, set[EngineId]] = {}  # the engines whose response to a row could not be used
        self._engine_of: dict[int, EngineId] = {}  # the engine that each row is in flight on
        # Rows of one group each: all of them, or those that failed together.
        firsts = np.cumsum(self._left)[:-1]
        self._waiting = deque(rows.tolist() for rows in np.split(np.arange(ids.size), firsts) if rows.size)
        self._parts: dict[int, list[BatchedDataDict]] = {}  # answers with rows of a group that has not ended, by group
        self._in_flight: dict[int, set[int]] = {rank: set() for rank in range(self._group.num_ranks)}
        share = self._access.slots.share(self._turn, ids.size, self._in_flight, self._capacity)
        with share as self._share, self._access.generation() as self._generation:
            yield from self._run()

    def _run(self) -> Iterator[BatchedDataDict]:
        """Yield whole groups as they end."""
        calls: dict[int, _CallUnderWay] = {}
        self._num_starts = self._group.ranks.num_starts  # ranks may have been started again during the wait for a turn
        self._access.record_starts(self._num_starts, self._group.num_ranks)
        if self._access.failed and self._healthy:
            self._replace_engines(self._generation, False)
        while self._waiting or any(self._in_flight.values()):
            if self._access.is_wanted and not calls:
                self._access.wait_for_turn(self._generation)
            if self._num_starts != self._group.ranks.num_starts:
                self._lose_all(calls)
            # An engine with a late response finishes its other rows before it is replaced.
            if not self._healthy and not calls and not any(self._in_flight.values()):
                self._get_engines()
            if not self._access.is_wanted:
                self._send(calls)
            if not calls and not self._access.is_wanted:  # other generations have the room, or it is their turn
                self._share.wait(self._call_s)
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
        """Queue all rows in flight again: the ranks were started again, and none of their engines has weights.

        Raises:
            RowError: a row failed too often.
        """
        self._num_starts = self._group.ranks.num_starts
        self._access.record_starts(self._num_starts, self._group.num_ranks)
        calls.clear()
        for rank, rows in self._in_flight.items():
            lost = sorted(rows)
            self._remove(rank, lost)
            self._repeat(rank, dict.fromkeys(lost, "its process was started again"), {})

    def _get_engines(self) -> None:
        """Get new engines in place of all that failed; no call is under way."""
        if not self._replace_engines(self._generation, True):
            self._access.wait_for_engines(self._generation)
        if not any(self._in_flight.values()):  # a restart meanwhile has lost no rows
            self._num_starts = self._access.num_starts

    def _send(self, calls: dict[int, _CallUnderWay]) -> None:
        """Add calls to all ranks that have none and have something to do."""
        outboxes = self._assign(free=self._healthy - calls.keys())
        try:
            for rank in self._in_flight:
                if rank not in calls and (outboxes[rank] or self._in_flight[rank]):
                    calls[rank] = self._advance(rank, [row for rows in outboxes[rank] for row in rows])
                    outboxes[rank].clear()
        except RanksRestartedError:  # the other calls are lost, too
            for rank, groups in outboxes.items():
                self._take_back(rank, groups)
        finally:
            self._share.sent()

    def _take_back(self, rank: int, groups: list[list[int]]) -> None:
        """Queue groups that were assigned to a rank and not sent."""
        for rows in reversed(groups):
            self._remove(rank, rows)
            self._queue(rows)

    def _queue(self, rows: list[int]) -> None:
        """Queue rows of one group before all others."""
        self._waiting.appendleft(rows)
        self._share.queue(len(rows))

    def _assign(self, free: set[int]) -> dict[int, list[list[int]]]:
        """Assign waiting groups to ranks that have no call under way, and return the groups of each rank."""
        outboxes: dict[int, list[list[int]]] = {rank: [] for rank in self._in_flight}
        engines = {self._access.engine_of(rank): rank for rank in self._healthy}
        kept = deque[list[int]]()  # groups that wait for an engine other than those with room
        while self._waiting:
            rows = self._waiting[0]
            avoided = set[EngineId]().union(*(self._avoided.get(row, ()) for row in rows))
            ranks = {engines[engine] for engine in engines.keys() - avoided or engines}
            rank = self._share.take(free & ranks, len(rows), self._num_tokens(rows))
            if rank is None and not avoided:
                break
            self._waiting.popleft()
            if rank is None:
                kept.append(rows)
                continue
            self._in_flight[rank].update(rows)
            self._engine_of |= dict.fromkeys(rows, self._access.engine_of(rank))
            outboxes[rank].append(rows)
        self._waiting.extendleft(reversed(kept))
        return outboxes

    def _remove(self, rank: int, rows: list[int]) -> None:
        """Record that rows are no longer in flight on a rank."""
        self._in_flight[rank].difference_update(rows)
        self._share.release(rank, len(rows), self._num_tokens(rows))

    def _advance(self, rank: int, rows: list[int]) -> _CallUnderWay:
        """Start a call that brings rows to a rank and returns those that end."""
        given = self._prompts.select(np.array(rows, dtype=np.int64)) if rows else self._no_rows
        given_too = (self._generation, self._access.oldest, self._call_s, self._share.rows_to_room(rank))
        method, answer_s = RolloutWorker.advance, self._call_s + _SLACK_S
        deadline = time.monotonic() + answer_s
        pending = self._group.submit_to(
            *(rank, method, given, self._params, *given_too), of_start=self._num_starts, answer_s=answer_s
        )
        return _CallUnderWay(pending, deadline)

    def _accept(self, rank: int, ended: BatchedDataDict) -> Iterator[BatchedDataDict]:
        """Take the rows that a rank returned: queue those that failed again, and yield the groups that are complete."""
        if not ended.num_rows:
            return
        rows = self._places(ended)
        self._remove(rank, rows.tolist())
        failures: list[str] = ended["engine_failure"]
        failed = {row: failure for row, failure in zip(rows.tolist(), failures, strict=True) if failure}
        if ended["engine_has_failed"].any():
            self._access.record_failure(rank)
        else:
            for row in failed:
                self._avoided.setdefault(row, set()).add(self._engine_of[row])
        self._repeat(rank, failed, dict(zip(rows.tolist(), ended["engine_version"].tolist(), strict=True)))
        answered = np.array([not failure for failure in failures], dtype=bool)
        if answered.any():
            np.subtract.at(self._left, self._group_of[rows[answered]], 1)
            answers = ended.select(np.flatnonzero(answered)).drop(list(FAILURE_COLUMNS))
            yield from self._complete(answers)

    def _complete(self, answers: BatchedDataDict) -> Iterator[BatchedDataDict]:
        """Yield the groups that are complete with these rows, in the order of the prompts, and keep the others.

        Rows are joined only once their group is complete, and come in small parts: the work per row doesn't grow with
        the number of rows that are kept.
        """
        group_of = self._group_of[self._places(answers)]
        for places in np.split(np.arange(answers.num_rows), range(_PART_ROWS, answers.num_rows, _PART_ROWS)):
            part = answers.select(places)
            for group in np.unique(group_of[places]).tolist():
                self._parts.setdefault(group, []).append(part)
        complete = [group for group in np.unique(group_of).tolist() if not self._left[group]]
        if not complete:
            return
        parts = {id(part): part for group in complete for part in self._parts.pop(group)}
        joined = BatchedDataDict.concat(list(parts.values()))
        rows = self._places(joined)
        order = np.argsort(rows)
        yield joined.select(order[np.isin(self._group_of[rows[order]], complete)])

    def _repeat(self, rank: int, failures: dict[int, str], versions: Mapping[int, int]) -> None:
        """Queue rows that failed on a rank before all others.

        Args:
            rank: the rank.
            failures: the rows, and the reasons.
            versions: policy version of the engine when each row failed; none if its process was started again.

        Raises:
            RowError: one of them failed too often.
        """
        self.repeated += len(failures)
        by_group: dict[int, list[int]] = {}
        for row, failure in failures.items():
            self._failures[row] += 1
            if self._failures[row] > MOST_REPEATS:
                last = RowFailure(*self._ids(row), self._failures[row], failure, versions.get(row))
                raise RowError(self._group.role, rank, RolloutWorker.advance.__name__, last)
            by_group.setdefault(int(self._group_of[row]), []).append(row)
        for rows in reversed(by_group.values()):
            self._queue(rows)
        for row, failure in list(failures.items())[:1]:
            logger.warning(
                "role %s, rank %d: generating %s again from %s, the first one row %d of prompt %s: %s",
                *(self._group.role, rank, counted(len(failures), "row")),
                *("its seed" if len(failures) == 1 else "their seeds", *self._ids(row), failure),
            )

    def _ids(self, row: int) -> tuple[int, str]:
        """Return the ids of a row and of its prompt."""
        return int(self._prompts.row_ids[row]), self._prompts["uid"][row]

    def _places(self, rows: BatchedDataDict) -> np.ndarray:
        """Return the places of rows among the prompts, int64 [B]."""
        return np.array([self._place_of[row_id] for row_id in rows.row_ids.tolist()], dtype=np.int64)

    def _num_tokens(self, rows: list[int]) -> int:
        return sum(self._tokens[row] for row in rows)

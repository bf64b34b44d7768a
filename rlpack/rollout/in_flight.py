"""Track the rows in flight in a streaming engine, and decide when ended rows are returned to the driver.

Invariants (tests/unit/rollout/test_in_flight.py):

1. every started row is returned once, answered or failed, unless its generation was abandoned; no row is restarted
   here, so that the driver counts all retries;
2. rows that ended are returned as soon as the last one of a group has, one has failed, or `enough` of them have;
3. generations may run concurrently; each gets only its own rows, and abandoning one doesn't affect the others. A call
   that waits for one generation returns early when rows of another are ready to be returned. It does so only once per
   answer of the engine to that other generation, so that calls don't keep returning nothing until the other generation
   asks.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.rollout.engine import FinishedRow, StreamingEngine
from rlpack.rollout.types import SamplingParams

# Rows that end within this many seconds after rows that are ready to be returned are returned with them.
_COALESCE_S = 0.02


class EndedRows(NamedTuple):
    """Rows that ended.

    Attributes:
        rows: `input_ids` (the prompts), `group_ids` and `uid`, with the ids that they were started with.
        params: how their tokens were sampled.
        responses: what the engine returned for each row; None if it failed.
        failures: why a row has no response; "" if it has one.
        has_engine_failed: whether each row failed in the current engine, rather than in one that was replaced.
        versions: policy version of the engine when each row ended.
    """

    rows: BatchedDataDict
    params: SamplingParams
    responses: list[Any]
    failures: list[str]
    has_engine_failed: list[bool]
    versions: list[int]


@dataclass(eq=False)
class _Begun:
    """Rows that were started by one call.

    Attributes:
        generation: its number.
        rows: `input_ids`, `group_ids` and `uid`.
        params: how tokens are sampled.
        left: how many rows of each group run, by its id.
    """

    generation: int
    rows: BatchedDataDict
    params: SamplingParams
    left: Counter[int]


class _Row(NamedTuple):
    """A row: its place among those that were started with it, and its group."""

    begun: _Begun
    place: int
    group: int


class _Ended(NamedTuple):
    """A row that ended, its answer, whether the current engine failed it, and the engine's policy version then."""

    row: _Row
    answer: FinishedRow
    has_engine_failed: bool
    version: int

    @property
    def is_last_of_group(self) -> bool:
        return not self.row.begun.left[self.row.group]


class RowsInFlight:
    """The rows in flight in one engine."""

    def __init__(self, engine: StreamingEngine) -> None:
        """Start without any row."""
        self._engine = engine
        self._next_key = 0
        self._running: dict[int, _Row] = {}
        self._ended: list[_Ended] = []
        self._enough: dict[int, int] = {}

    def begin(self, rows: BatchedDataDict, params: SamplingParams, generation: int) -> None:
        """Start rows.

        Args:
            rows: `input_ids`, `seeds`, `group_ids` and `uid`.
            params: how tokens are sampled.
            generation: number of the generation.
        """
        if rows.num_rows == 0:
            return
        # Copies: the rows outlive this call, but the memory of their tokens does not.
        prompts: Ragged = rows["input_ids"]
        own = Ragged(prompts.values.clone(), prompts.lengths.clone())
        columns = {"input_ids": own, "group_ids": rows["group_ids"].clone(), "uid": list(rows["uid"])}
        groups: list[int] = rows["group_ids"].tolist()
        begun = _Begun(generation, BatchedDataDict(columns, row_ids=rows.row_ids.copy()), params, Counter(groups))
        keys = range(self._next_key, self._next_key + len(groups))
        self._engine.begin(keys, own, params, rows["seeds"].numpy())
        self._next_key = keys.stop
        self._running |= {key: _Row(begun, place, groups[place]) for place, key in enumerate(keys)}

    def abandon(self, oldest: int) -> None:
        """Abort the rows of generations before `oldest`, whose results are no longer needed."""
        keys = [key for key, row in self._running.items() if row.begun.generation < oldest]
        if keys:
            self._engine.abort(keys)
        for key in keys:
            del self._running[key]
        self._ended = [ended for ended in self._ended if ended.row.begun.generation >= oldest]
        self._enough = {number: enough for number, enough in self._enough.items() if number >= oldest}

    def move_to(self, engine: StreamingEngine) -> None:
        """Switch to another engine; rows in flight count as failed, and the driver restarts them."""
        version, self._engine = self._engine.policy_version, engine
        lost = "the engine that had it in flight was replaced"
        self._ended = [ended._replace(has_engine_failed=False) for ended in self._ended]
        for key, row in self._running.items():
            row.begun.left[row.group] -= 1
            self._ended.append(_Ended(row, FinishedRow(key, None, lost), has_engine_failed=False, version=version))
        self._running.clear()

    def ended(self, generation: int, timeout_s: float, enough: int = 0) -> EndedRows:
        """Return a generation's ended rows, once a group is complete, a row has failed, or `enough` have ended.

        Args:
            generation: its number.
            timeout_s: time in seconds after which all ended rows are returned, possibly none.
            enough: number of ended rows that are returned even if they complete no group; 0 for no such number.
        """
        deadline, self._enough[generation] = time.monotonic() + timeout_s, enough
        others = set[int]()
        while self._is_running(generation) and not self._is_worth_it(generation):
            if (left := deadline - time.monotonic()) <= 0 or any(map(self._is_worth_it, others)):
                break
            others = self._record(self._engine.finished(left)) - {generation}
        if self._is_running(generation) and self._is_worth_it(generation):
            time.sleep(_COALESCE_S)
            self._record(self._engine.finished(0.0))
        own = [ended for ended in self._ended if ended.row.begun.generation == generation]
        self._ended = [ended for ended in self._ended if ended.row.begun.generation != generation]
        return _columns(own)

    def _is_running(self, generation: int) -> bool:
        return any(row.begun.generation == generation for row in self._running.values())

    def _is_worth_it(self, generation: int) -> bool:
        enough = self._enough.get(generation, 0)
        own = [ended for ended in self._ended if ended.row.begun.generation == generation]
        return 0 < enough <= len(own) or any(ended.answer.failure or ended.is_last_of_group for ended in own)

    def _record(self, answers: Sequence[FinishedRow]) -> set[int]:
        """Record the answers to running rows, ignoring abandoned ones; return their generations."""
        generations = set[int]()
        for answer in answers:
            if answer.key in self._running:
                row = self._running.pop(answer.key)
                row.begun.left[row.group] -= 1
                version = self._engine.policy_version if answer.policy_version is None else answer.policy_version
                self._ended.append(_Ended(row, answer, has_engine_failed=bool(answer.failure), version=version))
                generations.add(row.begun.generation)
        return generations


def _columns(ended: Sequence[_Ended]) -> EndedRows:
    """Return rows of one generation as columns."""
    order = sorted(ended, key=lambda one: one.answer.key)  # rows that were started together are adjacent
    places: dict[_Begun, list[int]] = {}
    for one in order:
        places.setdefault(one.row.begun, []).append(one.row.place)
    parts = [begun.rows.select(rows) for begun, rows in places.items()]
    return EndedRows(
        BatchedDataDict.concat(parts) if parts else _no_rows(),
        order[0].row.begun.params if order else SamplingParams(),
        [one.answer.response for one in order],
        [one.answer.failure for one in order],
        [one.has_engine_failed for one in order],
        [one.version for one in order],
    )


def _no_rows() -> BatchedDataDict:
    columns = {"input_ids": Ragged.from_rows([], torch.int64), "group_ids": torch.zeros(0, dtype=torch.int64)}
    return BatchedDataDict(columns | {"uid": []}, row_ids=[])

"""The groups that a streaming engine is answering: a group is returned once all its rows are answered.

Invariants (tests/unit/rollout/test_in_flight.py):

1. every row that was begun is returned once, with its group, answered or failed, unless its generation was abandoned;
2. a group of which a row failed has failed as a whole;
3. generations may run at the same time; each is returned its own groups.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.rollout.engine import FinishedRow, StreamingEngine
from rlpack.rollout.types import FinishReason, Generations, SamplingParams

# Groups that end within this time after a first one, in seconds, are returned with it.
_COALESCE_S = 0.02


class EndedGroups(NamedTuple):
    """Groups that ended.

    Attributes:
        rows: `input_ids` (the prompts), `group_ids` and `uid`, with the ids that they were begun with.
        generations: their responses; those of failed rows are empty.
        failures: why a row has no response; "" if it has one.
    """

    rows: BatchedDataDict
    generations: Generations
    failures: list[str]


@dataclass
class _Group:
    """The rows of one prompt, and the answers to them so far.

    Attributes:
        generation: its number.
        rows: `input_ids`, `group_ids`, `uid` and `seeds`.
        params: how tokens are sampled.
        keys: names of the rows in the engine, in their order.
        answers: of the engine, by key.
    """

    generation: int
    rows: BatchedDataDict
    params: SamplingParams
    keys: list[int] = field(default_factory=list)
    answers: dict[int, FinishedRow] = field(default_factory=dict)

    @property
    def failure(self) -> str:
        """Return why a row failed, or ""."""
        return next((answer.failure for answer in self.answers.values() if answer.failure), "")

    @property
    def has_ended(self) -> bool:
        """Return whether all rows are answered, or one has failed."""
        return len(self.answers) == self.rows.num_rows or bool(self.failure)


class GroupsInFlight:
    """What one engine is answering."""

    def __init__(self, engine: StreamingEngine) -> None:
        """Start without any group."""
        self._engine = engine
        self._next_key = 0
        self._groups: dict[int, _Group] = {}  # by the key of each of their rows
        self._ended: list[_Group] = []
        self._lost: list[_Group] = []

    def begin(self, rows: BatchedDataDict, params: SamplingParams, generation: int) -> None:
        """Start the rows of whole groups.

        Args:
            rows: `input_ids`, `seeds`, `group_ids` and `uid`.
            params: how tokens are sampled.
            generation: number of the generation.
        """
        if rows.num_rows == 0:
            return
        # Copies: rows end later than this call, which ends the tokens' memory.
        prompts: Ragged = rows["input_ids"]
        columns = {
            "input_ids": Ragged(prompts.values.clone(), prompts.lengths.clone()),
            "group_ids": rows["group_ids"].clone(),
            "seeds": rows["seeds"].clone(),
            "uid": list(rows["uid"]),
        }
        own = BatchedDataDict(columns, row_ids=rows.row_ids.copy())
        ids = own["group_ids"]
        self._start([_Group(generation, own.select((ids == group).nonzero()[:, 0]), params) for group in ids.unique()])

    def abandon(self, oldest: int) -> None:
        """Forget the groups of generations before `oldest`, whose results nobody waits for."""
        kept = {id(group): group for group in self._groups.values() if group.generation >= oldest}
        if len(kept) < len({id(group) for group in self._groups.values()}):
            self._engine.abort()  # all rows; those of other generations begin again from their seeds
            self._groups.clear()
            self._start(list(kept.values()))
        self._ended = [group for group in self._ended if group.generation >= oldest]
        self._lost = [group for group in self._lost if group.generation >= oldest]

    def move_to(self, engine: StreamingEngine) -> None:
        """Use another engine, which gets the groups in flight from their seeds as soon as they are asked for."""
        self._engine = engine
        failed = [group for group in self._ended if group.failure]
        self._lost += [*{id(group): group for group in self._groups.values()}.values(), *failed]
        self._ended = [group for group in self._ended if not group.failure]
        self._groups.clear()

    def ended(self, generation: int, timeout_s: float) -> EndedGroups:
        """Return the groups of a generation that ended since its last call, as soon as there are some.

        Args:
            generation: its number.
            timeout_s: after this time, in seconds, there may be none.
        """
        lost, self._lost = self._lost, []
        self._start(lost)
        deadline = time.monotonic() + timeout_s
        while self._is_running(generation) and not self._has_ended(generation):
            if (left := deadline - time.monotonic()) <= 0:
                break
            self._record(self._engine.finished(left))
        if self._has_ended(generation) and self._is_running(generation):
            time.sleep(_COALESCE_S)
            self._record(self._engine.finished(0.0))
        own = [group for group in self._ended if group.generation == generation]
        self._ended = [group for group in self._ended if group.generation != generation]
        return self._collect(own)

    def _is_running(self, generation: int) -> bool:
        return any(group.generation == generation for group in self._groups.values())

    def _has_ended(self, generation: int) -> bool:
        return any(group.generation == generation for group in self._ended)

    def _start(self, groups: Sequence[_Group]) -> None:
        """Begin all rows of groups, by one call of the engine for each kind of sampling."""
        for params in dict.fromkeys(group.params for group in groups):
            alike = [group for group in groups if group.params == params]
            for group in alike:
                group.answers.clear()
                group.keys = list(range(self._next_key, self._next_key + group.rows.num_rows))
                self._next_key += group.rows.num_rows
                self._groups |= dict.fromkeys(group.keys, group)
            rows = BatchedDataDict.concat([group.rows for group in alike])
            keys = [key for group in alike for key in group.keys]
            self._engine.begin(keys, rows["input_ids"], params, rows["seeds"].numpy())

    def _record(self, answers: Sequence[FinishedRow]) -> None:
        """Add answers to their groups."""
        for answer in answers:
            group = self._groups.get(answer.key)
            if group is None:  # of a group that failed already
                continue
            group.answers[answer.key] = answer
            if group.has_ended:
                self._ended.append(group)
                for key in group.keys:
                    del self._groups[key]

    def _collect(self, groups: Sequence[_Group]) -> EndedGroups:
        """Return groups of one generation as columns."""
        done = [group for group in groups if not group.failure]
        failed = [group for group in groups if group.failure]
        responses: list[Any] = [group.answers[key].response for group in done for key in group.keys]
        answered = self._engine.to_generations(responses, done[0].params if done else SamplingParams())
        failures = [group.failure for group in failed for _ in range(group.rows.num_rows)]
        rows = [group.rows.drop(["seeds"]) for group in (*done, *failed)]
        return EndedGroups(
            BatchedDataDict.concat(rows) if rows else _no_rows(),
            _with_empty(answered, len(failures)),
            [""] * len(responses) + failures,
        )


def _no_rows() -> BatchedDataDict:
    columns = {"input_ids": Ragged.from_rows([], torch.int64), "group_ids": torch.zeros(0, dtype=torch.int64)}
    return BatchedDataDict(columns | {"uid": []}, row_ids=[])


def _with_empty(generations: Generations, count: int) -> Generations:
    """Return generations with `count` empty rows after them."""
    if count == 0:
        return generations

    def padded(column: Ragged) -> Ragged:
        return Ragged(column.values, torch.cat([column.lengths, torch.zeros(count, dtype=column.lengths.dtype)]))

    reasons: list[FinishReason] = [*generations.finish_reasons, *repeat("length", count)]
    return Generations(
        padded(generations.token_ids), padded(generations.logprobs), padded(generations.policy_versions), reasons
    )

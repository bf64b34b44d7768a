"""The groups that a streaming engine is answering: a group is returned once all its rows are answered.

Invariants (tests/unit/rollout/test_in_flight.py):

1. every row that was begun is returned once, with its group, answered or failed, unless its generation was aborted;
2. a group of which a row failed has failed as a whole.
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
    """The rows of one prompt, and the answers to them so far."""

    rows: BatchedDataDict
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
        self._generation = -1
        self._groups: dict[int, _Group] = {}  # by the key of each of their rows
        self._params = SamplingParams()

    def begin(self, rows: BatchedDataDict, params: SamplingParams, generation: int) -> None:
        """Start the rows of whole groups.

        Args:
            rows: `input_ids`, `seeds`, `group_ids` and `uid`; their ids are the keys.
            params: how tokens are sampled, the same for all rows of a generation.
            generation: number of the generation; what is left of another one is aborted first.
        """
        if generation != self._generation:
            if self._groups:
                self._engine.abort()
                self._groups.clear()
            self._generation, self._params = generation, params
        if rows.num_rows == 0:
            return
        # Copies: rows end later than this call, which ends the tokens' memory.
        prompts: Ragged = rows["input_ids"]
        columns = {
            "input_ids": Ragged(prompts.values.clone(), prompts.lengths.clone()),
            "group_ids": rows["group_ids"].clone(),
            "uid": list(rows["uid"]),
        }
        own = BatchedDataDict(columns, row_ids=rows.row_ids.copy())
        for group_id in own["group_ids"].unique().tolist():
            group = _Group(own.select((own["group_ids"] == group_id).nonzero().squeeze(1)))
            self._groups |= dict.fromkeys(group.rows.row_ids.tolist(), group)
        self._engine.begin(own.row_ids.tolist(), own["input_ids"], params, rows["seeds"].numpy())

    def ended(self, timeout_s: float) -> EndedGroups:
        """Return the groups that ended since the last call, as soon as there are some; none at the deadline."""
        deadline = time.monotonic() + timeout_s
        ended: dict[int, _Group] = {}
        while self._groups and not ended and (left := deadline - time.monotonic()) > 0:
            ended |= self._record(self._engine.finished(left))
        if ended and self._groups:
            time.sleep(_COALESCE_S)
            ended |= self._record(self._engine.finished(0.0))
        return self._collect(list(ended.values()))

    def _record(self, answers: Sequence[FinishedRow]) -> dict[int, _Group]:
        """Add answers to their groups; return the groups that ended by them, by their identity."""
        ended: dict[int, _Group] = {}
        for answer in answers:
            group = self._groups.get(answer.key)
            if group is None:  # of a group that failed already
                continue
            group.answers[answer.key] = answer
            if group.has_ended:
                ended[id(group)] = group
                for key in group.rows.row_ids.tolist():
                    del self._groups[key]
        return ended

    def _collect(self, groups: Sequence[_Group]) -> EndedGroups:
        """Return groups as columns."""
        done = [group for group in groups if not group.failure]
        failed = [group for group in groups if group.failure]
        responses: list[Any] = [group.answers[key].response for group in done for key in group.rows.row_ids.tolist()]
        answered = self._engine.to_generations(responses, self._params)
        failures = [group.failure for group in failed for _ in range(group.rows.num_rows)]
        rows = [group.rows for group in (*done, *failed)]
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

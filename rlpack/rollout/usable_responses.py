"""Decide row by row which responses of a streaming engine can be trained on.

A response is unusable if a log-prob is missing, NaN or positive, a token id is outside the vocabulary, a policy version
is impossible, or it ended with neither a stop token nor the length limit. Only this row then fails, not the call, and
the driver has it generated again (`rlpack.recipes.driver.router`).
"""

from collections.abc import Sequence

import torch

from rlpack.batch.ragged import Ragged
from rlpack.rollout.assemble import check_trajectories
from rlpack.rollout.engine import StreamingEngine
from rlpack.rollout.errors import EngineError
from rlpack.rollout.in_flight import EndedRows
from rlpack.rollout.types import FinishReason, Generations, TrajectoryBatch


def usable_responses(engine: StreamingEngine, ended: EndedRows) -> tuple[Generations, list[str]]:
    """Return the responses of all rows, empty ones for rows that failed, and why a row has none ("" if it has one)."""
    failures = list(ended.failures)
    places = [place for place, failure in enumerate(failures) if not failure]
    try:
        made = _checked(engine, ended, places)
    except EngineError:
        for place in places:
            try:
                _checked(engine, ended, [place])
            except EngineError as error:
                failures[place] = f"its response of policy version {ended.versions[place]} can't be used: {error}"
        places = [place for place in places if not failures[place]]
        made = _checked(engine, ended, places)
    return _with_empty(made, places, len(failures)), failures


def _checked(engine: StreamingEngine, ended: EndedRows, places: Sequence[int]) -> Generations:
    """Return the responses of some rows.

    Raises:
        EngineError: one has values that no model returns.
    """
    made = engine.to_generations([ended.responses[place] for place in places], ended.params)
    trajectories = TrajectoryBatch.single_turn(ended.rows["input_ids"].select(places), made)
    check_trajectories(trajectories, vocab_size=engine.vocab_size, policy_version=engine.policy_version)
    return made


def _with_empty(generations: Generations, places: Sequence[int], count: int) -> Generations:
    """Return `count` rows: generations at `places`, which ascend, and empty rows elsewhere."""

    def spread(column: Ragged) -> Ragged:
        lengths = torch.zeros(count, dtype=column.lengths.dtype)
        lengths[torch.tensor(places, dtype=torch.int64)] = column.lengths
        return Ragged(column.values, lengths)

    reasons: list[FinishReason] = ["length"] * count
    for place, reason in zip(places, generations.finish_reasons, strict=True):
        reasons[place] = reason
    return Generations(
        spread(generations.token_ids), spread(generations.logprobs), spread(generations.policy_versions), reasons
    )

"""Rows of a streaming engine are returned once, as soon as they are worth it."""

import time

import pytest
import torch

from rlpack.distributed.context import RankContext
from rlpack.rollout.engine import FinishedRow
from rlpack.rollout.in_flight import EndedRows, RowsInFlight
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.usable_responses import usable_responses
from rlpack.workers.build import build_model
from tests.builders import tiny_config, tiny_rollouts, tiny_tokenizer
from tests.unit.rollout.streaming import StreamingHF

PARAMS = SamplingParams(max_new_tokens=5, stop_token_ids=(1,))
ROWS = (
    tiny_rollouts([(4, 0)] * 6, group=2)
    .keep(["input_ids", "group_ids", "uid"])
    .union({"seeds": torch.arange(6, dtype=torch.int64)})
)


def engine(at_once: int = 3) -> StreamingHF:
    built = StreamingHF(
        build_model(tiny_config().model, tiny_tokenizer(), RankContext(), seed=3, attention_name="sdpa")
    )
    built.at_once = at_once
    return built


def ids_of(ended: EndedRows) -> list[int]:
    assert len(ended.responses) == len(ended.failures) == len(ended.has_engine_failed) == ended.rows.num_rows
    return ended.rows.row_ids.tolist()


def all_rows(rows: RowsInFlight, generation: int, count: int) -> list[int]:
    """Return the ids of all rows of a generation, once they have ended."""
    ids: list[int] = []
    while len(ids) < count:
        ended = rows.ended(generation, 1.0)
        assert not any(ended.failures)
        ids += ids_of(ended)
    return sorted(ids)


def test_every_row_is_returned_once():
    rows = RowsInFlight(engine())
    rows.begin(ROWS, PARAMS, 0)
    assert all_rows(rows, 0, 6) == list(range(6))
    assert rows.ended(0, 0.0).rows.num_rows == 0


@pytest.mark.parametrize("enough", [0, 1, 2])
def test_rows_are_returned_when_a_group_is_complete_or_enough_have_ended(enough: int, monkeypatch: pytest.MonkeyPatch):
    source = engine(at_once=1)
    rows = RowsInFlight(source)
    rows.begin(ROWS, PARAMS, 0)
    while source.rows:
        before = set(source.rows)
        ended = rows.ended(0, 60.0, enough)
        # One more may end while they are on their way.
        is_complete = any(not {key, key ^ 1} & set(source.rows) for key in before - set(source.rows))
        assert is_complete or 0 < enough <= len(ids_of(ended)) <= enough + 1
        assert len(ids_of(ended)) == len(before) - len(source.rows)


def test_what_ended_is_returned_at_the_deadline_although_no_group_is_complete():
    source = engine(at_once=0)
    rows = RowsInFlight(source)
    rows.begin(ROWS, PARAMS, 0)
    assert ids_of(rows.ended(0, 0.01)) == []
    source.at_once = 1
    rows._record(source.finished(0.0))
    source.at_once = 0
    assert len(ids_of(rows.ended(0, 0.01))) == 1


def test_rows_keep_the_policy_version_at_which_they_ended_though_a_new_one_is_published_before_they_are_returned():
    source = engine(at_once=1)
    rows = RowsInFlight(source)
    source.policy_version = 7
    rows.begin(ROWS, PARAMS, 0)
    rows._record(source.finished(0.0))
    rows._record([FinishedRow(next(iter(rows._running)), None, "the engine died", 6)])
    successor = engine()
    successor.policy_version = 8
    rows.move_to(successor)
    ended = rows.ended(0, 1.0)
    assert sorted(ended.versions) == [6] + [7] * 5


def test_a_row_that_failed_with_its_engine_says_so_and_rows_that_were_answered_stand():
    source = engine(at_once=1)
    rows = RowsInFlight(source)
    rows.begin(ROWS, PARAMS, 0)
    rows._record(source.finished(0.0))
    source.fails = 1
    failed, answered = list[int](), list[int]()
    while len(failed) + len(answered) < 6:
        ended = rows.ended(0, 1.0)
        assert ended.has_engine_failed == [bool(failure) for failure in ended.failures]
        generations, failures = usable_responses(source, ended)
        assert failures == ended.failures
        for row, failure, length in zip(ids_of(ended), failures, generations.token_ids.lengths.tolist(), strict=True):
            (failed if failure else answered).append(row)
            assert (length == 0) == bool(failure)
    assert len(answered) == 1
    assert sorted(failed + answered) == list(range(6))


def test_a_response_that_cannot_be_used_leaves_the_others_and_the_engine_alone():
    source = engine(at_once=6)
    source.spoils = 1
    rows = RowsInFlight(source)
    rows.begin(ROWS, PARAMS, 0)
    ended = rows.ended(0, 1.0)
    assert not any(ended.failures)
    generations, failures = usable_responses(source, ended)
    (place,) = [place for place, failure in enumerate(failures) if failure]
    assert failures[place] == (
        "its response of policy version 0 can't be used: log-prob nan in segment 1 (policy); it has to be finite and "
        "at most 0"
    )
    whole = source.generate(ROWS["input_ids"], PARAMS, ROWS["seeds"].numpy())
    for row, tokens in enumerate(generations.token_ids.rows()):
        expected = whole.token_ids[ids_of(ended)[row]]
        assert tokens.tolist() == ([] if row == place else expected.tolist())


def test_generations_at_the_same_time_get_their_own_rows_sampled_as_they_asked():
    source, greedy = engine(), SamplingParams(temperature=0.0, max_new_tokens=2)
    rows = RowsInFlight(source)
    rows.begin(ROWS, PARAMS, 0)
    rows.begin(ROWS.select([0, 1]), greedy, 1)  # ids of rows may be the same
    ended = rows.ended(1, 1.0)
    assert sorted(ids_of(ended)) == [0, 1]
    generations, failures = usable_responses(source, ended)
    assert failures == ["", ""]
    assert generations.logprobs.values.count_nonzero() == 0
    assert int(generations.token_ids.lengths.max()) <= 2
    assert all_rows(rows, 0, 6) == list(range(6))


def test_a_generation_that_waits_makes_way_for_one_whose_rows_ended_once(monkeypatch: pytest.MonkeyPatch):
    source = engine()
    rows = RowsInFlight(source)
    rows.begin(ROWS, PARAMS, 0)
    rows.begin(ROWS.select([0, 1, 2, 3]), PARAMS, 1)
    assert ids_of(rows.ended(1, 0.0, 1)) == []  # one row makes room for another
    answers = iter([[6], [7, 8], []])

    def finished(timeout_s: float) -> list[FinishedRow]:
        time.sleep(min(timeout_s, 0.01))
        return [FinishedRow(key, source.rows.pop(key), "") for key in next(answers, [])]

    monkeypatch.setattr(source, "finished", finished)
    assert ids_of(rows.ended(0, 60.0)) == []  # row 0 of the other one ended
    assert ids_of(rows.ended(0, 60.0)) == []  # rows 1 and 2
    began = time.monotonic()
    assert ids_of(rows.ended(0, 0.3)) == []  # nothing, and those three were announced
    assert time.monotonic() - began >= 0.3
    assert ids_of(rows.ended(1, 0.0)) == [0, 1, 2]


def test_rows_of_an_abandoned_generation_are_forgotten_and_no_other_row_begins_again():
    source = engine()
    rows = RowsInFlight(source)
    for generation in (0, 1, 2):
        rows.begin(ROWS, PARAMS, generation)
    rows.abandon(1)
    assert len(source.lengths) == 18
    assert all_rows(rows, 1, 6) == all_rows(rows, 2, 6) == list(range(6))
    assert rows.ended(0, 0.0).rows.num_rows == 0


def test_rows_in_flight_on_an_engine_that_was_replaced_have_failed_and_the_new_one_has_not():
    first, second = engine(at_once=1), engine()
    rows = RowsInFlight(first)
    rows.begin(ROWS, PARAMS, 0)
    rows._record(first.finished(0.0))  # an answer, and a failure, that nobody has been told
    first.fails = 1
    rows._record(first.finished(0.0))
    rows.move_to(second)
    ended = rows.ended(0, 0.0)
    assert sorted(ids_of(ended)) == list(range(6))
    assert not any(ended.has_engine_failed)
    assert sorted(ended.failures) == ["", "the engine died"] + 4 * ["the engine that had it in flight was replaced"]
    assert not second.lengths

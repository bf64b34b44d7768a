"""Groups of a streaming engine are returned whole, answered or failed."""

import torch

from rlpack.distributed.context import RankContext
from rlpack.rollout.in_flight import GroupsInFlight
from rlpack.rollout.types import SamplingParams
from rlpack.workers.build import build_model
from tests.builders import tiny_config, tiny_rollouts, tiny_tokenizer
from tests.unit.rollout.streaming import StreamingHF

PARAMS = SamplingParams(max_new_tokens=5, stop_token_ids=(1,))
ROWS = (
    tiny_rollouts([(4, 0)] * 6, group=2)
    .keep(["input_ids", "group_ids", "uid"])
    .union({"seeds": torch.arange(6, dtype=torch.int64)})
)


def engine() -> StreamingHF:
    return StreamingHF(build_model(tiny_config().model, tiny_tokenizer(), RankContext(), seed=3, attention_name="sdpa"))


def test_every_group_is_returned_once_and_whole():
    groups = GroupsInFlight(engine())
    groups.begin(ROWS, PARAMS, 0)
    returned: list[int] = []
    while len(returned) < ROWS.num_rows:
        ended = groups.ended(0, 1.0)
        ids = ended.rows["group_ids"]
        assert (ids.bincount(minlength=3)[ids] == 2).all()
        assert ended.generations.token_ids.num_rows == ended.rows.num_rows == len(ended.failures)
        returned += ended.rows.row_ids.tolist()
    assert sorted(returned) == list(range(6))
    assert groups.ended(0, 0.0).rows.num_rows == 0


def test_a_group_of_which_a_row_failed_has_failed_as_a_whole_and_without_tokens():
    source = engine()
    groups = GroupsInFlight(source)
    groups.begin(ROWS, PARAMS, 0)
    source.fails = 1
    failed: list[int] = []
    while len(failed) < ROWS.num_rows:
        ended = groups.ended(0, 1.0)
        assert all(ended.failures)
        assert ended.generations.token_ids.lengths.tolist() == [0] * ended.rows.num_rows
        failed += ended.rows.row_ids.tolist()
    assert sorted(failed) == list(range(6))


def all_rows(groups: GroupsInFlight, generation: int, count: int) -> list[int]:
    """Return the ids of all rows of a generation, once they have ended."""
    ids: list[int] = []
    while len(ids) < count:
        ended = groups.ended(generation, 1.0)
        assert not any(ended.failures)
        ids += ended.rows.row_ids.tolist()
    return sorted(ids)


def test_generations_at_the_same_time_get_their_own_groups_sampled_as_they_asked():
    groups, greedy = GroupsInFlight(engine()), SamplingParams(temperature=0.0, max_new_tokens=2)
    groups.begin(ROWS, PARAMS, 0)
    groups.begin(ROWS.select([0, 1]), greedy, 1)  # ids of rows may be the same
    ended = groups.ended(1, 1.0)
    assert sorted(ended.rows.row_ids.tolist()) == [0, 1]
    assert ended.generations.logprobs.values.count_nonzero() == 0
    assert int(ended.generations.token_ids.lengths.max()) <= 2
    assert all_rows(groups, 0, 6) == list(range(6))


def test_groups_of_an_abandoned_generation_are_forgotten_and_others_go_on():
    groups = GroupsInFlight(engine())
    for generation in (0, 1, 2):
        groups.begin(ROWS, PARAMS, generation)
    groups.abandon(1)
    assert all_rows(groups, 1, 6) == all_rows(groups, 2, 6) == list(range(6))
    assert groups.ended(0, 0.0).rows.num_rows == 0


def test_another_engine_answers_what_the_first_one_had_in_flight():
    first, second = engine(), engine()
    groups = GroupsInFlight(first)
    groups.begin(ROWS, PARAMS, 0)
    first.fails = 1
    groups._record(first.finished(0.0))  # a failure that nobody has been told
    groups.move_to(second)
    assert all_rows(groups, 0, 6) == list(range(6))

"""What the driver holds of a batch, and what lies in the object store."""

import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.dataset_cache import ByteBudget, DatasetCache
from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import RemoteColumn
from rlpack.distributed import object_handles
from rlpack.distributed.errors import RoleError, StoreFullError
from rlpack.distributed.ray_store import RayStore
from rlpack.distributed.worker_group import WorkerGroup
from tests.builders import tiny_rollouts
from tests.distributed.roles import Echo, Faulty
from tests.distributed.test_worker_group import ends

pytestmark = [pytest.mark.ray, pytest.mark.slow]
EXTRA_POOLS = ("lost", "returns")

Groups = dict[str, WorkerGroup[Any]]

SIZES = [(3, 9), (5, 1), (4, 0), (2, 16), (7, 6), (3, 8), (1, 4)]


@pytest.fixture
def spared(store: RayStore) -> Iterator[RayStore]:
    """Return the store, with its budget as it was once the test is over."""
    before = store.budget
    yield store
    store.budget = before


def rollouts() -> BatchedDataDict:
    return tiny_rollouts(SIZES).keep(["input_ids", "uid"])


def test_results_stay_in_the_store_and_go_from_role_to_role(groups: Groups, store: RayStore):
    batch = rollouts()
    with store.lease("a step"):
        twice = groups["packed"].run(Echo.times, batch, 2)
        assert isinstance(twice["times"], RemoteColumn)
        assert twice["uid"] == batch["uid"]
        again = twice.rename({"times": "input_ids"})
        for mode, factor in (("dynamic", 3), ("fixed", 5)):
            found = store.fetch(groups[mode].run(Echo.times, again.keep(["input_ids", "uid"]), factor))
            assert torch.equal(found["times"].values, batch["input_ids"].values * 2 * factor)


def test_what_a_step_put_away_is_freed_at_its_end_and_reading_it_says_so(groups: Groups, store: RayStore):
    before = store.in_flight
    store.pop_peak_bytes()
    with store.lease("a step"):
        twice = groups["packed"].run(Echo.times, rollouts(), 2)
        tokens = sum(prompt + response for prompt, response in SIZES)
        assert store.in_flight == before + 8 * tokens + 8 * len(SIZES)
    assert store.in_flight == before
    assert store.pop_peak_bytes() == 8 * tokens + 8 * len(SIZES)
    for read in (store.fetch, pickle.dumps, lambda batch: groups["packed"].run(Echo.times, batch, 2)):
        with pytest.raises(DataError, match="were released at the end of a step"):
            read(twice.rename({"times": "input_ids"}))


def test_a_batch_is_read_after_its_step_under_a_lease_of_its_own(groups: Groups, store: RayStore):
    before, lease = store.in_flight, store.lease("the batch")
    with store.lease("step 1"):
        twice = groups["packed"].run(Echo.times, rollouts(), 2)
        lease.hold(twice)
    assert torch.equal(store.fetch(twice)["times"].values, 2 * rollouts()["input_ids"].values)
    lease.release()
    assert store.in_flight == before
    with pytest.raises(DataError, match="were released at the end of the batch"):
        store.fetch(twice)


def test_a_result_without_room_is_refused_before_it_is_put_away(groups: Groups, spared: RayStore):
    spared.budget = spared.in_flight + 100
    with pytest.raises(StoreFullError, match=r"^role packed, in times: \d+ bytes of tokens and texts") as full:
        groups["packed"].run(Echo.times, rollouts(), 2)
    assert full.value.short > 0
    assert "lower trainer.prompts_per_step" in str(full.value)
    spared.budget += 10_000
    assert groups["packed"].run(Echo.times, rollouts(), 2).num_rows == len(SIZES)


def test_rows_that_are_dropped_come_back_as_zeros(groups: Groups, store: RayStore):
    batching = groups["packed"].batching.__class__(max_tokens=16, overlong="drop")
    group = WorkerGroup("packed", groups["packed"].ranks, batching)
    with store.lease("a step"):
        found = store.fetch(group.run(Echo.times, rollouts().keep(["input_ids", "uid"]), 2))
    kept = rollouts()["input_ids"].lengths <= 16
    assert [bool(row.any()) for row in found["times"].rows()] == kept.tolist()
    assert found["times"].lengths.tolist() == rollouts()["input_ids"].lengths.tolist()


def test_several_numbers_a_row_stay_in_the_store_and_are_counted(groups: Groups, store: RayStore):
    batch, width = rollouts(), 1000
    with store.lease("a step"):
        before = store.in_flight
        found = groups["packed"].run(Echo.scores, batch, width)
        assert store.in_flight - before == 8 * len(SIZES) * (width + 1)
        assert isinstance(found["scores"], RemoteColumn)
        firsts = torch.stack([row[0] for row in batch["input_ids"].rows()])
        assert torch.equal(store.fetch(found)["scores"], firsts[:, None] + torch.arange(width))


def test_the_rows_of_a_dataset_are_put_away_once(groups: Groups, store: RayStore):
    tokens = Ragged(torch.arange(3 * 700), torch.full((700,), 3))
    whole = BatchedDataDict({"input_ids": tokens, "uid": [str(row) for row in range(700)]})
    loads: list[int] = []

    def load(rows: Any) -> BatchedDataDict:
        loads.append(len(rows))
        return BatchedDataDict(dict(whole.select(rows)))

    cache = DatasetCache(store, ByteBudget(1e6), 700, load)
    with store.lease("a step"):
        first = cache.rows(np.array([699, 3, 3, *[300] * 32]))
    held = store.in_flight
    with store.lease("a step"):
        assert cache.rows(np.array([5] * 35))["uid"] == ["5"] * 35
        found = store.fetch(groups["packed"].run(Echo.times, first, 2))
    assert found["times"].values.tolist() == [
        2 * token for row in (699, 3, 3, *[300] * 32) for token in range(3 * row, 3 * row + 3)
    ]
    assert loads == [256, 256, 188]
    assert store.in_flight == held


def test_a_role_that_keeps_its_shard_cannot_read_it_later_and_frees_it(groups: Groups, store: RayStore):
    with store.lease("a step"):
        given = groups["packed"].run(Echo.times, rollouts(), 2).rename({"times": "input_ids"})
        given = BatchedDataDict({**given, "times": given["input_ids"]})
        groups["fixed"].run(Echo.keep_shard, given)
        assert "were released at the end of the call" in groups["fixed"].run(Echo.read_kept)


def test_columns_that_a_role_hands_back_or_shards_again_are_whole(groups: Groups, store: RayStore):
    batch = rollouts()
    with store.lease("a step"):
        twice = groups["packed"].run(Echo.times, batch, 2)
        given = batch.keep(["input_ids"]).union({"times": twice["times"]})
        found = store.fetch(groups["dynamic"].run(Echo.again, given))
        assert torch.equal(found["times"].values, 2 * batch["input_ids"].values)
        given = twice.rename({"times": "input_ids"})
        found = store.fetch(groups["dynamic"].run(Echo.resharded, given))
        assert torch.equal(found["input_ids"].values, 2 * batch["input_ids"].values)


def test_a_few_rows_are_had_without_the_others(groups: Groups, store: RayStore):
    batch = rollouts()
    with store.lease("a step"):
        twice = groups["packed"].run(Echo.times, batch, 2)
        found = store.fetch(twice.select([3, 0]))
    assert torch.equal(found["times"].values, 2 * batch["input_ids"].select([3, 0]).values)


def test_a_role_that_returns_no_rows_is_told_what_to_return(groups: Groups):
    with pytest.raises(RoleError, match=r"Faulty.nothing returned a dict; a method under @sharded\(\) returns"):
        groups["returns"].run(Faulty.nothing, rollouts())


def test_rows_outlive_the_ranks_that_returned_them(groups: Groups, store: RayStore):
    batch, width = rollouts(), 40_000  # too many bytes to travel with a reply, and few
    twice = groups["lost"].run(Echo.times, batch, 2)
    scores = groups["lost"].run(Echo.scores, batch, width)
    for host in groups["lost"].ranks._pool.actors:
        ray.kill(host)
    assert all(ends(groups["lost"], rank) for rank in range(2))
    assert torch.equal(store.fetch(twice)["times"].values, 2 * batch["input_ids"].values)
    firsts = torch.stack([row[0] for row in batch["input_ids"].rows()])
    assert torch.equal(store.fetch(scores)["scores"], firsts[:, None] + torch.arange(width))
    again = groups["packed"].run(Echo.times, batch.keep(["uid"]).union({"input_ids": twice["times"]}), 2)
    assert torch.equal(store.fetch(again)["times"].values, 4 * batch["input_ids"].values)


def _after(seconds: float, size: int) -> torch.Tensor:
    time.sleep(seconds)
    return torch.arange(size)


def _get_asking_often(refs: list[ray.ObjectRef]) -> int:
    """Return the sum of an object, for which this rank asks again after 0.2 s, 0.4 s and so on."""
    before, object_handles._ASK_AGAIN_S = object_handles._ASK_AGAIN_S, 0.2
    try:
        return int(object_handles.get_objects(refs, None)[0].sum())
    finally:
        object_handles._ASK_AGAIN_S = before


@pytest.mark.parametrize("size", [10, 1_000_000])  # sent with its reference, and in the store
def test_a_rank_that_waits_long_for_an_object_asks_for_it_again_and_gets_it(groups: Groups, size: int):
    ref = ray.remote(num_cpus=0)(_after).remote(1.5, size)
    found = groups["packed"].ranks.apply(_get_asking_often, [ref]).result()
    assert set(found) == {size * (size - 1) // 2}


def test_an_object_that_does_not_come_in_time_is_an_error():
    ref = ray.remote(num_cpus=0)(_after).remote(2.0, 10)
    with pytest.raises(GetTimeoutError):
        object_handles.get_objects([ref], 0.2)

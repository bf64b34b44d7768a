import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.dataset_cache import ByteBudget, DatasetCache
from rlpack.batch.offload import offload_size
from rlpack.batch.ragged import Ragged
from rlpack.batch.store import LocalStore


def dataset(count: int) -> BatchedDataDict:
    tokens = Ragged(torch.arange(4 * count), torch.full((count,), 4))
    return BatchedDataDict({"input_ids": tokens, "uid": [f"row {row}" for row in range(count)]})


class CountingStore(LocalStore):
    """Records how many rows are offloaded, and whether permanently; has room for `room` permanent batches."""

    def __init__(self, room: int = 1000) -> None:
        self.offloaded: list[tuple[int, bool]] = []
        self.room_left = room

    def offload(self, batch: BatchedDataDict) -> BatchedDataDict:
        self.offloaded.append((batch.num_rows, False))
        return batch

    def offload_permanently(self, batch: BatchedDataDict) -> BatchedDataDict | None:
        if not self.room_left:
            return None
        self.room_left -= 1
        self.offloaded.append((batch.num_rows, True))
        return batch


def drawn(first: list[int], count: int) -> np.ndarray:
    """Return `count` positions: those of `first`, and the last of them repeated."""
    return np.array([*first, *[first[-1]] * (count - len(first))])


BLOCK = offload_size(dataset(256))


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (2 * BLOCK, [(256, True), (44, True)]),  # the whole dataset fits
        (BLOCK, [(256, True), (14, False)]),  # the first block does
        (BLOCK - 1, [(15, False), (15, False)]),  # none does
    ],
)
def test_a_dataset_is_cached_once_as_far_as_it_fits_the_budget(budget: int, expected: list[tuple[int, bool]]):
    whole, store = dataset(300), CountingStore()
    cache = DatasetCache(store, ByteBudget(budget), 300, lambda index: BatchedDataDict(dict(whole.select(index))))
    result = [cache.rows(drawn(index, 15)) for index in ([299, 0, 299], [7])]
    assert [batch["uid"] for batch in result] == [["row 299", "row 0"] + ["row 299"] * 13, ["row 7"] * 15]
    assert [batch.row_ids.tolist() for batch in result] == [list(range(15))] * 2
    assert result[0]["input_ids"].values[:4].tolist() == whole["input_ids"][299].tolist()
    assert store.offloaded == expected
    assert cache.rows(np.zeros(0, dtype=np.int64)).num_rows == 0


def test_threads_that_read_a_dataset_at_once_cache_each_block_once():
    class SlowStore(CountingStore):
        def offload_permanently(self, batch: BatchedDataDict) -> BatchedDataDict | None:
            time.sleep(0.01)
            return super().offload_permanently(batch)

    whole, store = dataset(1024), SlowStore()
    cache = DatasetCache(store, ByteBudget(4 * BLOCK), 1024, lambda index: whole.select(index))
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: cache.rows(drawn([1000, 3, 300, 700], 52))["uid"], range(3)))
    assert found == [["row 1000", "row 3", "row 300"] + ["row 700"] * 49] * 3
    assert store.offloaded == [(256, True)] * 4


def test_datasets_share_a_byte_budget():
    whole, store, byte_budget = dataset(300), CountingStore(), ByteBudget(BLOCK)
    first, second = (DatasetCache(store, byte_budget, 300, lambda index: whole.select(index)) for _ in range(2))
    first.rows(drawn([0], 15))
    second.rows(drawn([0], 15))
    assert store.offloaded == [(256, True), (15, False)]


def test_a_dataset_is_cached_up_to_the_room_of_the_store():
    whole, store = dataset(300), CountingStore(room=1)
    cache = DatasetCache(store, ByteBudget(1e9), 300, lambda index: whole.select(index))
    for _ in range(2):
        assert cache.rows(drawn([0, 299], 15))["uid"] == ["row 0"] + ["row 299"] * 14
    assert store.offloaded == [(256, True), (14, False), (14, False)]


def test_a_dataset_of_more_than_twenty_draws_is_not_cached():
    whole, store = dataset(300), CountingStore()
    cache = DatasetCache(store, ByteBudget(1e9), 300, lambda index: whole.select(index))
    batch = cache.rows(drawn([299, 3], 14))
    assert batch["uid"] == ["row 299"] + ["row 3"] * 13
    assert batch.row_ids.tolist() == list(range(14))
    cache.rows(drawn([299], 15))  # such as an evaluation of the whole split
    assert store.offloaded == [(14, False), (44, True)]


def test_blocks_of_tokens_have_the_requested_size():
    whole, store = dataset(700), CountingStore()
    cache = DatasetCache(store, ByteBudget(1e9), 700, lambda index: whole.select(index), block_bytes=2 * BLOCK + 7)
    result = cache.rows(drawn([699, 3], 35))
    assert result["uid"] == ["row 699"] + ["row 3"] * 34
    assert store.offloaded == [(512, True), (188, True)]

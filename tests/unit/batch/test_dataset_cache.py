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
    """Records how many rows are offloaded, and whether permanently."""

    def __init__(self) -> None:
        self.offloaded: list[tuple[int, bool]] = []

    def offload(self, batch: BatchedDataDict, *, permanent: bool = False) -> BatchedDataDict:
        self.offloaded.append((batch.num_rows, permanent))
        return batch


BLOCK = offload_size(dataset(256))


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (2 * BLOCK, [(256, True), (44, True)]),  # the whole dataset fits
        (BLOCK, [(256, True), (2, False)]),  # the first block does
        (BLOCK - 1, [(3, False), (1, False)]),  # none does
    ],
)
def test_a_dataset_is_cached_once_as_far_as_it_fits_the_budget(budget: int, expected: list[tuple[int, bool]]):
    whole, store = dataset(300), CountingStore()
    cache = DatasetCache(store, ByteBudget(budget), 300, lambda index: BatchedDataDict(dict(whole.select(index))))
    result = [cache.rows(np.array(index)) for index in ([299, 0, 299], [7])]
    assert [batch["uid"] for batch in result] == [["row 299", "row 0", "row 299"], ["row 7"]]
    assert [batch.row_ids.tolist() for batch in result] == [[0, 1, 2], [0]]
    assert result[0]["input_ids"].values[:4].tolist() == whole["input_ids"][299].tolist()
    assert store.offloaded == expected
    assert cache.rows(np.zeros(0, dtype=np.int64)).num_rows == 0


def test_threads_that_read_a_dataset_at_once_cache_each_block_once():
    class SlowStore(CountingStore):
        def offload(self, batch: BatchedDataDict, *, permanent: bool = False) -> BatchedDataDict:
            time.sleep(0.01)
            return super().offload(batch, permanent=permanent)

    whole, store = dataset(1024), SlowStore()
    cache = DatasetCache(store, ByteBudget(4 * BLOCK), 1024, lambda index: whole.select(index))
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: cache.rows(np.array([1000, 3, 300, 700]))["uid"], range(3)))
    assert found == [["row 1000", "row 3", "row 300", "row 700"]] * 3
    assert store.offloaded == [(256, True)] * 4


def test_datasets_share_a_byte_budget():
    whole, store, byte_budget = dataset(300), CountingStore(), ByteBudget(BLOCK)
    first, second = (DatasetCache(store, byte_budget, 300, lambda index: whole.select(index)) for _ in range(2))
    first.rows(np.array([0]))
    second.rows(np.array([0]))
    assert store.offloaded == [(256, True), (1, False)]


def test_blocks_of_tokens_have_the_requested_size():
    whole, store = dataset(700), CountingStore()
    cache = DatasetCache(store, ByteBudget(1e9), 700, lambda index: whole.select(index), block_bytes=2 * BLOCK + 7)
    result = cache.rows(np.array([699, 3]))
    assert result["uid"] == ["row 699", "row 3"]
    assert store.offloaded == [(512, True), (188, True)]

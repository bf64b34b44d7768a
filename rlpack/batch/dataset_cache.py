"""Cache dataset rows in the object store: upload each prompt once, not per step.

Batches that are drawn at the same time read the same cache from several threads.
"""

import threading
from collections.abc import Callable
from functools import cached_property

import numpy as np

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import offload_size
from rlpack.batch.store import Store

# Reading one row of a block unpickles all texts of the block.
_BLOCK_ROWS = 256
# A larger share of the dataset must be drawn at once for its rows to be cached: of a block, every node that reads a row
# receives all rows. From 1 million prompts, a draw of 2,048 would read 1.2 GB of blocks instead of 6 MB.
_MAX_DRAWS = 20
# Without texts, a block has at most this many times `_BLOCK_ROWS` rows: its first access loads all of it.
_MAX_BLOCK_FACTOR = 4


class ByteBudget:
    """The bytes of a store that several dataset caches may use together, leaving the rest to the steps' batches.

    Attributes:
        remaining: bytes that are not used yet.
    """

    def __init__(self, size: float) -> None:
        self.remaining = size
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Use `size` bytes if that many remain; return whether they do."""
        with self._lock:
            if size > self.remaining:
                return False
            self.remaining -= size
            return True


class DatasetCache:
    """A dataset whose rows are read as remote columns.

    Rows are stored permanently in blocks, at the first access to a row of the block. Once a block would exceed the byte
    budget or the room of the store, its rows and those of all blocks that are not cached yet are stored for the current
    step only. So are rows of which less than a twentieth of the dataset is drawn at once.
    """

    def __init__(
        self,
        store: Store,
        byte_budget: ByteBudget,
        num_rows: int,
        load: Callable[[np.ndarray], BatchedDataDict],
        *,
        block_bytes: int = 0,
    ) -> None:
        """Wrap a dataset.

        Args:
            store: where rows are stored.
            byte_budget: how much of the store the cached rows may use.
            num_rows: rows of the dataset.
            load: returns the rows at the given positions (int64 [n]).
            block_bytes: target size of a block in bytes; 0 for blocks of 256 rows. A larger block (up to 1,024 rows) is
                used if, judging by the first rows, it fits. Set it only for rows without texts: tokens are read in
                place, and fewer blocks are faster to fetch.
        """
        self._store = store
        self._byte_budget = byte_budget
        self._num_rows = num_rows
        self._load = load
        self._block_bytes = block_bytes
        self._blocks: dict[int, BatchedDataDict] = {}
        self._is_full = False
        self._lock = threading.Lock()

    def rows(self, positions: np.ndarray) -> BatchedDataDict:
        """Return the rows at these positions, int64 [n], in this order."""
        if positions.size * _MAX_DRAWS < self._num_rows or not positions.size:
            return BatchedDataDict(dict(self._store.offload(self._load(positions))))
        numbers, block_of_row = np.unique(positions // self._block_rows, return_inverse=True)
        is_cached = np.array([self._cache(number) for number in numbers.tolist()])
        blocks = [self._blocks[number] for number in numbers[is_cached].tolist()]
        starts = np.zeros(numbers.size, dtype=np.int64)
        starts[is_cached] = np.cumsum([0, *(block.num_rows for block in blocks)])[:-1]
        index = starts[block_of_row] + positions % self._block_rows
        uncached = ~is_cached[block_of_row]
        if uncached.any():
            index[uncached] = sum(block.num_rows for block in blocks) + np.arange(int(uncached.sum()))
            blocks.append(self._store.offload(self._load(positions[uncached])))
        return BatchedDataDict(dict(BatchedDataDict.concat(blocks).select(index)))

    @cached_property
    def _block_rows(self) -> int:
        """Rows of one block."""
        if not self._block_bytes:
            return _BLOCK_ROWS
        size = offload_size(self._load(np.arange(min(_BLOCK_ROWS, self._num_rows))))
        return _BLOCK_ROWS * max(1, min(_MAX_BLOCK_FACTOR, self._block_bytes // max(1, size)))

    def _cache(self, number: int) -> bool:
        """Store a block unless it exceeds budget or store; return whether it is cached."""
        with self._lock:  # also while it is stored: a second thread would store it again
            if number in self._blocks or self._is_full:
                return number in self._blocks
            start = number * self._block_rows
            block = self._load(np.arange(start, min(start + self._block_rows, self._num_rows)))
            fits = self._byte_budget.take(offload_size(block))
            stored = self._store.offload_permanently(block) if fits else None
            if stored is None:
                self._is_full = True
                return False
            self._blocks[number] = stored
            return True

"""Rows that are read again and again, a dataset's, put away once: so no step moves a prompt's tokens a second time."""

from collections.abc import Callable
from functools import cached_property

import numpy as np

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import size_of
from rlpack.batch.store import Store

# A rank that reads one row of a block unpickles all of its texts.
_BLOCK_ROWS = 256
# So many of them make one of tokens at most: all of its rows are loaded when the first is asked for.
_MOST_BLOCKS = 4


class Allowance:
    """Bytes that several shelves may take of a store together; more would crowd out the batches of a step."""

    def __init__(self, size: float) -> None:
        self.left = size


class Shelf:
    """A dataset of which the rows that are asked for come as references.

    Rows are put away in blocks, when one of them is first asked for. From the first block on for which the allowance
    is too small, rows of other blocks are put away for the step that asks for them.
    """

    def __init__(
        self,
        store: Store,
        allowance: Allowance,
        num_rows: int,
        load: Callable[[np.ndarray], BatchedDataDict],
        *,
        block_bytes: int = 0,
    ) -> None:
        """Take a dataset.

        Args:
            store: where its rows are put away.
            allowance: how much of the store they may take.
            num_rows: of the dataset.
            load: returns the rows at given positions (int64 [n]).
            block_bytes: of a block at most, as the first rows tell, where more than 256 rows fit in; for rows of
                tokens alone, which are read in place: fewer blocks are faster to get.
        """
        self._store = store
        self._allowance = allowance
        self._num_rows = num_rows
        self._load = load
        self._block_bytes = block_bytes
        self._blocks: dict[int, BatchedDataDict] = {}
        self._is_full = False

    def rows(self, positions: np.ndarray) -> BatchedDataDict:
        """Return the rows at these positions, int64 [n], in this order."""
        if not positions.size:
            return self._store.put(self._load(positions))
        numbers, block_of_row = np.unique(positions // self._block_rows, return_inverse=True)
        there = np.array([self._has(number) for number in numbers.tolist()])[block_of_row]
        blocks = [self._blocks[number] for number in numbers.tolist() if number in self._blocks]
        starts = np.zeros(numbers.size, dtype=np.int64)
        starts[[number in self._blocks for number in numbers.tolist()]] = np.cumsum(
            [0, *(block.num_rows for block in blocks)]
        )[:-1]
        where = starts[block_of_row] + positions % self._block_rows
        if not there.all():
            where[~there] = sum(block.num_rows for block in blocks) + np.arange(int((~there).sum()))
            blocks.append(self._store.put(self._load(positions[~there])))
        return BatchedDataDict(dict(BatchedDataDict.concat(blocks).select(where)))

    @cached_property
    def _block_rows(self) -> int:
        if not self._block_bytes:
            return _BLOCK_ROWS
        size = size_of(self._load(np.arange(min(_BLOCK_ROWS, self._num_rows))))
        return _BLOCK_ROWS * max(1, min(_MOST_BLOCKS, self._block_bytes // max(1, size)))

    def _has(self, number: int) -> bool:
        """Return whether a block is there, put away now if there is room for it."""
        if number in self._blocks or self._is_full:
            return number in self._blocks
        start = number * self._block_rows
        block = self._load(np.arange(start, min(start + self._block_rows, self._num_rows)))
        size = size_of(block)
        self._is_full = size > self._allowance.left
        if not self._is_full:
            self._allowance.left -= size
            self._blocks[number] = self._store.put(block, for_good=True)
        return not self._is_full

"""Rows that are read again and again, a dataset's, put away once: so no step moves a prompt's tokens a second time."""

from collections.abc import Callable

import numpy as np

from rlpack.data.batch import BatchedDataDict
from rlpack.data.holding import Store, size_of

# A rank that reads one row of a block unpickles all of its texts.
_BLOCK_ROWS = 256
# What is larger would crowd out the batches of a step.
_SHARE = 0.25


class Shelf:
    """A dataset of which the rows that are asked for come as references.

    Rows are put away in blocks, when one of them is first asked for. A dataset over a quarter of the store's budget
    stays where it is, and the rows of each step are put away for that step.
    """

    def __init__(self, store: Store, num_rows: int, load: Callable[[np.ndarray], BatchedDataDict]) -> None:
        """Take a dataset of `num_rows` rows, of which `load` returns those at given positions (int64 [n])."""
        self._store = store
        self._num_rows = num_rows
        self._load = load
        self._blocks: dict[int, BatchedDataDict] = {}
        self._fits: bool | None = None

    def rows(self, positions: np.ndarray) -> BatchedDataDict:
        """Return the rows at these positions, int64 [n], in this order."""
        if self._fits is None and positions.size:
            first = self._load(_rows_of_block(0, self._num_rows))
            self._fits = size_of(first) * self._num_rows / first.num_rows <= _SHARE * self._store.budget
        if not self._fits or not positions.size:
            return self._store.put(self._load(positions))
        numbers, block_of_row = np.unique(positions // _BLOCK_ROWS, return_inverse=True)
        joined = BatchedDataDict.concat([self._block(number) for number in numbers.tolist()])
        sizes = [self._blocks[number].num_rows for number in numbers.tolist()]
        starts = np.cumsum([0, *sizes[:-1]])
        return BatchedDataDict(dict(joined.select(starts[block_of_row] + positions % _BLOCK_ROWS)))

    def _block(self, number: int) -> BatchedDataDict:
        if number not in self._blocks:
            rows = _rows_of_block(number, self._num_rows)
            self._blocks[number] = self._store.put(self._load(rows), for_good=True)
        return self._blocks[number]


def _rows_of_block(number: int, num_rows: int) -> np.ndarray:
    return np.arange(number * _BLOCK_ROWS, min((number + 1) * _BLOCK_ROWS, num_rows))

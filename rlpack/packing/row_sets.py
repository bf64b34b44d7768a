"""RowSets: sets of rows that move as a unit, with their slots and costs.

A set is a single row, a group of rows, or a whole microbatch. Merging rows gives groups; merging rows and groups
(called items) gives microbatches (called bins while they are formed).
"""

from dataclasses import dataclass

import numpy as np

from rlpack.packing.analysis.cost import Cost, integer_costs
from rlpack.packing.batching import Mode


@dataclass(frozen=True, eq=False)
class RowSets:
    """Sets of rows, as arrays with one entry per set.

    Attributes:
        counts: rows of each set, int64 [I].
        longest_slots: slots of its longest row, int64 [I].
        slots: slots of all its rows, packed, int64 [I].
        costs: integer cost of all its rows, packed, int64 [I].
        longest_costs: integer cost of its longest row, int64 [I].
    """

    counts: np.ndarray
    longest_slots: np.ndarray
    slots: np.ndarray
    costs: np.ndarray
    longest_costs: np.ndarray

    @classmethod
    def of_rows(cls, slots: np.ndarray, cost: Cost | None, shared: np.ndarray | None = None) -> "RowSets":
        """Return one set per row; without a cost model, a row costs its slots.

        Args:
            slots: slots of each row, int64 [B].
            cost: cost model of a row.
            shared: leading slots of each row that another row of its set has, int64 [B]; None for none.
        """
        own = slots if shared is None else slots - shared
        costs = integer_costs(own if cost is None else cost.of_rest(slots, shared))
        return cls(np.ones_like(slots), slots, own, costs, costs)

    @property
    def size(self) -> int:
        """Number of sets."""
        return self.counts.size

    def select(self, index: np.ndarray) -> "RowSets":
        """Return the sets at `index`."""
        return RowSets(
            self.counts[index],
            self.longest_slots[index],
            self.slots[index],
            self.costs[index],
            self.longest_costs[index],
        )

    def merge(self, labels: np.ndarray) -> "RowSets":
        """Return the union of the sets of each label; `labels`, int64 [I], are numbered from 0."""
        return RowSets(
            counts=_sums(labels, self.counts),
            longest_slots=_maxima(labels, self.longest_slots),
            slots=_sums(labels, self.slots),
            costs=_sums(labels, self.costs),
            longest_costs=_maxima(labels, self.longest_costs),
        )

    def merged_slots(self, labels: np.ndarray, mode: Mode) -> np.ndarray:
        """Return `merge(labels).slots_in(mode)`, without the other columns."""
        if mode == "packed":
            return _sums(labels, self.slots)
        return _sums(labels, self.counts) * _maxima(labels, self.longest_slots)

    def merged_costs(self, labels: np.ndarray, mode: Mode) -> np.ndarray:
        """Return `merge(labels).costs_in(mode)`, without the other columns."""
        if mode == "packed":
            return _sums(labels, self.costs)
        return _sums(labels, self.counts) * _maxima(labels, self.longest_costs)

    def slots_in(self, mode: Mode) -> np.ndarray:
        """Return the slots of each set as one microbatch, padding included, int64 [I]."""
        return self.slots if mode == "packed" else self.counts * self.longest_slots

    def costs_in(self, mode: Mode) -> np.ndarray:
        """Return the integer cost of each set as one microbatch, padding included, int64 [I]."""
        return self.costs if mode == "packed" else self.counts * self.longest_costs


def _sums(labels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the sum of the values of each label, int64."""
    sums = np.zeros(int(labels.max(initial=-1)) + 1, dtype=np.int64)
    np.add.at(sums, labels, values)
    return sums


def _maxima(labels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the largest of the values of each label, int64."""
    maxima = np.zeros(int(labels.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(maxima, labels, values)
    return maxima

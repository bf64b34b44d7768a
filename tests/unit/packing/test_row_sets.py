from typing import get_args

import numpy as np

from rlpack.packing import Cost, Mode
from rlpack.packing.row_sets import RowSets


def columns(sets: RowSets) -> dict[str, list[int]]:
    return {name: values.tolist() for name, values in vars(sets).items()}


def test_merging_adds_rows_slots_and_costs_and_keeps_the_longest_row() -> None:
    rows = RowSets.of_rows(np.array([3, 5, 2, 4]), None)
    groups = rows.merge(np.array([1, 0, 1, 0]))
    assert columns(groups) == {
        "counts": [2, 2],
        "longest_slots": [5, 3],
        "slots": [9, 5],
        "costs": [9, 5],
        "longest_costs": [5, 3],
    }
    assert columns(groups.merge(np.array([0, 0]))) == columns(rows.merge(np.zeros(4, dtype=np.int64)))
    labels = np.array([1, 0, 1, 0])
    for mode in get_args(Mode):
        assert rows.merged_slots(labels, mode).tolist() == groups.slots_in(mode).tolist()
        assert rows.merged_costs(labels, mode).tolist() == groups.costs_in(mode).tolist()


def test_padding_counts_in_all_modes_but_packed() -> None:
    sets = RowSets.of_rows(np.array([4, 2, 1]), Cost(0.0, 1.0)).merge(np.array([0, 0, 1]))
    unit = sets.costs[1]  # the cost of one slot
    assert sets.slots_in("packed").tolist() == [6, 1]
    assert sets.slots_in("dynamic").tolist() == sets.slots_in("fixed").tolist() == [8, 1]
    assert (sets.costs_in("packed") // unit).tolist() == [16 + 4, 1]
    assert (sets.costs_in("dynamic") // unit).tolist() == [2 * 16, 1]

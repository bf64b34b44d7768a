from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.packing import Batching, Mode
from rlpack.packing.bins import split_bins
from rlpack.packing.request import PlanRequest
from rlpack.packing.row_sets import RowSets
from rlpack.packing.rows import resolve_rows

MODES = get_args(Mode)


@pytest.mark.parametrize("mode", MODES)
def test_splitting_halves_the_costliest_bin_that_holds_several_rows(mode: Mode) -> None:
    batching = Batching(mode=mode, max_tokens=20, micro_batch_size=2)
    items = resolve_rows(PlanRequest(np.array([1, 1, 4, 5, 19]), batching, dp_size=1)).items
    assert split_bins(batching, items, np.array([0, 0, 1, 1, 2]), 4).tolist() in ([0, 0, 1, 3, 2], [0, 0, 3, 1, 2])
    assert split_bins(batching, items, np.array([1, 1, 0, 0, 2]), 4).tolist() in ([1, 1, 0, 3, 2], [1, 1, 3, 0, 2])
    assert sorted(split_bins(batching, items, np.array([0, 0, 1, 1, 2]), 9)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [2, 3, 8, 100, 1024])
def test_rows_that_cost_nothing_are_halved_by_their_number(mode: Mode, count: int) -> None:
    batching = Batching(mode=mode, max_tokens=2**20)
    nothing = np.zeros(1024, dtype=np.int64)
    items = RowSets(np.ones_like(nothing), nothing, nothing, nothing, nothing)
    sizes = np.bincount(split_bins(batching, items, nothing, count))
    assert sizes.size == count
    assert sizes.max() <= 2 * sizes.min()


def test_halves_share_costs_first_and_then_rows_that_cost_nothing() -> None:
    items = resolve_rows(PlanRequest(np.array([0] * 11 + [9, 6, 2]), Batching(), dp_size=1)).items
    labels = split_bins(Batching(), items, np.zeros(14, dtype=np.int64), 2)
    assert labels[11:].tolist() == [0, 1, 1]
    assert np.bincount(labels).tolist() == [7, 7]


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_split_halves_one_bin(mode: Mode, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 3) | st.integers(0, 99), min_size=2, max_size=40))
    before = np.sort(data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))))
    before = np.unique(before, return_inverse=True)[1]
    batching = Batching(mode=mode, max_tokens=2**20)
    items = resolve_rows(PlanRequest(np.array(lengths), batching, dp_size=1)).items
    labels = before
    for count in range(int(before.max()) + 2, len(lengths) + 1):
        after = split_bins(batching, items, before, count)
        moved = np.flatnonzero(after != labels)
        assert np.unique(after).tolist() == list(range(count))
        assert np.unique(labels[moved]).size == 1
        assert (after[moved] == count - 1).all()
        labels = after

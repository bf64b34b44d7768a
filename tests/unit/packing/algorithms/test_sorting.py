import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlpack.packing.algorithms.sorting import ascending, by_first_row, decreasing

wholes = st.lists(st.integers(0, 2**62) | st.integers(0, 5) | st.integers(2**16 - 2, 2**16 + 2), max_size=60)


@given(values=wholes)
def test_the_orders_are_those_of_a_stable_sort(values: list[int]) -> None:
    array = np.array(values, dtype=np.int64)
    assert ascending(array).tolist() == np.argsort(array, kind="stable").tolist()
    assert decreasing(array).tolist() == np.argsort(-array, kind="stable").tolist()


@given(values=st.lists(st.integers(-3, 5), max_size=30))
def test_labels_are_renumbered_in_the_order_of_their_first_rows(values: list[int]) -> None:
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    assert by_first_row(np.array(values, dtype=np.int64)).tolist() == [numbers[value] for value in values]

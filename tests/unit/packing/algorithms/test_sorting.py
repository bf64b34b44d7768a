import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlpack.packing.algorithms.sorting import ascending, decreasing

wholes = st.lists(st.integers(0, 2**62) | st.integers(0, 5) | st.integers(2**16 - 2, 2**16 + 2), max_size=60)


@given(values=wholes)
def test_the_orders_are_those_of_a_stable_sort(values: list[int]) -> None:
    array = np.array(values, dtype=np.int64)
    assert ascending(array).tolist() == np.argsort(array, kind="stable").tolist()
    assert decreasing(array).tolist() == np.argsort(-array, kind="stable").tolist()

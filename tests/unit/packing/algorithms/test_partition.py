from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.packing import PackingError, partition

weight_lists = st.lists(st.integers(0, 1000), max_size=80)


def sums(weights: list[int], parts: list[np.ndarray]) -> list[int]:
    return sorted(int(np.array(weights, dtype=np.int64)[rows].sum()) for rows in parts)


def differencing_literally(weights: list[int], k: int) -> int:
    """Return the final spread of largest differencing on sorted lists of k sums."""
    states = [[weight] + [0] * (k - 1) for weight in weights]
    while len(states) > 1:
        states.sort(key=lambda state: state[0] - state[-1], reverse=True)
        first, second, *states = states
        states.append(sorted((a + b for a, b in zip(first, reversed(second), strict=True)), reverse=True))
    return states[0][0] - states[0][-1]


@given(weights=weight_lists, k=st.integers(1, 12), equal_size=st.booleans())
@settings(max_examples=150, deadline=None)
def test_parts_hold_every_row_once(weights: list[int], k: int, equal_size: bool) -> None:
    parts = partition(weights, k, equal_size=equal_size)
    assert len(parts) == k
    assert sorted(np.concatenate([*parts, []]).tolist()) == list(range(len(weights)))
    again = partition(weights, k, equal_size=equal_size)
    assert [rows.tolist() for rows in parts] == [rows.tolist() for rows in again]


@given(weights=weight_lists, k=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_equal_sizes_differ_by_one_row_at_most(weights: list[int], k: int) -> None:
    sizes = [rows.size for rows in partition(weights, k, equal_size=True)]
    assert max(sizes) - min(sizes) <= 1


@given(weights=weight_lists, k=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_the_spread_is_within_the_heaviest_row(weights: list[int], k: int) -> None:
    loads = sums(weights, partition(weights, k))
    assert loads[-1] - loads[0] <= max(weights, default=0)


@given(weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=40, unique=True), k=st.integers(2, 6))
@settings(max_examples=150, deadline=None)
def test_two_ways_are_split_as_by_literal_differencing(weights: list[int], k: int) -> None:
    loads = sums(weights, partition(weights, 2))
    assert loads[1] - loads[0] == differencing_literally(weights, 2)


def test_more_ways_are_on_average_split_as_well_as_by_literal_differencing() -> None:
    # States of equal spread may be merged in another order, so single cases may differ either way.
    random = np.random.default_rng(3)
    ours, literal = 0, 0
    for k in (3, 5, 8):
        for _ in range(40):
            weights = random.integers(1, 10**5, size=40).tolist()
            loads = sums(weights, partition(weights, k))
            ours += loads[-1] - loads[0]
            literal += differencing_literally(weights, k)
    assert ours <= 1.05 * literal


def test_the_textbook_case_comes_out_as_in_the_textbook() -> None:
    assert sums([8, 7, 6, 5, 4], partition([8, 7, 6, 5, 4], 2)) == [14, 16]


def test_fractions_are_weights_too() -> None:
    parts = partition(np.array([0.5, 0.25, 0.25, 1.0]), 2)
    assert [rows.tolist() for rows in parts] == [[0, 1, 2], [3]]
    huge = partition(np.array([1e300, 1.0, 1e300]), 2)
    assert all(len({0, 2} & set(rows.tolist())) == 1 for rows in huge)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -2.0], "row 1 is -2.0"),
        ([1.0, float("nan")], "row 1 is nan"),
        ([float("inf")], "row 0 is inf"),
        ([True, False], "bool"),
        (["a"], "row 0 is 'a', of type str; give one number per row"),
        (np.array(["a"]), "give one number per row"),
        (np.ones((2, 2)), r"shape \(2, 2\); give one number per row"),
        ([[1, 2], [3]], r"row 0 is \[1, 2\], of type list; give one number per row"),
        ([2.0, True], "row 1 is True, of type bool"),
        ([1.0, 2j], "row 1 is 2j"),
        ([1, 2**80], "row 1 is 1208925819614629174706176"),
        (torch.ones(2, dtype=torch.bfloat16), "weights can't be read as an array: .*BFloat16"),
        (torch.ones(2, requires_grad=True), "weights can't be read as an array: .*requires grad"),
    ],
)
def test_an_invalid_weight_is_rejected_with_its_row(weights: object, message: str) -> None:
    with pytest.raises(PackingError, match=message):
        partition(weights, 2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "weights", [np.array([8, 7.5, 1], dtype=object), (weight for weight in (8, 7.5, 1)), torch.tensor([8, 7.5, 1])]
)
def test_weights_may_come_in_any_container(weights: Any) -> None:
    assert [part.tolist() for part in partition(weights, 2)] == [[0], [1, 2]]


def test_zero_parts_are_rejected() -> None:
    with pytest.raises(PackingError, match="k is 0"):
        partition([1, 2], 0)


def test_very_many_rows_in_very_many_parts_are_as_even_as_their_number_lets_them_be() -> None:
    weights = np.random.default_rng(0).lognormal(8, 1, 2**16).astype(np.int64)
    parts = partition(weights, 512)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(weights.size))
    sums = np.array([weights[part].sum() for part in parts])
    assert sums.max() / sums.mean() < 1.001
    assert [part[0] for part in parts] == sorted(part[0] for part in parts)

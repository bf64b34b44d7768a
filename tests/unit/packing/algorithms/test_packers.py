import re
from collections.abc import Iterable
from itertools import combinations
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.packing import Algorithm, PackingError, lower_bound, pack
from rlpack.packing.algorithms.packers import best_fit_sorted, pack_labels, shuffled
from rlpack.packing.algorithms.sorting import decreasing

CAPACITY = 60
lengths_within = st.lists(st.integers(0, CAPACITY), max_size=120)
# Many sizes near the borders of the classes of MFFD.
lengths_at_borders = st.lists(
    st.sampled_from([0, 1, 9, 10, 11, 12, 15, 19, 20, 21, 24, 29, 30, 31, 34, 38, 39, 40, 45, 60]), max_size=60
)
# Large rows that leave room for two small ones, but not for any two, and too few pairs for all of them.
lengths_in_pairs = st.lists(st.integers(31, 38) | st.integers(11, 20), max_size=30)


def loads(lengths: list[int], bins: list[np.ndarray]) -> list[int]:
    return [int(np.array(lengths)[rows].sum()) for rows in bins]


def first_fit_literally(sizes: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for size in sizes:
        for contents in bins:
            if sum(contents) + size <= capacity:
                contents.append(size)
                break
        else:
            bins.append([size])
    return bins


def best_fit_literally(sizes: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for size in sizes:
        fitting = [contents for contents in bins if sum(contents) + size <= capacity]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            bins.append([size])
    return bins


def modified_first_fit_literally(lengths: list[int], capacity: int) -> list[list[int]]:
    """Run the phases of Johnson and Garey (1985) on plain lists."""
    large, medium, small, tiny = [], [], [], []
    for size in sorted(lengths, reverse=True):
        kind = (
            large if 2 * size > capacity else medium if 3 * size > capacity else small if 6 * size > capacity else tiny
        )
        kind.append(size)
    bins = [[size] for size in large]
    without_medium = []
    for contents in bins:
        fitting = [size for size in medium if sum(contents) + size <= capacity]
        if fitting:
            contents.append(max(fitting))
            medium.remove(max(fitting))
        else:
            without_medium.append(contents)
    for contents in reversed(without_medium):
        if len(small) < 2 or sum(contents) + sum(sorted(small)[:2]) > capacity:
            continue
        contents.append(min(small))
        small.remove(min(small))
        longest = max(size for size in small if sum(contents) + size <= capacity)
        contents.append(longest)
        small.remove(longest)
    rest = medium + small + tiny
    for contents in bins:
        while fitting := [size for size in rest if sum(contents) + size <= capacity]:
            contents.append(max(fitting))
            rest.remove(max(fitting))
    return bins + first_fit_literally(sorted(rest, reverse=True), capacity)


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """Return the optimum by trying every subset with the first remaining row."""
    if not lengths:
        return 0
    first, rest = lengths[0], lengths[1:]
    best = len(lengths)
    for count in range(len(rest) + 1):
        for chosen in combinations(range(len(rest)), count):
            if first + sum(rest[at] for at in chosen) <= capacity:
                left = [size for at, size in enumerate(rest) if at not in chosen]
                best = min(best, 1 + fewest_bins(left, capacity))
    return best


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
@given(lengths=lengths_within, seed=st.integers(-(2**40), 2**70))
@settings(max_examples=60, deadline=None)
def test_every_packer_holds_every_row_once_within_the_capacity(
    algorithm: Algorithm, lengths: list[int], seed: int
) -> None:
    bins = pack(lengths, CAPACITY, algorithm, seed=seed)
    assert sorted(np.concatenate([*bins, []]).tolist()) == list(range(len(lengths)))
    assert all(load <= CAPACITY for load in loads(lengths, bins))
    assert all(rows.size > 0 and rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in bins)
    assert lower_bound(lengths, CAPACITY) <= len(bins)
    again = pack(lengths, CAPACITY, algorithm, seed=seed)
    assert [rows.tolist() for rows in bins] == [rows.tolist() for rows in again]


@given(lengths=lengths_within)
@settings(max_examples=100, deadline=None)
def test_first_fit_decreasing_is_the_textbook_one(lengths: list[int]) -> None:
    expected = first_fit_literally(sorted(lengths, reverse=True), CAPACITY)
    assert loads(lengths, pack(lengths, CAPACITY, "first_fit_decreasing")) == [sum(contents) for contents in expected]


@given(lengths=lengths_within)
@settings(max_examples=100, deadline=None)
def test_best_fit_decreasing_is_the_textbook_one(lengths: list[int]) -> None:
    expected = best_fit_literally(sorted(lengths, reverse=True), CAPACITY)
    bins = pack(lengths, CAPACITY, "best_fit_decreasing")
    assert sorted(loads(lengths, bins)) == sorted(sum(contents) for contents in expected)


@given(lengths=lengths_at_borders | lengths_in_pairs | lengths_within)
@settings(max_examples=300, deadline=None)
def test_modified_first_fit_decreasing_follows_the_paper(lengths: list[int]) -> None:
    expected = [sorted(contents) for contents in modified_first_fit_literally(lengths, CAPACITY)]
    bins = pack_labels(np.array(lengths, dtype=np.int64), CAPACITY, "modified_first_fit_decreasing")
    actual = [
        sorted(size for size, label in zip(lengths, bins, strict=True) if label == at) for at in range(len(expected))
    ]
    assert actual == expected


def test_modified_first_fit_decreasing_saves_a_bin_where_first_fit_decreasing_is_at_its_worst() -> None:
    # The optimum is 9: six times 51 + 26 + 23, three times 27 + 27 + 23 + 23. First-fit decreasing pairs 51 with 27 and
    # needs 6 + 2 + 3 bins; pairs of small rows from the back give 51 + 23 + 26 six times, then 2 + 2 bins.
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    assert len(pack(lengths, 100, "first_fit_decreasing")) == 11
    assert len(pack(lengths, 100, "modified_first_fit_decreasing")) == 10


@given(lengths=st.lists(st.integers(0, 30), max_size=7))
@settings(max_examples=100, deadline=None)
def test_the_lower_bound_is_never_above_the_optimum(lengths: list[int]) -> None:
    assert lower_bound(lengths, 30) <= fewest_bins(lengths, 30)


def test_the_lower_bound_sees_more_than_the_sum() -> None:
    assert lower_bound([6, 6, 6, 6], 10) == 4  # no two fit together, though the sum fits into 3
    assert lower_bound([7, 7, 4, 4], 10) == 3  # 4 + 4 fit together, neither with a 7
    assert lower_bound([], 10) == 0
    assert lower_bound([0, 0], 10) == 1


@given(lengths=lengths_within)
@settings(max_examples=60, deadline=None)
def test_best_fit_over_a_sorted_list_fills_bins_as_the_one_over_buckets(lengths: list[int]) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    by_list = best_fit_sorted(sizes, decreasing(sizes), CAPACITY)
    by_bucket = pack_labels(sizes, CAPACITY, "best_fit_decreasing")
    assert sorted(np.bincount(by_list, weights=sizes)) == sorted(np.bincount(by_bucket, weights=sizes))


def test_best_fit_accepts_a_capacity_too_large_for_buckets() -> None:
    lengths = [2**30 - 1, 2**29, 2**30 - 1, 2**29]
    assert loads(lengths, pack(lengths, 2**31 - 1, "best_fit_decreasing")) == [2**31 - 2, 2**30]


def split_mix(seed: int, row: int) -> int:
    """SplitMix64's output number `row`, in Python's own integers."""
    mask = 2**64 - 1
    key = (seed + (row + 1) * 0x9E3779B97F4A7C15) & mask
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & mask
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & mask
    return key ^ (key >> 31)


def test_the_shuffle_depends_on_the_seed_alone() -> None:
    assert split_mix(1234567, 0) == 6457827717110365317  # published with the generator
    assert shuffled(50, 1234567).tolist() == sorted(range(50), key=lambda row: split_mix(1234567, row))
    assert shuffled(50, 1).tolist() != shuffled(50, 2).tolist()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, -1], "row 1 is -1"),
        ([3, True], "row 1 is True"),
        (np.array([True, False]), "row 0 is True"),
        ([3, 2.0], "row 1 is 2.0"),
        (np.array([3.0, float("nan")]), "row 1 is nan"),
        ([3, float("nan")], "row 1 is nan"),
        (["3", "4"], "row 0 is '3'"),
        (np.array(["a"]), "row 0 is 'a'"),
        (np.array([1.0, 2.5]), "row 0 is 1.0, of type float; give whole numbers"),
        (np.array([1, 2.5], dtype=object), "row 1 is 2.5, of type float; give whole numbers"),
        ((length for length in (1, None)), "row 1 is None"),
        ([[1, 2], [3]], r"row 0 is \[1, 2\], of type list"),
        (7, r"shape \(\)"),
        (torch.ones(2, dtype=torch.bfloat16), "lengths can't be read as an array: .*BFloat16"),
        (torch.ones(2, requires_grad=True), "lengths can't be read as an array: .*requires grad"),
        ([None], "row 0 is None"),
        (np.zeros((2, 2), dtype=np.int64), r"shape \(2, 2\)"),
        ([2**40], "row 0 is 1099511627776"),
        ([2**80], "row 0 is"),
        (np.array([2**63 + 1], dtype=np.uint64), "row 0 is 9223372036854775809"),
        ([3, 70], "sequence 1 has 70 tokens, over the capacity of 60"),
    ],
)
def test_an_invalid_length_is_rejected_with_its_row(lengths: object, message: str) -> None:
    with pytest.raises(PackingError, match=message):
        pack(lengths, CAPACITY)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "lengths", [np.array([4, 1, 3], dtype=object), (length for length in (4, 1, 3)), {4: "a", 1: "b", 3: "c"}.keys()]
)
def test_lengths_may_be_any_iterable(lengths: Iterable[int]) -> None:
    assert [rows.tolist() for rows in pack(lengths, 5)] == [[0, 1], [2]]


@pytest.mark.parametrize("algorithm", ["magic", [], None, 3])
def test_an_unknown_algorithm_is_rejected_with_the_known_ones(algorithm: Any) -> None:
    with pytest.raises(PackingError, match=rf"{re.escape(repr(algorithm))};.*concatenative.*best_fit_decreasing"):
        pack([1], 8, algorithm)


@pytest.mark.parametrize("seed", [1.5, "x", True, None])
def test_a_seed_has_to_be_an_integer(seed: Any) -> None:
    with pytest.raises(PackingError, match=f"seed is {seed!r}"):
        pack([1], 8, "first_fit_shuffle", seed=seed)


@pytest.mark.parametrize("capacity", [0, -3, 2.5, True, None, 2**31, 2**63, 2**80])
def test_a_capacity_has_to_be_a_positive_integer(capacity: object) -> None:
    with pytest.raises(PackingError, match="capacity is"):
        pack([1], capacity)  # pyright: ignore[reportArgumentType]

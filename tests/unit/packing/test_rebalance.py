import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.packing import Batching, Cost, assert_invariants, make_plan
from rlpack.packing.analysis.traces import REALISTIC, trace
from rlpack.packing.rebalance import rebalance

COST = Cost(24576.0, 1.0)


def lockstep(labels: np.ndarray, costs: np.ndarray, bins: int, ranks: int) -> int:
    loads = np.bincount(labels, weights=costs, minlength=bins).astype(int)
    return int(np.sort(loads)[::-1][::ranks].sum())


@given(
    slots=st.lists(st.integers(0, 60), min_size=1, max_size=60),
    bins=st.integers(1, 12),
    ranks=st.integers(1, 6),
    seed=st.integers(0, 9),
    kind=st.sampled_from(["slots", "quadratic", "groups"]),
)
@settings(max_examples=200, deadline=None)
def test_exchanges_keep_every_row_and_the_budget_and_never_lengthen_a_step(
    slots: list[int], bins: int, ranks: int, seed: int, kind: str
) -> None:
    sizes = np.array(slots)
    # Of groups, those of more slots may cost less: several short rows against a long one.
    costs = {"slots": sizes, "quadratic": sizes + sizes**2, "groups": 61 - sizes}[kind]
    labels = np.random.default_rng(seed).integers(0, bins, sizes.size)
    capacity = int(np.bincount(labels, weights=sizes, minlength=bins).max())
    rebalanced, _ = rebalance(labels.copy(), sizes, costs, ranks=ranks, num_bins=bins, capacity=capacity)
    assert rebalanced.shape == labels.shape
    assert 0 <= rebalanced.min() <= rebalanced.max() < bins
    assert np.bincount(rebalanced, weights=sizes, minlength=bins).max() <= capacity
    assert lockstep(rebalanced, costs, bins, ranks) <= lockstep(labels, costs, bins, ranks)
    assert (np.bincount(rebalanced, minlength=bins) > 0).sum() >= (np.bincount(labels, minlength=bins) > 0).sum()


def test_two_rows_are_exchanged() -> None:
    slots = np.array([6, 5, 3, 2])
    labels, _ = rebalance(np.array([0, 0, 1, 1]), slots, slots, ranks=2, num_bins=2, capacity=11)
    assert sorted(np.bincount(labels, weights=slots)) == [8, 8]


def test_a_row_is_exchanged_for_two_if_every_bin_is_full() -> None:
    slots = np.array([8, 8, 4, 4, 4, 4])
    labels, _ = rebalance(np.array([0, 0, 1, 1, 1, 1]), slots, slots**2, ranks=2, num_bins=2, capacity=16)
    assert np.bincount(labels, weights=slots).tolist() == [16, 16]
    assert np.bincount(labels, weights=slots**2).tolist() == [96, 96]


def test_next_to_a_row_that_fills_the_budget_the_other_ranks_fill_theirs() -> None:
    lengths = np.array([10] + [1] * 20)
    plan = make_plan(lengths, Batching(max_tokens=10, min_microbatches=2), dp_size=2)
    assert sorted(plan.padded_lengths.ravel()) == [5, 5, 10, 10]


@pytest.mark.parametrize("name", REALISTIC)
def test_ranks_hardly_wait_if_rows_are_as_long_as_the_budget(name: str) -> None:
    lengths = trace(name, 4096, longest=16384, seed=5)
    plan = make_plan(lengths, Batching(max_tokens=16384, pad_to_multiple=8), dp_size=64)
    assert_invariants(plan)
    assert 1 / (1 + plan.metrics.lockstep_overhead) >= 0.995


def test_rebalancing_stops_when_its_work_is_used_up() -> None:
    slots = trace("lognormal", 512, longest=8192, seed=3)
    labels = np.random.default_rng(3).integers(0, 64, slots.size)
    capacity = int(np.bincount(labels, weights=slots).max())
    lengths = []
    for work in (0, 2**12, 2**16, 2**30):
        rebalanced, left = rebalance(labels.copy(), slots, slots, ranks=8, num_bins=64, capacity=capacity, work=work)
        lengths.append(lockstep(rebalanced, slots, 64, 8))
        assert left >= work - 2**26
    assert lengths[0] == lockstep(labels, slots, 64, 8)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[3] < lengths[1]


@pytest.mark.parametrize("name", REALISTIC)
@pytest.mark.parametrize(("ranks", "rows"), [(8, 1200), (64, 6000)])
def test_ranks_hardly_wait_for_each_other(name: str, ranks: int, rows: int) -> None:
    lengths = trace(name, rows, longest=8192, seed=5)
    plan = make_plan(lengths, Batching(max_tokens=16384, pad_to_multiple=8), dp_size=ranks, cost=COST)
    assert_invariants(plan)
    assert plan.step_bounds[1] >= 3
    assert 1 / (1 + plan.metrics.lockstep_overhead) >= 0.995
    by_tokens = make_plan(lengths, Batching(max_tokens=16384, pad_to_multiple=8), dp_size=ranks)
    assert by_tokens.metrics.rank_imbalance <= 0.01

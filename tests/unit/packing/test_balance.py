"""What ranks share evenly: cost, tokens, or nothing, so that the packer's bins stay as they are; and equal rows."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.packing import Algorithm, Batching, Cost, MicrobatchPlan, Mode, assert_invariants, make_plan, pack
from rlpack.packing.analysis.traces import trace

QUADRATIC = Cost(linear=0.0, quadratic=1.0)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def bins(plan: MicrobatchPlan, step: int = 0) -> list[list[int]]:
    """Return the rows of the microbatches of an optimizer step, rank by rank."""
    grid = [microbatch for rank in range(plan.num_ranks) for microbatch in plan.microbatches(rank, step)]
    return [microbatch.rows.tolist() for microbatch in grid if microbatch.rows.size]


@given(lengths=LENGTHS, algorithm=st.sampled_from(get_args(Algorithm)), seed=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_without_balance_the_bins_are_the_packers(lengths: list[int], algorithm: Algorithm, seed: int) -> None:
    expected = [each.tolist() for each in pack(lengths, 64, algorithm, seed=seed)]
    for ranks in [size for size in (1, 2, 3) if len(expected) % size == 0]:
        plan = make_plan(
            lengths, Batching(max_tokens=64, algorithm=algorithm, balance="none"), dp_size=ranks, seed=seed
        )
        assert sorted(bins(plan)) == sorted(expected)
        assert bins(plan) == sorted(bins(plan))  # in the order of their first rows


@given(lengths=LENGTHS, ranks=st.integers(1, 7), divisor=st.integers(1, 4), size=st.none() | st.integers(5, 90))
@settings(max_examples=100, deadline=None)
def test_concatenative_without_balance_keeps_arrival_order(
    lengths: list[int], ranks: int, divisor: int, size: int | None
) -> None:
    batching = Batching(max_tokens=64, algorithm="concatenative", balance="none", divisible_by=divisor)
    plan = make_plan(lengths, batching, dp_size=ranks, mini_batch_size=size, cost=QUADRATIC)
    assert_invariants(plan)
    for step, start in enumerate(range(0, len(lengths), size or len(lengths))):
        rows = list(range(start, min(len(lengths), start + (size or len(lengths)))))
        assert [row for each in bins(plan, step) for row in each] == rows
        # Splitting a bin to reach a number of microbatches moves no row to another one.
        of_packer = {
            row + start: label
            for label, each in enumerate(pack([lengths[row] for row in rows], 64, "concatenative"))
            for row in each.tolist()
        }
        assert all(len({of_packer[row] for row in each}) == 1 for each in bins(plan, step))


def test_a_bin_that_is_split_is_cut_where_the_longer_part_is_shortest() -> None:
    batching = Batching(max_tokens=64, algorithm="concatenative", balance="none")
    assert bins(make_plan([5, 1, 1, 30, 2, 20], batching, dp_size=2)) == [[0, 1, 2, 3], [4, 5]]


def test_tokens_and_cost_balance_different_sums() -> None:
    lengths = trace("zipf", 400, 1024, seed=3)
    plans = {
        balance: make_plan(lengths, Batching(max_tokens=1024, balance=balance), dp_size=4, cost=QUADRATIC)
        for balance in ("cost", "tokens", "none")
    }
    of_tokens = {name: lockstep(plan, Cost(1.0)) for name, plan in plans.items()}
    of_cost = {name: lockstep(plan, QUADRATIC) for name, plan in plans.items()}
    assert of_tokens["tokens"] < of_tokens["cost"]
    assert of_tokens["tokens"] < of_tokens["none"]
    assert of_cost["cost"] < of_cost["tokens"]
    assert plans["tokens"].metrics.lockstep_overhead == pytest.approx(of_cost["tokens"], rel=1e-6)


def lockstep(plan: MicrobatchPlan, cost: Cost) -> float:
    """Return by which factor ranks take longer than their mean, minus 1, by definition."""
    costs = np.array(
        [
            [cost.of(plan.lengths[each.rows]).sum() for each in plan.microbatches(rank, 0)]
            for rank in range(plan.num_ranks)
        ]
    )
    return float(costs.max(0).sum() / (costs.sum() / plan.num_ranks) - 1)


@pytest.mark.parametrize("mode", get_args(Mode))
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_ranks_get_equally_many_rows_of_each_optimizer_step(mode: Mode, data: st.DataObject) -> None:
    lengths, ranks = data.draw(LENGTHS), data.draw(st.integers(1, 9))
    balance: Any = data.draw(st.sampled_from(["cost", "tokens", "none"]))
    size = data.draw(st.none() | st.integers(1, 50))
    batching = Batching(mode, max_tokens=64, micro_batch_size=3, balance=balance, equal_rows=True)
    plan = make_plan(lengths, batching, dp_size=ranks, mini_batch_size=size, cost=QUADRATIC)
    assert_invariants(plan)
    for step in range(plan.num_steps):
        counts = [sum(each.rows.size for each in plan.microbatches(rank, step)) for rank in range(ranks)]
        assert max(counts) - min(counts) <= 1
        if balance == "none":
            of_ranks = [
                sorted(row for each in plan.microbatches(rank, step) for row in each.rows) for rank in range(ranks)
            ]
            rows = [row for own in of_ranks for row in own]
            assert rows == sorted(rows)


def test_equal_rows_are_divided_by_their_cost() -> None:
    lengths = trace("zipf", 256, 1024, seed=5)
    for mode in get_args(Mode):
        batching = Batching(mode, max_tokens=4096, micro_batch_size=8, balance="tokens", equal_rows=True)
        balanced = make_plan(lengths, batching, dp_size=4)
        in_order = make_plan(lengths, replace(batching, balance="none"), dp_size=4)
        totals = [plan.lengths[plan.order].reshape(4, 64).sum(1) for plan in (balanced, in_order)]
        assert np.ptp(totals[0]) <= np.ptp(totals[1]) / 4


def test_without_the_keys_a_plan_is_what_it_was() -> None:
    lengths = trace("zipf", 300, 1024, seed=1)
    plan = make_plan(lengths, Batching(), dp_size=3, cost=QUADRATIC)
    explicit = make_plan(lengths, Batching(balance="cost", equal_rows=False), dp_size=3, cost=QUADRATIC)
    assert np.array_equal(plan.order, explicit.order)


def test_the_shuffling_packer_follows_its_seed() -> None:
    lengths = trace("zipf", 100, 1024, seed=1)
    batching = Batching(max_tokens=1024, algorithm="first_fit_shuffle", balance="none")
    plans = [bins(make_plan(lengths, batching, dp_size=1, seed=seed)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]

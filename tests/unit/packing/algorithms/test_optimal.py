import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.packing import Batching, assert_invariants, lower_bound, make_plan, pack
from rlpack.packing.algorithms import optimal
from rlpack.packing.analysis.traces import trace


@given(
    lengths=st.lists(st.integers(0, 40), max_size=80),
    capacity=st.integers(40, 100),
)
@settings(max_examples=200, deadline=None)
def test_it_packs_every_row_once_within_capacity_and_never_worse_than_best_fit(
    lengths: list[int], capacity: int
) -> None:
    bins = pack(lengths, capacity, "optimal")
    assert sorted(np.concatenate([*bins, np.zeros(0, dtype=int)]).tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= capacity for rows in bins)
    assert lower_bound(lengths, capacity) <= len(bins) <= len(pack(lengths, capacity))


def test_it_finds_the_optimum_of_johnsons_family() -> None:
    lengths = trace("johnson", 30 * 40, longest=5010)
    assert len(pack(lengths, 10_000)) == 11 * 40
    assert len(pack(lengths, 10_000, "optimal")) == 9 * 40


@pytest.mark.parametrize("longest", [500, 8192])
def test_triplets_take_at_most_two_percent_more_bins_than_they_fill(longest: int) -> None:
    lengths = trace("triplets", 3 * 2000, longest=longest, seed=2)
    assert int(lengths.sum()) == 2000 * 2 * longest
    assert len(pack(lengths, 2 * longest)) > 1.1 * 2000
    assert len(pack(lengths, 2 * longest, "optimal")) <= 1.02 * 2000


def test_the_metrics_count_searches_that_hit_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = trace("triplets", 300, longest=500, seed=2)
    batching = Batching(max_tokens=1000, algorithm="optimal")
    done = make_plan(trace("lognormal", 300, longest=500), batching, dp_size=2)
    assert done.metrics.search_limit_hits == 0
    monkeypatch.setattr(optimal, "_MAX_TRIES", 100)
    plan = make_plan(lengths, batching, dp_size=2, mini_batch_size=150)
    assert_invariants(plan)
    assert plan.metrics.search_limit_hits >= 1

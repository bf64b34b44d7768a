import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.packing import Batching, make_plan
from rlpack.packing.algorithms.contiguous import partition_sorted
from rlpack.packing.analysis.traces import trace

NEVER = 10**15


def least_slots(counts: np.ndarray, widths: np.ndarray, parts: int, capacity: int) -> list[int]:
    """Return the least slots with exactly 1, 2, … parts, by trying every part."""
    rows = np.concatenate(([0], np.cumsum(counts)))
    least = np.full((parts + 1, counts.size + 1), NEVER)
    least[0, 0] = 0
    for part in range(1, parts + 1):
        for end in range(1, counts.size + 1):
            for start in range(end):
                slots = (rows[end] - rows[start]) * widths[start]
                if slots <= capacity or end - start == 1:
                    least[part, end] = min(least[part, end], least[part - 1, start] + slots)
    return least[1:, -1].tolist()


@given(
    items=st.lists(st.tuples(st.integers(1, 25), st.integers(1, 3)), min_size=1, max_size=12),
    capacity=st.integers(10, 120),
)
@settings(max_examples=150, deadline=None)
def test_no_partition_into_runs_has_fewer_slots(items: list[tuple[int, int]], capacity: int) -> None:
    widths, counts = np.array(sorted(items, reverse=True)).T
    least = least_slots(counts, widths, counts.size, capacity)
    for parts in range(1 + next(at for at, slots in enumerate(least) if slots < NEVER), counts.size + 1):
        labels = partition_sorted(counts, widths, parts, capacity)
        assert sorted(set(labels.tolist())) == list(range(labels[-1] + 1))
        assert labels[-1] < parts
        runs = [labels == label for label in range(labels[-1] + 1)]
        slots = [int(counts[run].sum() * widths[run].max()) for run in runs]
        assert all(here <= capacity or run.sum() == 1 for here, run in zip(slots, runs, strict=True))
        assert sum(slots) == min(least[:parts])


def test_a_dynamic_plan_has_at_most_half_a_percent_more_slots_than_the_fewest() -> None:
    for name in ("zipf", "lognormal", "bimodal", "prompt_groups"):
        lengths = trace(name, 512, longest=2048, seed=3)
        plan = make_plan(lengths, Batching(mode="dynamic", max_tokens=4096), dp_size=4)
        falling = np.sort(lengths)[::-1]
        labels = partition_sorted(np.ones_like(falling), falling, plan.counts.size, 4096)
        fewest = sum(int(falling[labels == label].max() * (labels == label).sum()) for label in np.unique(labels))
        assert fewest <= plan.metrics.slots <= 1.005 * fewest


def test_lengths_whose_costs_are_huge_are_still_cut_within_the_budget() -> None:
    falling = np.sort(trace("uniform", 20_000, longest=65_536, seed=1))[::-1].copy()
    labels = partition_sorted(np.ones_like(falling), falling, 14_000, 65_536)
    assert labels[-1] < 14_000
    sizes = np.bincount(labels)
    assert (sizes * falling[np.concatenate(([0], np.cumsum(sizes)[:-1]))]).max() <= 65_536
    enormous = make_plan([2**31 - 1] * 3000, Batching(mode="dynamic", max_tokens=2**31 - 1), dp_size=2)
    assert enormous.counts.tolist() == [[1] * 1500] * 2

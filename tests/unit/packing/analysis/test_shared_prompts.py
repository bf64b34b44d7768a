"""Plans and lower bounds of rows that share prompts."""

import numpy as np
import pytest

from rlpack.packing import Batching, lower_bound, make_plan
from rlpack.packing.analysis.shared_prompts import SharedPrompts, plan_rows


def prompts_of(seed: int, budget: int) -> tuple[np.ndarray, SharedPrompts]:
    """Return lengths of 8 prompts' rows, some of them above the budget, and their prompts."""
    draws = np.random.default_rng(seed)
    groups = draws.permutation(np.repeat(np.arange(8), 5))
    prefixes = draws.integers(1, budget // 2, 8)[groups]
    return prefixes + draws.integers(0, budget * 3 // 5, 40), SharedPrompts(groups, prefixes)


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_has_fewer_microbatches_than_the_least_slots_need(seed: int):
    lengths, prompts = prompts_of(seed, budget=40)
    batching = Batching(max_tokens=40, overlong="own_microbatch", share_prompts=True, min_microbatches=1)
    plan = plan_rows(lengths, batching, prompts, dp_size=1)
    bound = lower_bound(prompts.least_slots(lengths, 40), 40) + int((lengths > 40).sum())
    assert plan.metrics.shared_tokens > 0
    assert bound <= plan.metrics.num_microbatches


def test_prompts_are_shared_only_where_a_batching_allows_it():
    prompts = SharedPrompts(np.array([0, 0]), np.array([2, 2]))
    assert prompts.shared_in(Batching()).share_prompts
    for batching in (Batching(mode="dynamic"), Batching(pad_to_multiple=8), Batching(equal_rows=True)):
        assert not prompts.shared_in(batching).share_prompts
    assert not prompts.shared_in(Batching(mode="dynamic").override(share_prompts=False)).share_prompts


def test_repeated_rows_share_prompts_only_with_rows_of_their_repetition():
    prompts = SharedPrompts(np.array([-5, -5, 10**12]), np.array([2, 2, 3])).repeated(5)
    assert prompts.groups.tolist() == [0, 0, 1, 3, 3]
    assert prompts.prefixes.tolist() == [2, 2, 3, 2, 2]


def test_a_plan_of_rows_with_prompts_is_that_of_make_plan():
    lengths, prompts = prompts_of(3, budget=40)
    batching = Batching(max_tokens=80, share_prompts=True)
    ours = plan_rows(lengths, batching, prompts, dp_size=2, mini_batch_size=20)
    theirs = make_plan(lengths, batching, dp_size=2, mini_batch_size=20, groups=prompts.groups, split_groups=True,
                       prefixes=prompts.prefixes)  # fmt: skip
    assert (ours.order.tolist(), ours.metrics) == (theirs.order.tolist(), theirs.metrics)
    alone = plan_rows(lengths, batching.override(share_prompts=False), prompts, dp_size=2, mini_batch_size=20)
    assert alone.metrics.shared_tokens == 0

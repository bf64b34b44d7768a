"""The guarantees of every plan, checked from the request and the finished plan alone.

1. Every row is planned once, or dropped if `overlong` is "drop". An optimizer step holds the same rows as with plain
   batching: `mini_batch_size` rows in arrival order.
2. No microbatch exceeds the token budget, padding and alignment included. The one exception is an oversized row or
   group that gets its own microbatch because `overlong` is "own_microbatch".
3. All ranks have the same number of microbatches in every optimizer step; those without rows are dummy microbatches.
4. That number is a multiple of `divisible_by` and at least `min_microbatches`. There is a dummy microbatch only if no
   microbatch is left to split.
5. The rows of a group, or of one part of a split group, are in one microbatch. A row shares tokens only with an earlier
   row of its microbatch that has the same prompt.
6. Any number of rows can be planned on any number of ranks.
7. The same request gives the same plan.

`tests/unit/packing/test_make_plan.py` asserts them for random requests.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rlpack.packing.lengths import align
from rlpack.packing.make_plan import make_plan
from rlpack.packing.plan import Microbatch, MicrobatchPlan


def assert_invariants(plan: MicrobatchPlan) -> None:
    """Raise an `AssertionError` that names the first guarantee that a plan breaks.

    A broken guarantee is a bug in the planner.
    """
    _assert_rows(plan)
    _assert_steps(plan)
    _assert_counts(plan)
    for rank, step, microbatch in _microbatches(plan):
        _assert_budget(plan, microbatch, f"rank {rank}, optimizer step {step}")
    _assert_groups(plan)
    _assert_repeatable(plan)


def _microbatches(plan: MicrobatchPlan) -> Iterator[tuple[int, int, Microbatch]]:
    for rank in range(plan.num_ranks):
        mine = plan.rank_plan(rank)
        for step in range(plan.num_steps):
            for local in mine.microbatches(step):
                yield rank, step, Microbatch(mine.rows[local.rows], local.length, local.is_dummy)


def _assert_rows(plan: MicrobatchPlan) -> None:
    everything = np.sort(np.concatenate((plan.order, plan.dropped)))
    assert np.array_equal(everything, np.arange(plan.num_rows)), "1: a row is missing or planned twice"
    assert np.array_equal(plan.inverse[plan.order], np.arange(plan.order.size)), "1: inverse does not undo order"
    assert (plan.inverse[plan.dropped] == -1).all(), "1: a dropped row has a position"
    assert plan.dropped.size == 0 or plan.batching.overlong == "drop", "1: dropped without overlong=drop"
    assert plan.truncated.size == 0 or plan.batching.overlong == "truncate", "1: truncated without overlong=truncate"
    untouched = np.ones(plan.num_rows, dtype=bool)
    untouched[np.concatenate((plan.truncated, plan.dropped))] = False
    assert (plan.lengths[untouched] == plan.request.lengths[untouched]).all(), "1: a row's length changed"


def _assert_steps(plan: MicrobatchPlan) -> None:
    expected = np.arange(plan.num_rows) // plan.request.rows_per_step
    expected[plan.dropped] = -1
    assert np.array_equal(plan.step_of_row, expected), "1: step_of_row differs from plain batching"
    seen = np.full(plan.num_rows, -1)
    for _, step, microbatch in _microbatches(plan):
        seen[microbatch.rows] = step
    assert np.array_equal(seen, expected), "1: an optimizer step holds other rows than with plain batching"


def _assert_counts(plan: MicrobatchPlan) -> None:
    batching = plan.batching
    for step in range(plan.num_steps):
        per_rank = [plan.microbatches(rank, step) for rank in range(plan.num_ranks)]
        counts = {len(microbatches) for microbatches in per_rank}
        assert len(counts) == 1, f"3: optimizer step {step} has {counts} microbatches, depending on the rank"
        (count,) = counts
        assert count % batching.divisible_by == 0, f"4: {count} microbatches, not divisible by {batching.divisible_by}"
        assert count >= batching.min_microbatches, f"4: {count} microbatches, under {batching.min_microbatches}"
        # If rows are divided among ranks first, each splits its own; else rows may go to any rank.
        pools = per_rank if batching.divides_rows_first else [[each for mine in per_rank for each in mine]]
        for pool in pools:
            assert all(each.is_dummy == (each.rows.size == 0) for each in pool), "3: is_dummy is wrong"
            if any(each.is_dummy for each in pool):
                assert all(_num_items(plan, each) <= 1 for each in pool), f"4: step {step} has a needless dummy"


def _num_items(plan: MicrobatchPlan, microbatch: Microbatch) -> int:
    groups = plan.request.groups
    return microbatch.rows.size if groups is None else np.unique(groups[microbatch.rows]).size


def _assert_budget(plan: MicrobatchPlan, microbatch: Microbatch, where: str) -> None:
    batching, lengths = plan.batching, plan.lengths[microbatch.rows]
    if batching.mode == "packed":
        least = int(align(lengths, batching.pad_to_multiple).sum() - plan.shared[microbatch.rows].sum())
        slots = microbatch.length
        assert microbatch.length == max(least, batching.pad_to_multiple), f"2: wrong length ({where})"
    else:
        least = int(align(lengths, batching.length_multiple).max(initial=0))
        slots = microbatch.length * max(1, lengths.size)
        assert microbatch.length == max(least, batching.length_multiple), f"2: wrong width ({where})"
    if batching.mode == "fixed":
        assert lengths.size <= batching.micro_batch_size, (
            f"2: {lengths.size} rows, over {batching.micro_batch_size} ({where})"
        )
    allowed = batching.overlong == "own_microbatch" and _num_items(plan, microbatch) == 1
    within = batching.max_tokens is None or slots <= batching.max_tokens
    assert within or allowed, f"2: {slots} slots, over the budget of {batching.max_tokens} ({where})"


def _assert_groups(plan: MicrobatchPlan) -> None:
    groups = plan.request.groups
    if groups is None:
        return
    microbatch_of: dict[int, int] = {}
    for number, (_, _, microbatch) in enumerate(_microbatches(plan)):
        _assert_shared(plan, microbatch)
        for group in np.unique(groups[microbatch.rows]):
            assert microbatch_of.setdefault(int(group), number) == number, f"5: group {group} is in two microbatches"
    split = set(groups[plan.dropped].tolist()) & microbatch_of.keys()
    assert not split, f"5: group {min(split, default=0)} lost some of its rows"


def _assert_shared(plan: MicrobatchPlan, microbatch: Microbatch) -> None:
    rows, owners, prompts = microbatch.rows, plan.owners[microbatch.rows], plan.request.prompts
    if prompts is None:
        assert not plan.shared[rows].any(), "5: rows without prompts share tokens"
        return
    assert np.isin(owners, rows).all(), "5: the owner of shared tokens is in another microbatch"
    assert ((owners <= rows) & (prompts[owners] == prompts[rows])).all(), "5: a row shares another prompt's tokens"
    assert not plan.shared[owners].any(), "5: an owner of shared tokens shares tokens itself"
    assert (plan.shared[rows] <= np.minimum(plan.lengths[rows], plan.lengths[owners])).all(), "5: too many are shared"


def _assert_repeatable(plan: MicrobatchPlan) -> None:
    request = plan.request
    again = make_plan(
        request.lengths,
        request.batching,
        dp_size=request.dp_size,
        mini_batch_size=request.mini_batch_size,
        groups=request.groups if request.prompts is None else request.prompts,
        split_groups=request.split_groups and request.prompts is not None,
        prefixes=request.prefixes,
        cost=request.cost,
        seed=request.seed,
    )
    for name in ("order", "counts", "padded_lengths", "step_bounds"):
        first, second = vars(plan)[name], vars(again)[name]
        assert np.array_equal(first, second), f"7: {name} differs when planned again"
    groups_split = plan.metrics.groups_split  # the request of the plan has the groups as they were split
    assert plan.metrics == replace(again.metrics, groups_split=groups_split), "7: metrics differ when planned again"

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.packing import Batching, Cost, MicrobatchPlan, PackingError, assert_invariants, make_plan
from rlpack.packing.analysis.layouts import shared_layout
from rlpack.packing.prefixes import shared_tokens, sharing_groups

SHARING = Batching(max_tokens=64, share_prompts=True)


@st.composite
def requests(draw: st.DrawFn, *, equal: bool = True) -> dict[str, Any]:
    """Draw arguments of make_plan for groups with a common prompt, some of them over the budget.

    The prefixes of a group are `equal`, or some of its rows have nothing in common with the others.
    """
    prompts = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6 if equal else 12)), min_size=1, max_size=12))
    prefixes = [prompt for prompt, size in prompts for _ in range(size)]
    if not equal:
        prefixes = [prefix if draw(st.booleans()) else 0 for prefix in prefixes]
    lengths = [prompt + draw(st.integers(0, 12)) for prompt in prefixes]
    overlong = draw(st.sampled_from(["error", "truncate", "drop", "own_microbatch"]))
    return {
        "lengths": lengths,
        "batching": replace(
            SHARING,
            max_tokens=draw(st.sampled_from([32, 64, 200])) if overlong == "error" else 20,
            min_microbatches=draw(st.integers(1, 3)),
            overlong=overlong,
            balance=draw(st.sampled_from(["cost", "tokens", "none"])),
        ),
        "dp_size": draw(st.sampled_from([1, 2, 5])),
        "groups": [group for group, (_, size) in enumerate(prompts) for _ in range(size)],
        "prefixes": prefixes,
        "split_groups": True,
        "cost": draw(st.none() | st.just(Cost(2.0, 0.1))),
    }


def microbatches(plan: MicrobatchPlan) -> list[Any]:
    return [
        each
        for rank in range(plan.num_ranks)
        for step in range(plan.num_steps)
        for each in plan.microbatches(rank, step)
    ]


@given(request=requests())
@settings(max_examples=200, deadline=None)
def test_a_microbatch_holds_each_distinct_token_once(request: dict[str, Any]):
    plan = make_plan(**request)
    assert_invariants(plan)
    whole = make_plan(request["lengths"], replace(request["batching"], share_prompts=False), dp_size=request["dp_size"])
    assert plan.dropped.tolist() == whole.dropped.tolist()
    assert plan.lengths.tolist() == whole.lengths.tolist()
    groups, shared = request["groups"], 0
    for microbatch in microbatches(plan):
        tokens: set[tuple[str, int, int]] = set()
        for row in microbatch.rows.tolist():
            length, prompt = int(plan.lengths[row]), request["prefixes"][row]
            tokens |= {("prompt", groups[row], at) for at in range(min(length, prompt))}
            tokens |= {("response", row, at) for at in range(prompt, length)}
            shared += length
        shared -= len(tokens)
        assert microbatch.length == max(1, len(tokens))
    assert plan.metrics.shared_tokens == shared
    assert plan.metrics.waste_ratio == pytest.approx(
        1 - (plan.metrics.real_tokens - shared) / max(1, plan.metrics.slots)
    )


@given(request=requests(equal=False))
@settings(max_examples=200, deadline=None)
def test_unequal_prefixes_of_a_group_keep_every_guarantee(request: dict[str, Any]):
    assert_invariants(make_plan(**request))


def test_parts_of_a_group_share_a_prompt_only_if_their_first_rows_have_it():
    lengths, prefixes = [1, 1, 7, 7, 7, 7, 7, 7], [0, 0, 6, 6, 6, 6, 6, 6]
    plan = make_plan(
        lengths,
        replace(SHARING, max_tokens=26),
        dp_size=1,
        groups=[0] * 8,
        split_groups=True,
        prefixes=prefixes,
    )
    assert_invariants(plan)
    assert plan.shared.sum() > 0


@given(
    groups=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    rows_per_step=st.integers(1, 12),
    num_microbatches=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_groups_to_share_in_stay_within_a_prompt_and_a_step_and_are_enough_to_balance(
    groups: list[int], rows_per_step: int, num_microbatches: int
):
    ids = np.array(groups)
    found = sharing_groups(ids, rows_per_step=rows_per_step, num_microbatches=num_microbatches)
    steps = np.arange(ids.size) // rows_per_step
    for group in np.unique(found):
        members = found == group
        assert np.unique(ids[members]).size == np.unique(steps[members]).size == 1
    for step in np.unique(steps):
        assert np.unique(found[steps == step]).size >= min(4 * num_microbatches, int((steps == step).sum()))


def test_sharing_fills_the_budget_that_whole_rows_would_exceed():
    lengths, groups = [24] * 4, [0, 0, 1, 1]
    plan = make_plan(lengths, SHARING, dp_size=1, groups=groups, prefixes=[20] * 4)
    assert [each.length for each in microbatches(plan)] == [56]
    assert (plan.metrics.shared_tokens, plan.metrics.real_tokens, plan.metrics.bin_utilization) == (40, 96, 56 / 64)
    apart = make_plan(lengths, SHARING, dp_size=1)
    assert [each.length for each in microbatches(apart)] == [48, 48]


def test_a_row_costs_its_own_tokens_and_their_attention_to_the_prompt():
    plan = make_plan(
        [10, 10, 16], SHARING, dp_size=2, groups=[0, 0, 1], prefixes=[8, 8, 0], cost=Cost(0.0, 1.0)
    )  # 100 + (100 - 64) against 256
    assert plan.metrics.lockstep_overhead == pytest.approx(256 / ((136 + 256) / 2) - 1)


def test_a_layout_gives_shared_tokens_the_slots_of_their_owner():
    layout = shared_layout(np.array([4, 5, 3, 2]), np.array([0, 3, 3, 0]), np.array([0, 0, 0, 3]), 10)
    assert layout.slots.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2, 6, 7]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 0, 1, 0, 1]]
    assert layout.cu_seqlens is not None
    assert layout.cu_seqlens.tolist() == [0, 4, 6, 8, 10]  # the third row has no slot to itself; two are padding
    assert layout.key_lengths is not None
    assert layout.key_lengths.tolist() == [4, 5, 2, 2]
    assert layout.key_slots is not None
    assert layout.key_slots.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_rows_that_are_left_share_the_prompt_of_one_that_is_gone():
    rows = [torch.tensor([5, 6, 7, response]) for response in range(3)]
    batch = BatchedDataDict({"input_ids": Ragged.from_rows(rows, torch.int64)})
    plan = make_plan([4, 4, 4], SHARING, dp_size=1, groups=[0, 0, 0], prefixes=[3, 3, 3])
    (shard,) = batch.shard(plan)
    (view,) = shard.select([1, 2]).microbatches()
    assert view.layout.slots.tolist() == [0, 1, 2, 3, 0, 1, 2, 4]
    assert view.rows["input_ids"].values.tolist() == [5, 6, 7, 1, 5, 6, 7, 2]


def test_a_prompt_of_which_rows_share_unequal_parts_fits_without_its_owner():
    prompt = [1, 2, 3, 4, 5, 6]
    rows = [[*prompt, 0], [1, 2, 7], *([*prompt, response] for response in (7, 8, 9))]
    batch = BatchedDataDict({"input_ids": Ragged.from_rows(rows, torch.int64)})
    plan = make_plan([7, 3, 7, 7, 7], SHARING, dp_size=1, groups=[0] * 5, prefixes=[6, 2, 6, 6, 6])
    (view,) = batch.shard(plan)[0].select([1, 2, 3, 4]).microbatches()
    tokens = view.rows["input_ids"].values
    slots = torch.from_numpy(view.layout.slots)
    laid_out = torch.zeros(view.layout.shape[1], dtype=torch.int64)
    laid_out[slots] = tokens
    assert laid_out[slots].tolist() == tokens.tolist()
    assert slots.unique().numel() == 6 + 1 + 3


def test_a_row_over_the_budget_is_dropped_without_the_others_of_its_prompt():
    lengths = np.full(32, 14)
    lengths[5] = 100
    plan = make_plan(
        lengths,
        replace(SHARING, overlong="drop"),
        dp_size=1,
        groups=np.repeat(np.arange(8), 4),
        split_groups=True,
        prefixes=np.full(32, 6),
    )
    assert_invariants(plan)
    assert plan.dropped.tolist() == [5]


def test_no_row_shares_more_than_it_and_its_owner_have():
    found = shared_tokens(np.array([2, 5, 1]), np.array([4, 4, 4]), np.array([0, 0, 0]))
    assert found.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": None}, "prefixes are shared within groups; give groups, too"),
        ({"batching": Batching()}, "batching.share_prompts is false; set it to share prefixes"),
        ({"prefixes": [1]}, "prefixes has 1 entries for 2 rows; give one per row"),
        ({"prefixes": [1, 4]}, "prefix of row 1 is 4; the row has 3 tokens"),
        ({"prefixes": [1, -1]}, "prefix of row 1 is -1; it has to be between 0"),
    ],
)
def test_prefixes_that_rows_cannot_share_are_refused(changes: dict[str, Any], message: str):
    arguments = {"lengths": [3, 3], "batching": SHARING, "dp_size": 1, "groups": [0, 0], "prefixes": [2, 2]}
    with pytest.raises(PackingError, match=message):
        make_plan(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "dynamic"}, "batching.share_prompts=true needs batching.mode=packed, and it is dynamic"),
        ({"pad_to_multiple": 4}, "batching.share_prompts=true needs batching.pad_to_multiple=1, and it is 4"),
        ({"equal_rows": True}, "so ranks can't have equally many rows; set batching.share_prompts or"),
        ({"share_prompts": 1}, "batching.share_prompts is 1; set true or false"),
    ],
)
def test_batching_that_cannot_share_prompts_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(PackingError, match=message):
        replace(SHARING, **changes)


def test_a_prompt_in_several_parts_counts_as_one_group_that_was_split() -> None:
    # Two ranks with four items each: the prompt is divided into parts of four rows, none of which fits.
    plan = make_plan(
        [20] * 32,
        Batching(max_tokens=64, share_prompts=True),
        dp_size=2,
        groups=[3] * 32,
        split_groups=True,
        prefixes=[1] * 32,
    )
    assert plan.metrics.groups_split == 1

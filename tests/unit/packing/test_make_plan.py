import math
import os
import pickle
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlpack.packing import (
    Algorithm,
    Balance,
    Batching,
    Cost,
    MicrobatchPlan,
    Mode,
    Overlong,
    PackingError,
    assert_invariants,
    make_plan,
)
from rlpack.packing.analysis.traces import TRACES, trace
from rlpack.packing.candidates import lockstep_bound
from rlpack.packing.rows import resolve_rows

MODES = get_args(Mode)
# `make test-long` asks for more.
EXAMPLES = int(os.environ.get("RLPACK_EXAMPLES", "150"))


@st.composite
def requests(draw: st.DrawFn, overlong: tuple[Overlong, ...] = get_args(Overlong)) -> dict[str, Any]:
    """Draw valid arguments of make_plan: any mode, algorithm, divisor, alignment, groups, rows and ranks."""
    mode, policy = draw(st.sampled_from(MODES)), draw(st.sampled_from(overlong))
    multiple = draw(st.sampled_from([1, 2, 4, 8, 12]))
    budget = draw(st.sampled_from([12, 24, 48, 96, 97, 500]))
    batching = Batching(
        mode=mode,
        max_tokens=None if mode == "fixed" and draw(st.booleans()) else budget,
        micro_batch_size=draw(st.integers(1, 9)),
        algorithm=draw(st.sampled_from(get_args(Algorithm))),
        pad_to_multiple=multiple if mode == "packed" else 1,
        length_multiple=1 if mode == "packed" else multiple,
        min_microbatches=draw(st.integers(1, 5)),
        divisible_by=draw(st.sampled_from([1, 2, 3, 4])),
        overlong=policy,
        balance=draw(st.sampled_from(get_args(Balance))),
        equal_rows=draw(st.booleans()),
    )
    most_groups = draw(st.sampled_from([0, 0, 2, 4]))
    longest = budget // multiple * multiple if policy == "error" else 3 * budget // 2
    if most_groups and policy in {"error", "truncate"}:
        longest = max(1, budget // multiple // most_groups * multiple)
    longest = draw(st.sampled_from([0, 1, longest]))
    size = draw(st.sampled_from([3, 20, 200, 5000]))
    lengths = draw(st.lists(st.integers(0, longest), max_size=size)) if size < 5000 else _many(draw, longest)
    # Checking thousands of steps on hundreds of ranks takes minutes and shows no more than a hundred.
    mini_batch = draw(st.none() | st.integers(1 + len(lengths) // 100, len(lengths) + 5))
    groups = (
        _grouped(draw, len(lengths), mini_batch, min(most_groups, batching.micro_batch_size)) if most_groups else None
    )
    if groups is not None and most_groups * multiple > budget:
        groups = None  # rows without tokens, padded to the multiple, would not fit together
    return {
        "lengths": lengths,
        "batching": batching,
        "dp_size": draw(st.sampled_from([1, 2, 3, 5, 8, 64, 512])),
        "mini_batch_size": mini_batch,
        "groups": groups,
        "cost": draw(st.none() | st.just(Cost(2.0, 0.01)) | st.just(Cost(0.0, 1.0))),
        "seed": draw(st.integers(0, 3)),
    }


def _many(draw: st.DrawFn, longest: int) -> list[int]:
    """Draw up to 5,000 lengths of a trace: more than Hypothesis draws one by one."""
    rows, seed = draw(st.integers(1, 5000)), draw(st.integers(0, 99))
    return trace(draw(st.sampled_from(list(TRACES))), rows, max(1, longest), seed=seed).clip(0, longest).tolist()


def _grouped(draw: st.DrawFn, rows: int, mini_batch: int | None, most: int) -> list[int]:
    """Draw ids of groups of at most `most` rows within one optimizer step, their rows interleaved."""
    groups: list[int] = []
    for first in range(0, rows, mini_batch or max(1, rows)):
        stop = min(rows, first + (mini_batch or rows))
        ids = [1000 * first - at // most for at in range(stop - first)]
        groups += draw(st.permutations(ids)) if stop - first < 30 else ids
    return groups


@given(request=requests())
@settings(max_examples=EXAMPLES, deadline=None)
def test_every_plan_keeps_all_seven_guarantees(request: dict[str, Any]) -> None:
    assert_invariants(make_plan(**request))


@given(request=requests(overlong=("error", "own_microbatch")))
@settings(max_examples=60, deadline=None)
def test_optimizer_steps_hold_the_same_rows_in_every_mode(request: dict[str, Any]) -> None:
    rows = len(request["lengths"])
    batching = replace(request["batching"], max_tokens=4000, micro_batch_size=max(1, rows))
    steps = [
        make_plan(**{**request, "batching": replace(batching, mode=mode), "dp_size": ranks}).step_of_row.tolist()
        for mode in MODES
        for ranks in (1, 4)
    ]
    size = request["mini_batch_size"] or max(1, rows)
    assert all(step == [row // size for row in range(rows)] for step in steps)


@given(request=requests())
@settings(max_examples=60, deadline=None)
def test_a_rank_plan_is_complete_on_its_own(request: dict[str, Any]) -> None:
    plan = make_plan(**request)
    seen = []
    for rank in range(plan.num_ranks):
        mine = pickle.loads(pickle.dumps(plan.rank_plan(rank)))
        assert (mine.lengths == plan.lengths[mine.rows]).all()
        assert (mine.rank, mine.num_ranks, mine.num_steps) == (rank, plan.num_ranks, plan.num_steps)
        walked = []
        for step in range(mine.num_steps):
            for local, whole in zip(mine.microbatches(step), plan.microbatches(rank, step), strict=True):
                assert (mine.rows[local.rows] == whole.rows).all()
                assert (local.length, local.is_dummy) == (whole.length, whole.is_dummy)
                walked += local.rows.tolist()
        assert walked == list(range(mine.rows.size))
        seen += mine.rows.tolist()
    assert seen == plan.order.tolist()


@given(request=requests())
@settings(max_examples=40, deadline=None)
def test_metrics_are_those_of_the_microbatches(request: dict[str, Any]) -> None:
    plan = make_plan(**request)
    packed = plan.batching.mode == "packed"
    slots, costs, dummies, used, best = 0, 0.0, 0, 0, 0.0
    critical = [0, 0.0]
    cost = plan.request.cost or Cost(1.0)
    for step in range(plan.num_steps):
        grid = [plan.microbatches(rank, step) for rank in range(plan.num_ranks)]
        for index in zip(*grid, strict=True):
            here, squares = [], []
            for each in index:
                rows = 1 if packed else max(1, each.rows.size)
                slots += rows * each.length
                dummies += each.is_dummy
                used += not each.is_dummy
                aligned = -(-plan.lengths[each.rows] // plan.batching.pad_to_multiple) * plan.batching.pad_to_multiple
                widths = aligned if packed else np.full(each.rows.size, each.length)
                here.append(float(cost.of(widths).sum()))
                squares.append((float((widths**2).sum()), rows * each.length))
            costliest = here.index(max(here))
            # Which of several that are equally costly counts as the slowest follows from rounding.
            tied = {squares[place] for place, cost_of in enumerate(here) if cost_of == pytest.approx(max(here))}
            assume(len(tied) == 1)
            critical = [critical[0] + squares[costliest][1], critical[1] + squares[costliest][0]]
            costs += max(here)
            best += sum(here) / plan.num_ranks
    metrics = plan.metrics
    real = int(plan.lengths.sum())
    assert (metrics.slots, metrics.dummy_microbatches, metrics.num_microbatches, metrics.real_tokens) == (
        slots,
        dummies,
        used,
        real,
    )
    assert metrics.lockstep_overhead == pytest.approx(costs / best - 1 if best else 0.0, abs=1e-9)
    assert (metrics.critical_slots, metrics.critical_squares) == (critical[0], pytest.approx(critical[1]))
    assert metrics.microbatches_per_rank == plan.counts.shape[1]
    assert metrics.waste_ratio == pytest.approx(1 - real / slots if slots else 0.0)
    assert all(np.isfinite(value) for value in metrics.as_dict().values())
    assert 0 <= metrics.packing_efficiency <= 1
    assert metrics.packing_efficiency > 0 or used == 0


@given(request=requests(overlong=("error", "own_microbatch")))
@settings(max_examples=100, deadline=None)
def test_no_step_is_shorter_than_its_lock_step_bound(request: dict[str, Any]) -> None:
    batching = replace(request["batching"], mode="packed", max_tokens=request["batching"].max_tokens or 500)
    if request["groups"] is not None:
        batching = replace(batching, overlong="own_microbatch")
    plan = make_plan(**request | {"mini_batch_size": None, "cost": None, "batching": batching})
    slots = -(-plan.lengths // batching.pad_to_multiple) * batching.pad_to_multiple
    longest = (1 + plan.metrics.lockstep_overhead) * int(slots.sum()) / plan.num_ranks
    assert lockstep_bound(batching, resolve_rows(plan.request).items, plan.num_ranks) <= longest * (1 + 1e-9)


def microbatches(plan: MicrobatchPlan, step: int = 0) -> list[list[list[int]]]:
    return [[each.rows.tolist() for each in plan.microbatches(rank, step)] for rank in range(plan.num_ranks)]


def test_fixed_microbatches_keep_arrival_order_and_close_at_the_budget() -> None:
    plan = make_plan([2, 2, 7, 1, 1, 1, 1, 1], Batching(mode="fixed", micro_batch_size=3, max_tokens=20), dp_size=1)
    # Three rows of width 7 would take 21 slots.
    assert microbatches(plan) == [[[0, 1], [2, 3], [4, 5, 6], [7]]]
    assert [each.length for each in plan.microbatches(0, 0)] == [2, 7, 1, 1]


def test_dynamic_microbatches_hold_rows_of_similar_length() -> None:
    plan = make_plan([9, 1, 8, 2, 9, 1], Batching(mode="dynamic", max_tokens=27, length_multiple=3), dp_size=1)
    assert sorted(microbatches(plan)[0]) == [[0, 2, 4], [1, 3, 5]]
    assert [each.length for each in plan.microbatches(0, 0)] == [9, 3]


def test_the_costliest_microbatch_is_split_until_the_divisor_is_met() -> None:
    batching = Batching(max_tokens=100, divisible_by=4)
    plan = make_plan([40, 30, 20, 10, 90], batching, dp_size=1)
    assert sorted(len(rows) for rows in microbatches(plan)[0]) == [1, 1, 1, 2]
    assert plan.metrics.dummy_microbatches == 0


def test_dummy_microbatches_replace_missing_rows_if_there_are_fewer_rows_than_ranks() -> None:
    plan = make_plan([5, 7], Batching(max_tokens=16, pad_to_multiple=4, min_microbatches=2), dp_size=3)
    assert plan.metrics.dummy_microbatches == 4
    dummies = [each for rank in range(3) for each in plan.microbatches(rank, 0) if each.is_dummy]
    assert [(each.rows.size, each.length) for each in dummies] == [(0, 4)] * 4


def test_no_rows_make_no_step() -> None:
    for mode in MODES:
        plan = make_plan([], Batching(mode=mode), dp_size=4)
        assert (plan.num_steps, plan.num_rows, plan.order.size) == (0, 0, 0)
        assert_invariants(plan)


def test_rows_without_tokens_get_a_slot_to_run_on() -> None:
    for mode in MODES:
        plan = make_plan([0, 0, 0], Batching(mode=mode, max_tokens=8, pad_to_multiple=2, length_multiple=2), dp_size=1)
        assert [each.length for each in plan.microbatches(0, 0)] == [2]
        assert plan.metrics.real_tokens == 0


@pytest.mark.parametrize("mode", MODES)
def test_an_overlong_row_is_truncated_dropped_or_gets_its_own_microbatch_and_is_counted(mode: Mode) -> None:
    lengths = [3, 30, 4, 5]
    batching = Batching(mode=mode, max_tokens=10, micro_batch_size=2, pad_to_multiple=4, length_multiple=4)
    cut = make_plan(lengths, replace(batching, overlong="truncate"), dp_size=2)
    assert (cut.lengths.tolist(), cut.truncated.tolist(), cut.metrics.truncated_tokens) == ([3, 8, 4, 5], [1], 22)
    without = make_plan(lengths, replace(batching, overlong="drop"), dp_size=2)
    assert (without.dropped.tolist(), sorted(without.order), without.inverse[1]) == ([1], [0, 2, 3], -1)
    assert without.step_of_row.tolist() == [0, -1, 0, 0]
    apart = make_plan(lengths, replace(batching, overlong="own_microbatch"), dp_size=2)
    assert [1] in list(chain(*microbatches(apart)))
    assert cut.metrics.overlong == without.metrics.overlong == apart.metrics.overlong == 1
    assert (without.metrics.dropped, cut.metrics.dropped, apart.metrics.dropped) == (1, 0, 0)
    with pytest.raises(PackingError, match=r"sequence 1 has 30 tokens.*the 10 slots.*max_tokens.*overlong=truncate"):
        make_plan(lengths, batching, dp_size=2)


def test_alignment_counts_against_the_budget() -> None:
    with pytest.raises(PackingError, match=r"sequence 0 has 9 tokens \(rounded up to a multiple of 8\)"):
        make_plan([9], Batching(max_tokens=15, pad_to_multiple=8), dp_size=1)
    with pytest.raises(PackingError, match=r"batching.pad_to_multiple \(16\) exceeds the 15 slots of a microbatch"):
        make_plan([1], Batching(max_tokens=15, pad_to_multiple=16), dp_size=1)
    with pytest.raises(PackingError, match=r"batching.length_multiple \(16\) exceeds"):
        make_plan([1], Batching(mode="dynamic", max_tokens=15, length_multiple=16), dp_size=1)


def test_the_last_optimizer_step_may_be_partial() -> None:
    plan = make_plan([4] * 7, Batching(max_tokens=8), dp_size=2, mini_batch_size=4)
    assert plan.num_steps == 2
    assert plan.step_of_row.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert_invariants(plan)


def test_groups_stay_together_or_are_rejected() -> None:
    batching = Batching(max_tokens=12)
    plan = make_plan([6, 5, 4, 6], batching, dp_size=2, groups=[7, 3, 3, 7])
    assert sorted(chain(*microbatches(plan))) == [[0, 3], [1, 2]]
    with pytest.raises(PackingError, match="group 7 takes 13 slots for 2 rows, over the 12 slots of a microbatch"):
        make_plan([6, 5, 4, 7], batching, dp_size=2, groups=[7, 3, 3, 7])
    with pytest.raises(PackingError, match=r"group 3 has rows in optimizer steps 0 and 1.*mini-batch size \(2\)"):
        make_plan([6, 5, 4, 6], batching, dp_size=2, groups=[7, 3, 3, 7], mini_batch_size=2)
    with pytest.raises(PackingError, match=r"group 7 has 2 rows, over batching.micro_batch_size of 1"):
        make_plan([1, 1], Batching(mode="fixed", micro_batch_size=1), dp_size=1, groups=[7, 7])
    with pytest.raises(PackingError, match="cost is a tuple; give a Cost, or None to count slots"):
        make_plan([3], Batching(), dp_size=2, cost=(1, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(PackingError, match="groups has 3 entries for 4 rows"):
        make_plan([6, 5, 4, 6], batching, dp_size=2, groups=[1, 2, 3])


def test_more_microbatches_than_memory_holds_are_rejected() -> None:
    with pytest.raises(PackingError, match="dp_size is 2000000000, over the limit of 1048576"):
        make_plan([3], Batching(), dp_size=2_000_000_000)
    with pytest.raises(PackingError, match=r": 1073741824 in total, over the limit .*lower batching.min_microbatches"):
        make_plan([3], Batching(min_microbatches=2**20), dp_size=1024)
    with pytest.raises(PackingError, match=r"in each of 1024 optimizer steps.*or raise the mini-batch size"):
        make_plan([3] * 1024, Batching(), dp_size=2**20, mini_batch_size=1)


def test_a_microbatch_without_a_budget_may_have_more_slots_than_a_length_may() -> None:
    plan = make_plan([2**31 - 1, 2**31 - 1, 5], Batching(mode="fixed", max_tokens=None, micro_batch_size=3), dp_size=1)
    assert plan.metrics.slots == 3 * (2**31 - 1)
    assert plan.metrics.packing_efficiency == 1


@given(request=requests(), most=st.integers(2, 9))
@settings(max_examples=EXAMPLES, deadline=None)
def test_only_groups_that_no_microbatch_can_hold_are_split(request: dict[str, Any], most: int) -> None:
    size = request["mini_batch_size"] or max(1, len(request["lengths"]))
    steps = np.arange(len(request["lengths"])) // size
    groups = 10_000 * steps + np.arange(len(request["lengths"])) % size // most
    plan = make_plan(**{**request, "groups": groups}, split_groups=True)
    assert_invariants(plan)
    cell_of_row = np.full(groups.size, -1)
    cell_of_row[plan.order] = np.repeat(np.arange(plan.counts.size), plan.counts.ravel())
    batching, slots, split = plan.batching, plan.batching.slots_of(plan.lengths), 0
    for rows in np.split(np.arange(groups.size), np.flatnonzero(np.diff(groups)) + 1) if groups.size else []:
        needs = slots[rows].sum() if batching.mode == "packed" else rows.size * slots[rows].max()
        fits = needs <= (batching.max_tokens or math.inf) and (
            batching.mode != "fixed" or rows.size <= batching.micro_batch_size
        )
        cells = set(cell_of_row[rows].tolist())
        assert len(cells) == 1 if fits or rows.size == 1 or -1 in cells else len(cells) > 1
        split += not fits and rows.size > 1 and -1 not in cells
    assert plan.metrics.groups_split == split


def test_a_group_is_split_into_as_few_as_hold_it() -> None:
    options: dict[str, Any] = {"batching": Batching(max_tokens=12), "dp_size": 2, "split_groups": True}
    plan = make_plan([6, 5, 7, 6, 4], groups=[7, 7, 7, 7, 3], **options)
    assert plan.metrics.groups_split == 1
    assert sorted(map(sorted, filter(None, chain(*microbatches(plan))))) == [[0, 3], [1, 2], [4]]
    with pytest.raises(PackingError, match="group 7 has rows in optimizer steps 0 and 1"):
        make_plan([6, 5, 7, 6, 4], groups=[7, 7, 7, 7, 3], mini_batch_size=2, **options)


def test_a_group_is_dropped_as_a_whole() -> None:
    plan = make_plan([6, 50, 4, 6], Batching(max_tokens=12, overlong="drop"), dp_size=1, groups=[7, 3, 3, 7])
    assert plan.dropped.tolist() == [1, 2]
    assert_invariants(plan)


def test_microbatches_of_similar_cost_are_at_the_same_index() -> None:
    random = np.random.default_rng(0)
    lengths = np.minimum(random.zipf(1.5, 512) * 16, 4096)
    plan = make_plan(lengths, Batching(max_tokens=4096), dp_size=4)
    assert_invariants(plan)
    dealt = plan.padded_lengths[:, np.argsort(plan.padded_lengths.sum(axis=0), kind="stable")]
    assert (dealt.max(axis=0)[:-1] <= dealt.min(axis=0)[1:]).all()
    assert plan.metrics.lockstep_overhead < 0.01
    assert plan.metrics.rank_imbalance < 0.01


def test_a_step_starts_and_ends_with_its_lightest_microbatches() -> None:
    plan = make_plan([9, 7, 8, 2, 10, 6, 1, 9], Batching(max_tokens=10), dp_size=2)
    assert plan.padded_lengths.shape == (2, 3)
    assert plan.padded_lengths[:, [0, 2]].max() <= plan.padded_lengths[:, 1].min()


def test_balancing_by_cost_beats_the_packer_alone() -> None:
    # Best-fit fills one bin of 12 and one of 8 where two of 10 would do.
    plan = make_plan([6, 6, 4, 4], Batching(max_tokens=12), dp_size=2)
    assert plan.padded_lengths.tolist() == [[10], [10]]
    assert plan.metrics.lockstep_overhead == 0


def test_only_the_last_microbatches_are_evened_out_if_the_full_ones_are_equal() -> None:
    # Four full bins meet at the first index, and the twelve short rows make 3 on each rank at the second. Balancing all
    # rows gives 8, 6, 6, 6, … and 5, … instead; cutting the two bins of short rows alone gives 4, 4, 2 and 2.
    plan = make_plan([8] + [4] * 6 + [1] * 12, Batching(max_tokens=8), dp_size=4)
    assert plan.padded_lengths.tolist() == [[8, 3]] * 4
    assert plan.metrics.lockstep_overhead == 0


def test_balancing_by_cost_never_breaks_the_budget() -> None:
    # By cost alone, 10² stands against 5 × 4², which take 20 slots.
    plan = make_plan([10, 4, 4, 4, 4, 4], Batching(max_tokens=16), dp_size=2, cost=Cost(0.0, 1.0))
    assert_invariants(plan)
    assert sorted(plan.padded_lengths.ravel().tolist()) == [14, 16]


def test_a_quadratic_cost_spreads_the_long_rows() -> None:
    lengths = [8, 8] + [2] * 8
    plan = make_plan(lengths, Batching(max_tokens=24), dp_size=2, cost=Cost(0.0, 1.0))
    assert [sum(row < 2 for row in rank[0]) for rank in microbatches(plan)] == [1, 1]


def test_ranks_have_similar_token_totals_over_optimizer_steps() -> None:
    random = np.random.default_rng(1)
    plan = make_plan(random.integers(1, 500, 256), Batching(max_tokens=512), dp_size=2, mini_batch_size=2)
    totals = plan.padded_lengths.sum(axis=1)
    assert abs(int(totals[0] - totals[1])) <= 512


def test_a_plan_does_not_depend_on_the_container_of_its_lengths() -> None:
    lengths = [5, 3, 8, 1, 13]
    plans = [
        make_plan(container, Batching(max_tokens=16), dp_size=2)
        for container in (
            lengths,
            tuple(lengths),
            np.array(lengths, dtype=np.int16),
            np.array(lengths, dtype=np.uint64),
        )
    ]
    assert all(first.order.tolist() == second.order.tolist() for first, second in pairwise(plans))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [1, -1]}, "length of row 1 is -1"),
        ({"lengths": [1, float("nan")]}, "length of row 1 is nan"),
        ({"dp_size": 0}, "dp_size is 0"),
        ({"mini_batch_size": 0}, "mini_batch_size is 0"),
        ({"mini_batch_size": 2.0}, "mini_batch_size is 2.0"),
        ({"mini_batch_size": 2**63}, "mini_batch_size is 9223372036854775808, over the limit of 2147483647"),
        ({"dp_size": 2**31}, "dp_size is 2147483648, over the limit of 1048576"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"groups": [0.5, 1.0]}, "group of row 0 is 0.5"),
        ({"batching": {"mode": "packed"}}, "give a Batching"),
    ],
)
def test_invalid_arguments_are_rejected(changes: dict[str, Any], message: str) -> None:
    request: dict[str, Any] = {"lengths": [1, 2], "batching": Batching(), "dp_size": 1}
    with pytest.raises(PackingError, match=message):
        make_plan(**{**request, **changes})


def test_an_unknown_rank_or_step_is_rejected_with_the_number_there_are() -> None:
    plan = make_plan([1, 2], Batching(), dp_size=2)
    with pytest.raises(PackingError, match="rank 2 is not in the plan, which has 2"):
        plan.microbatches(2, 0)
    with pytest.raises(PackingError, match="optimizer step 1 is not in the plan, which has 1"):
        plan.microbatches(0, 1)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"order": np.array([0, 0, 2, 3])}, "1: a row is missing"),
        ({"step_of_row": np.array([0, 0, 0, 1])}, "1: step_of_row"),
        ({"dropped": np.array([3]), "order": np.array([0, 1, 2])}, "1: "),
        ({"lengths": np.array([6, 5, 4, 5])}, "1: a row's length"),
        ({"padded_lengths": np.array([[10], [99]])}, "2: wrong length"),
        ({"counts": np.array([[4], [0]]), "padded_lengths": np.array([[21], [1]])}, "4: step 0 has a needless dummy"),
    ],
)
def test_a_broken_plan_is_caught(broken: dict[str, np.ndarray], message: str) -> None:
    plan = make_plan([6, 5, 4, 6], Batching(max_tokens=12), dp_size=2)
    assert_invariants(plan)
    with pytest.raises(AssertionError, match=message):
        assert_invariants(replace(plan, **broken))


def test_breaking_the_budget_the_divisor_or_a_group_is_caught() -> None:
    plan = make_plan([6, 5, 4, 6], Batching(max_tokens=12), dp_size=2, groups=[0, 1, 1, 0])
    tight = replace(plan, request=replace(plan.request, batching=Batching(max_tokens=10)))
    with pytest.raises(AssertionError, match="2: 12 slots, over the budget of 10"):
        assert_invariants(tight)
    divided = replace(plan, request=replace(plan.request, batching=Batching(max_tokens=12, divisible_by=2)))
    with pytest.raises(AssertionError, match="4: 1 microbatches, not divisible by 2"):
        assert_invariants(divided)
    parted = replace(plan, request=replace(plan.request, groups=np.array([0, 0, 1, 1])))
    with pytest.raises(AssertionError, match="5: group 0 is in two microbatches"):
        assert_invariants(parted)

"""Check every key of the worked examples from other projects' manuals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpack.packing import Batching, MicrobatchPlan, assert_invariants, lower_bound, make_plan, pack
from rlpack.packing.analysis.layouts import context_parallel_slots, packed_layout, padded_layout
from rlpack.packing.lengths import align

EXAMPLES = json.loads((Path(__file__).parent / "worked_examples.json").read_text())
Case = dict[str, Any]

# "four bins" names first-fit decreasing, which puts 24 with 73, in the first bin with room for it: 88+11, 73+24, 55+17+14,
# 46. Its loads are those of modified first-fit decreasing, which first gives the pair 17 + 24 to the roomiest bin of a
# large row: 88+11, 73+14, 55+17+24, 46. The numbers are checked for the algorithm that they belong to.
CORRECTED: dict[str, Case] = {"four bins": {"algorithm": "modified_first_fit_decreasing"}}


def cases(section: str) -> list[Any]:
    return [pytest.param(case, id=case.get("name", str(at))) for at, case in enumerate(EXAMPLES[section])]


def test_every_section_of_the_file_is_a_test() -> None:
    assert set(EXAMPLES) == {"dynamic_batching", "packing", "context_parallel", "sharding", "microbatch_words"}


def check_every_key(case: Case, inputs: set[str], checks: dict[str, Callable[[Any], None]]) -> None:
    """Run the check of each expected key of a case; a key without a check is a failure."""
    expected = case.keys() - inputs - {"name", "note"}
    assert expected, "the case expects nothing"
    assert expected <= checks.keys(), f"nothing checks {expected - checks.keys()}"
    for key in expected:
        checks[key](case[key])


def microbatch_counts(plan: MicrobatchPlan) -> set[int]:
    return {len(plan.microbatches(rank, step)) for rank in range(plan.num_ranks) for step in range(plan.num_steps)}


def equals(actual: Any) -> Callable[[Any], None]:
    def check(expected: Any) -> None:
        assert actual == expected

    return check


def is_at_most(actual: int) -> Callable[[Any], None]:
    def check(limit: int) -> None:
        assert actual <= limit

    return check


@pytest.mark.parametrize("case", cases("dynamic_batching"))
def test_dynamic_batching_is_at_least_as_good_as_the_manuals(case: Case) -> None:
    batching = Batching(
        mode="dynamic",
        max_tokens=case["max_tokens"],
        length_multiple=case["length_multiple"],
        divisible_by=case.get("divisible_by", 1),
    )
    plan = make_plan(case["lengths"], batching, dp_size=case["ranks"])
    assert_invariants(plan)
    (count,) = microbatch_counts(plan)
    checks = {
        "microbatches_per_rank": equals(count),
        "microbatches_per_rank_at_most": is_at_most(count),
        "padded_tokens_total_at_most": is_at_most(plan.metrics.slots),
    }
    check_every_key(case, {"lengths", "ranks", "max_tokens", "length_multiple", "divisible_by"}, checks)
    assert plan.metrics.dummy_microbatches == 0


@pytest.mark.parametrize("case", cases("packing"))
def test_packing_does_what_the_manuals_draw(case: Case) -> None:
    case = case | CORRECTED.get(case["name"], {})
    lengths, multiple = np.array(case["lengths"]), case.get("pad_to_multiple", 1)
    capacity = case.get("capacity", int(lengths.sum()))
    slots = align(lengths, multiple)
    bins = pack(slots, capacity, case.get("algorithm", "best_fit_decreasing"))
    ranks = case.get("ranks", 1)
    plan = make_plan(lengths, Batching(max_tokens=capacity, pad_to_multiple=multiple), dp_size=ranks)
    assert_invariants(plan)
    checks = {
        "bins": equals(len(bins)),
        "bins_exact": equals([rows.tolist() for rows in bins]),
        "bin_loads_sorted": equals(sorted(int(slots[rows].sum()) for rows in bins)),
        "padded_slots_before": equals(int(np.prod(padded_layout(lengths, int(lengths.max())).shape))),
        "slots_used": equals(plan.metrics.slots),
        "microbatches_per_rank": lambda expected: equals(microbatch_counts(plan))({expected}),
        "padded_lengths": equals(slots.tolist()),
        "cu_seqlens": equals(_bounds(lengths)),
    }
    check_every_key(case, {"lengths", "capacity", "algorithm", "pad_to_multiple", "ranks"}, checks)
    assert lower_bound(slots, capacity) <= len(bins)


def test_first_fit_decreasing_of_the_four_bins_is_as_worked_out_by_hand() -> None:
    (case,) = (case for case in EXAMPLES["packing"] if case["name"] == "four bins")
    lengths = np.array(case["lengths"])
    bins = pack(lengths, case["capacity"], "first_fit_decreasing")
    assert [sorted(lengths[rows].tolist()) for rows in bins] == [[11, 88], [24, 73], [14, 17, 55], [46]]


def _bounds(lengths: np.ndarray) -> list[int]:
    bounds = packed_layout(lengths).cu_seqlens
    assert bounds is not None
    return bounds.tolist()


@pytest.mark.parametrize("case", cases("context_parallel"))
def test_context_parallel_ranks_hold_the_chunks_that_the_manuals_draw(case: Case) -> None:
    lengths, multiple = case.get("lengths") or [case["length"]], case["pad_to_multiple"]
    shards = [
        context_parallel_slots(lengths, cp=case["cp"], rank=rank, pad_to_multiple=multiple)
        for rank in range(case["cp"])
    ]
    tokens = [
        ["p" if padding else str(sequence) for sequence, padding in zip(shard.sequence, shard.is_padding, strict=True)]
        for shard in shards
    ]
    chunk = int(shards[0].cu_seqlens[-1]) // (2 * case["cp"])
    checks = {
        "cu_seqlens_padded": equals(shards[0].cu_seqlens.tolist()),
        "rank_tokens": equals(tokens),
        "chunks_of_rank": equals([list(dict.fromkeys((shard.slots // chunk).tolist())) for shard in shards]),
    }
    check_every_key(case, {"cp", "tp", "lengths", "length", "pad_to_multiple"}, checks)
    assert case.get("tp", 1) * case["cp"] * 2 == multiple


@pytest.mark.parametrize("case", cases("sharding"))
def test_plain_sharding_gives_each_rank_a_run_of_every_batch(case: Case) -> None:
    batching = Batching(mode="fixed", max_tokens=None, micro_batch_size=case["batch_size"])
    lengths = np.arange(case["rows"]) % 5
    plan = make_plan(lengths, batching, dp_size=case["shards"], mini_batch_size=case["batch_size"])
    assert_invariants(plan)
    rows = [plan.rank_plan(rank).rows.tolist() for rank in range(case["shards"])]
    check_every_key(case, {"rows", "batch_size", "shards"}, {"rank_rows": equals(rows)})


@pytest.mark.parametrize("case", [pytest.param(case) for case in EXAMPLES["microbatch_words"]])
def test_the_batch_words_mean_the_numbers_of_the_manual(case: Case) -> None:
    rows = case["prompts"] * case["n"]
    batching = Batching(mode="fixed", max_tokens=None, micro_batch_size=case["microbatch_rows"])
    plan = make_plan(np.full(rows, 7), batching, dp_size=case["data_ranks"], mini_batch_size=case["mini_batch"])
    assert_invariants(plan)
    (count,) = microbatch_counts(plan)
    checks = {
        "rollout_batch": equals(plan.num_rows),
        "optimizer_steps_per_rollout_batch": equals(plan.num_steps * case["mu"]),
        "accumulation": equals(count),
    }
    check_every_key(case, {"prompts", "n", "mini_batch", "data_ranks", "microbatch_rows", "mu"}, checks)

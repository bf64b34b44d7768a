"""Tokens per data rank, against verl's own formula."""

import numpy as np
import pytest

from rlpack.packing import Batching, make_plan
from rlpack.packing.analysis.rank_loads import sequence_length_metrics


@pytest.mark.parametrize("mini_batch_size", [None, 8])
def test_loads_are_those_of_verl_where_the_ranks_divide_the_rows(mini_batch_size: int | None) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 24)
    plan = make_plan(lengths, Batching(max_tokens=128), dp_size=4, mini_batch_size=mini_batch_size)
    chunks = [sum(lengths[start : start + 6].tolist()) for start in range(0, 24, 6)]
    planned = [sum(lengths[plan.rank_plan(rank).rows].tolist()) for rank in range(4)]
    assert sequence_length_metrics(plan) == {
        "seqlen/min": min(chunks),
        "seqlen/max": max(chunks),
        "seqlen/mean": sum(chunks) / 4,
        "seqlen/minmax_diff": max(chunks) - min(chunks),
        "seqlen/balanced_min": min(planned),
        "seqlen/balanced_max": max(planned),
    }


def test_rows_that_the_plan_drops_and_cuts_don_t_count() -> None:
    lengths = [4, 90, 4, 4]
    dropped = make_plan(lengths, Batching(max_tokens=16, overlong="drop"), dp_size=2)
    assert sequence_length_metrics(dropped)["seqlen/max"] == 8
    cut = make_plan(lengths, Batching(max_tokens=16, overlong="truncate"), dp_size=2)
    assert sequence_length_metrics(cut)["seqlen/max"] == 20


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_ranks_may_have_no_rows(rows: int) -> None:
    metrics = sequence_length_metrics(make_plan([5] * rows, Batching(max_tokens=16), dp_size=4))
    assert (metrics["seqlen/min"], metrics["seqlen/balanced_min"]) == (0, 0)
    assert metrics["seqlen/mean"] == 5 * rows / 4

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.algorithms.aggregation import Denominators, count_denominators, row_sums, row_weights
from rlpack.algorithms.errors import AlgorithmError
from rlpack.batch.ragged import Ragged
from tests.unit.algorithms import reference

AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"]
masks = st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=12)


@st.composite
def steps(draw):
    """An optimizer step's masks, a loss for each token, and a split of its rows into microbatches in some order."""
    rows = draw(masks)
    losses = [draw(st.lists(st.floats(-3, 3, width=16), min_size=len(row), max_size=len(row))) for row in rows]
    order = draw(st.permutations(range(len(rows))))
    cuts = sorted(draw(st.sets(st.integers(1, len(rows)), max_size=4)))
    bounds = [0, *cuts, len(rows)]
    return rows, losses, [order[a:b] for a, b in pairwise(bounds)]


def weights_of(rows, aggregation, denominators):
    """Return the weight of every token: its row's where it counts, else 0."""
    mask = Ragged.from_rows(rows, torch.bool)
    of_row = row_weights(counts_of(rows), aggregation=aggregation, denominators=denominators)
    return of_row[mask.segment_ids] * mask.values


def counts_of(rows):
    return torch.tensor([sum(row) for row in rows], dtype=torch.int64)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_any_split_into_microbatches_sums_to_the_loss_of_a_loop_over_sequences(step, aggregation):
    rows, losses, microbatches = step
    denominators = count_denominators(counts_of(rows), constant=7.0)
    total = 0.0
    for members in microbatches:
        weights = weights_of([rows[i] for i in members], aggregation, denominators)
        values = Ragged.from_rows([losses[i] for i in members], torch.float32).values
        total += float((weights * values).sum())
    assert total == pytest.approx(reference.aggregate(losses, rows, aggregation, 7.0), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@given(rows=masks)
@settings(max_examples=40, deadline=None)
def test_weights_of_a_step_sum_to_one_and_are_zero_outside_the_mask(rows, aggregation):
    weights = weights_of(rows, aggregation, count_denominators(counts_of(rows)))
    flat = torch.tensor([token for row in rows for token in row], dtype=torch.bool)
    assert weights.sum().item() == pytest.approx(1.0 if flat.any() else 0.0, abs=1e-5)
    assert (weights[~flat] == 0).all()
    assert (weights[flat] > 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_any_counted_token_has_weights_of_exactly_zero(aggregation):
    rows = [[False, False], [], [False]]
    denominators = count_denominators(counts_of(rows), constant=4.0)
    assert (denominators.tokens, denominators.sequences) == (0, 0)
    assert row_weights(counts_of(rows), aggregation=aggregation, denominators=denominators).tolist() == [0, 0, 0]


def test_empty_rows_are_no_sequences():
    assert count_denominators(torch.tensor([2, 0, 0, 1]), constant=9.0) == Denominators(
        tokens=3.0, sequences=2.0, constant=9.0
    )


def test_a_microbatch_without_rows_has_no_weights():
    for aggregation in AGGREGATIONS:
        assert weights_of([], aggregation, Denominators(3, 2, 8)).shape == (0,)


@pytest.mark.parametrize("constant", [None, 0.0, -1.0, math.nan])
def test_sequence_sum_asks_for_its_constant(constant):
    with pytest.raises(AlgorithmError, match=r"algorithm\.aggregation_constant"):
        weights_of([[True]], "seq_mean_token_sum_norm", Denominators(1, 1, constant))


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(AlgorithmError, match="seq_mean_token_sum, seq_mean_token_sum_norm or token_sum"):
        weights_of([[True]], "mean", Denominators(1, 1))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_row_without_a_token_that_counts_weighs_nothing(aggregation):
    weights = row_weights(torch.tensor([0, 3]), aggregation=aggregation, denominators=Denominators(3, 1, 5.0))
    assert weights[0] == 0
    assert weights[1] > 0


def test_sums_of_rows_leave_out_what_is_masked_even_where_it_is_no_number():
    mask = Ragged.from_rows([[True, False], [], [False], [True, True]], torch.bool)
    values = torch.tensor([1.0, math.nan, math.inf, 0.25, 0.5])
    assert row_sums(values, mask).tolist() == [1.0, 0.0, 0.0, 0.75]

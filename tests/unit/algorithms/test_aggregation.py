import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.algorithms.aggregation import Denominators, count_denominators, token_weights
from rlpack.algorithms.errors import AlgorithmError
from rlpack.data.ragged import Ragged
from tests.unit.algorithms import reference

AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum"]
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
    mask = Ragged.from_rows(rows, torch.bool)
    return token_weights(mask.values, mask.lengths, aggregation=aggregation, denominators=denominators)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_any_split_into_microbatches_sums_to_the_loss_of_a_loop_over_sequences(step, aggregation):
    rows, losses, microbatches = step
    denominators = count_denominators(Ragged.from_rows(rows, torch.bool), constant=7.0)
    total = 0.0
    for members in microbatches:
        weights = weights_of([rows[i] for i in members], aggregation, denominators)
        values = Ragged.from_rows([losses[i] for i in members], torch.float32).values
        total += float((weights * values).sum())
    assert total == pytest.approx(reference.aggregate(losses, rows, aggregation, 7.0), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@given(rows=masks)
@settings(max_examples=40, deadline=None)
def test_weights_of_a_step_sum_to_one_and_are_zero_outside_the_mask(rows, aggregation):
    weights = weights_of(rows, aggregation, count_denominators(Ragged.from_rows(rows, torch.bool)))
    flat = torch.tensor([token for row in rows for token in row], dtype=torch.bool)
    assert weights.sum().item() == pytest.approx(1.0 if flat.any() else 0.0, abs=1e-5)
    assert (weights[~flat] == 0).all()
    assert (weights[flat] > 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_any_counted_token_has_weights_of_exactly_zero(aggregation):
    rows = [[False, False], [], [False]]
    denominators = count_denominators(Ragged.from_rows(rows, torch.bool), constant=4.0)
    assert (denominators.tokens, denominators.sequences) == (0, 0)
    assert weights_of(rows, aggregation, denominators).tolist() == [0, 0, 0]


def test_empty_rows_are_no_sequences():
    mask = Ragged.from_rows([[True, True], [False], [], [True]], torch.bool)
    assert count_denominators(mask, constant=9.0) == Denominators(tokens=3.0, sequences=2.0, constant=9.0)


def test_a_microbatch_without_rows_has_no_weights():
    for aggregation in AGGREGATIONS:
        assert weights_of([], aggregation, Denominators(3, 2, 8)).shape == (0,)


@pytest.mark.parametrize("constant", [None, 0.0, -1.0, math.nan])
def test_sequence_sum_asks_for_its_constant(constant):
    with pytest.raises(AlgorithmError, match=r"algorithm\.sequence_sum_constant"):
        weights_of([[True]], "sequence_sum", Denominators(1, 1, constant))


def test_an_unknown_aggregation_and_a_mask_of_numbers_are_refused():
    with pytest.raises(AlgorithmError, match="token_mean, sequence_mean or sequence_sum"):
        weights_of([[True]], "mean", Denominators(1, 1))
    with pytest.raises(AlgorithmError, match="bool"):
        token_weights(torch.ones(1), torch.tensor([1]), aggregation="token_mean", denominators=Denominators(1, 1))

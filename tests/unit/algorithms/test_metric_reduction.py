import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.metric_reduction import MetricAccumulator, merge_metrics, reducer_of

names = st.sampled_from(["actor/loss", "actor/ratio_max", "packing/length_min"])
parts = st.lists(st.dictionaries(names, st.floats(-1e6, 1e6)), max_size=8)


@given(parts=parts, seed=st.randoms())
@settings(max_examples=60, deadline=None)
def test_the_order_of_parts_never_shows(parts, seed):
    shuffled = list(parts)
    seed.shuffle(shuffled)
    assert merge_metrics(shuffled) == merge_metrics(parts)


def test_each_name_has_its_reducer():
    result = merge_metrics([{"a": 1.0, "b_max": 1.0, "c_min": 1.0}, {"a": 2.0, "b_max": 3.0, "c_min": 3.0}])
    assert result == {"a": 3.0, "b_max": 3.0, "c_min": 1.0}
    assert [reducer_of(name) for name in ("maximum", "x_max", "x_min", "max_x")] == ["sum", "max", "min", "sum"]


@pytest.mark.parametrize("name", ["a", "b_max", "c_min"])
def test_a_part_that_is_not_a_number_shows_in_the_whole(name):
    for parts in ([1.0, math.nan], [math.nan, 1.0]):
        assert math.isnan(merge_metrics([{name: value} for value in parts])[name])
    assert math.isnan(merge_metrics([{"a": math.inf}, {"a": -math.inf}])["a"])


def test_sums_take_tensors_of_any_type_without_their_graph():
    sums = MetricAccumulator()
    weight = torch.tensor(2.0, requires_grad=True)
    sums.add({"loss": weight * 0.25, "ratio_max": torch.tensor(1.5, dtype=torch.float64)})
    sums.add({"loss": 1.0})
    sums.add({"ratio_max": torch.tensor(3), "count": torch.tensor([2])})
    assert sums.result() == {"loss": 1.5, "ratio_max": 3.0, "count": 2.0}
    assert MetricAccumulator().result() == {}


@pytest.mark.parametrize("shape", [[3], [0], [1, 2]])
def test_a_metric_of_several_numbers_is_named_rather_than_read_as_others(shape):
    sums = MetricAccumulator()
    message = f"metric 'ratio' has the shape {shape}; a loss returns one number per metric; reduce it"
    with pytest.raises(AlgorithmError, match=re.escape(message)):
        sums.add({"kl": torch.tensor(0.01), "ratio": torch.ones(shape), "loss": torch.tensor(0.25)})
    assert sums.result() == {}


@pytest.mark.parametrize("value", ["hard", None, [1.0, 2.0], np.ones(2)])
def test_a_metric_that_is_no_number_is_named(value):
    with pytest.raises(AlgorithmError, match=r"metric 'level' is .*; a loss returns one number per metric"):
        MetricAccumulator().add({"level": value})
    sums = MetricAccumulator()
    sums.add({"level": np.float32(0.5)})
    assert sums.result() == {"level": 0.5}

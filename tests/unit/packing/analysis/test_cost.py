from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpack.packing import Cost, PackingError
from rlpack.packing.analysis.cost import integer_costs


def test_cost_is_linear_plus_quadratic() -> None:
    assert Cost(3.0, 0.5).of(np.array([0, 2, 10])).tolist() == [0.0, 8.0, 80.0]


@pytest.mark.parametrize("values", [(-1.0, 0.0), (1.0, float("nan")), (float("inf"), 0.0), (0.0, 0.0)])
def test_an_invalid_cost_is_rejected(values: tuple[float, float]) -> None:
    with pytest.raises(PackingError, match="cost"):
        Cost(*values)


@pytest.mark.parametrize("name", ["linear", "quadratic"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a", "is 'a', of type str; give a number"),
        (None, "is None, of type NoneType"),
        (True, "is True, of type bool"),
        (1e308, "is 1e\\+308; it has to be a finite number of at least 0 and at most 1e\\+280"),
        (10**400, "is inf; it has to be a finite number"),
    ],
)
def test_an_invalid_coefficient_is_rejected_with_its_key(name: str, value: Any, message: str) -> None:
    with pytest.raises(PackingError, match=f"cost.{name} {message}"):
        Cost(**{"linear": 1.0, name: value})


def test_the_largest_coefficients_give_finite_costs() -> None:
    costs = Cost(1e280, 1e280).of(np.array([0, 1, 2**31 - 1]))
    assert np.isfinite(costs).all()
    assert 2**31 <= integer_costs(costs)[2] <= 2**32


@given(weights=st.lists(st.floats(0, 1e30), min_size=1, max_size=30))
def test_integer_costs_keep_proportions(weights: list[float]) -> None:
    scaled = integer_costs(np.array(weights))
    assert scaled.dtype == np.int64
    assert scaled.max() <= 2**32
    if max(weights) > 0:
        assert scaled.max() >= 2**31
        assert np.allclose(scaled / scaled.max(), np.array(weights) / max(weights), atol=1e-9)


@pytest.mark.parametrize("weights", [np.zeros(3), np.zeros(0), np.array([], dtype=np.int64), np.array([2**40, 2**39])])
def test_integer_costs_accept_no_weights_and_large_integers(weights: np.ndarray) -> None:
    scaled = integer_costs(weights)
    assert scaled.shape == weights.shape
    assert scaled.max(initial=0) <= 2**32

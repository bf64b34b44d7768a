import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.packing import PackingError
from rlpack.packing.analysis.calibration import calibrate

coefficients = st.sampled_from([0.0, 1e-6, 3e-5, 2e-4])


@given(slot=coefficients, square=st.sampled_from([0.0, 1e-9, 5e-8]), microbatch=st.sampled_from([0.0, 0.01, 0.2]))
@settings(max_examples=40, deadline=None)
def test_it_finds_the_coefficients_that_made_the_times(slot: float, square: float, microbatch: float) -> None:
    random = np.random.default_rng(0)
    terms = np.stack([random.uniform(1e3, 1e5, 30), random.uniform(1e6, 1e9, 30), random.integers(1, 9, 30)], axis=1)
    steps = np.column_stack([terms, terms @ [slot, square, microbatch]])
    if slot == square == 0:
        with pytest.raises(PackingError, match="don't grow with their slots"):
            calibrate(steps)
        return
    calibration = calibrate(steps)
    assert (calibration.slot_s, calibration.square_s, calibration.microbatch_s) == pytest.approx(
        (slot, square, microbatch), abs=1e-12
    )
    assert calibration.explained == pytest.approx(1.0)


def test_noise_makes_no_coefficient_negative() -> None:
    random = np.random.default_rng(1)
    terms = np.stack([random.uniform(1e3, 1e5, 60), random.uniform(1e6, 1e9, 60), np.full(60, 4.0)], axis=1)
    calibration = calibrate(np.column_stack([terms, terms @ [1e-5, 0.0, 0.0] * random.uniform(0.9, 1.1, 60)]))
    assert min(calibration.slot_s, calibration.square_s, calibration.microbatch_s) >= 0
    assert calibration.slot_s == pytest.approx(1e-5, rel=0.1)
    assert 0.5 < calibration.explained < 1


def test_too_few_steps_are_rejected() -> None:
    with pytest.raises(PackingError, match="calibration has 3 steps with times; it needs at least 8"):
        calibrate(np.ones((3, 4)))

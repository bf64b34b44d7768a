import math

import pytest

from rlpack.config.sections.optimization import Optimizer
from rlpack.recipes.driver.learning_rate import learning_rate

PEAK = 3e-4


def rates(steps: int, **settings) -> list[float]:
    section = Optimizer(learning_rate=PEAK, **settings)
    return [learning_rate(section, step, steps) / PEAK for step in range(1, steps + 1)]


def test_a_constant_rate_does_not_change():
    assert rates(7) == [1.0] * 7


def test_a_linear_rate_falls_by_equal_amounts_and_would_be_zero_after_the_last_step():
    assert rates(5, schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(4, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_a_cosine_rate_follows_half_a_cosine():
    cosine = rates(6, schedule="cosine")
    assert cosine == pytest.approx(
        [math.cos(math.pi * part / 12) ** 2 for part in range(6)]
    )  # (1 + cos 2x) / 2 = cos² x
    assert cosine[3] == pytest.approx(0.5)
    assert rates(6, schedule="cosine", min_lr_ratio=0.1) == pytest.approx([0.1 + 0.9 * rate for rate in cosine])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warm_up_rises_in_equal_parts_to_the_peak_and_the_schedule_covers_the_remaining_steps(schedule: str):
    ramped = rates(10, schedule=schedule, warmup_steps=4)
    assert ramped[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert ramped[4:] == pytest.approx(rates(6, schedule=schedule))


@pytest.mark.parametrize(("steps", "fraction", "whole"), [(10, 0.4, 4), (9, 0.5, 4), (100, 0.29, 29), (2, 0.2, 0)])
def test_a_warm_up_below_one_is_a_fraction_of_the_steps_rounded_down(steps: int, fraction: float, whole: int):
    assert rates(steps, warmup_steps=fraction) == rates(steps, warmup_steps=whole)


def test_a_minimum_ratio_of_one_makes_any_schedule_constant():
    for schedule in ("linear", "cosine"):
        assert rates(5, schedule=schedule, min_lr_ratio=1.0) == pytest.approx([1.0] * 5)

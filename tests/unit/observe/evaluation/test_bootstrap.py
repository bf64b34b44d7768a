from itertools import product

import numpy as np
import pytest

from rlpack.observe.evaluation import bootstrap
from rlpack.observe.evaluation.bootstrap import bootstrap_intervals


def test_the_ends_are_those_of_all_possible_resamples():
    values = np.array([0.0, 1.0, 5.0, 2.0])
    everything = [np.mean(drawn) for drawn in product(values, repeat=4)]
    expected = np.quantile(everything, [0.025, 0.975])
    found = bootstrap_intervals(values[:, None], resamples=40_000, seed=3)[0]
    assert found == pytest.approx(expected, abs=0.26)  # means are multiples of a quarter
    assert found[0] < values.mean() < found[1]


def test_every_prompt_is_drawn_as_often_as_any_other():
    # The mean of an indicator of one of four prompts is binomial: P(X <= 2) = 0.949 and P(X <= 3) = 0.996.
    assert bootstrap_intervals(np.eye(4), resamples=20_000, seed=2).tolist() == [[0.0, 0.75]] * 4


def test_of_many_prompts_it_is_the_normal_interval():
    values = np.random.default_rng(0).normal(2.0, 3.0, 4000)
    half = 1.96 * values.std() / np.sqrt(4000)
    found = bootstrap_intervals(values[:, None], resamples=4000, seed=1)[0]
    assert found == pytest.approx([values.mean() - half, values.mean() + half], abs=0.08 * half)


def test_it_covers_the_true_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(2)
    covered = 0
    for seed in range(300):
        low, high = bootstrap_intervals(generator.random((60, 1)), resamples=300, seed=seed)[0]
        covered += low <= 0.5 <= high
    assert 0.89 <= covered / 300 <= 0.98


def test_it_depends_on_the_seed_alone_and_not_on_what_fits_into_memory(monkeypatch):
    values = np.random.default_rng(4).random((17, 3))
    first = bootstrap_intervals(values, resamples=100, seed=5)
    assert bootstrap_intervals(values, resamples=100, seed=5).tolist() == first.tolist()
    assert bootstrap_intervals(values, resamples=100, seed=6).tolist() != first.tolist()
    assert bootstrap_intervals(values[:, 1:2], resamples=100, seed=5)[0] == pytest.approx(first[1])
    monkeypatch.setattr(bootstrap, "_MOST_DRAWS", 40)
    assert bootstrap_intervals(values, resamples=100, seed=5) == pytest.approx(first)


def test_one_prompt_has_an_interval_of_no_width():
    assert bootstrap_intervals(np.array([[0.25]]), resamples=10, seed=1).tolist() == [[0.25, 0.25]]

from itertools import combinations

import numpy as np
import pytest

from rlpack.observe.evaluation.pass_at_k import default_k, pass_at_k, passing


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 8])
def test_it_is_the_share_of_all_sets_of_k_responses_in_which_one_passes(num_samples):
    passes = np.array([[row < count for row in range(num_samples)] for count in range(num_samples + 1)])
    for k in range(1, num_samples + 1):
        sets = list(combinations(range(num_samples), k))
        expected = [np.mean([any(row[i] for i in chosen) for chosen in sets]) for row in passes]
        assert pass_at_k(passes, k) == pytest.approx(expected, abs=1e-12)


def test_it_is_unbiased_for_responses_that_pass_independently():
    generator, rate, k = np.random.default_rng(0), 0.3, 3
    passes = generator.random((200_000, 6)) < rate
    assert pass_at_k(passes, k).mean() == pytest.approx(1 - (1 - rate) ** k, abs=2e-3)
    # The plug-in estimate 1 - (1 - c/n)^k is not, which the tolerance would show.
    assert abs((1 - (1 - passes.mean(1)) ** k).mean() - (1 - (1 - rate) ** k)) > 0.02


def test_k_of_one_is_the_pass_rate_and_k_of_n_is_the_best_of_n():
    passes = np.random.default_rng(1).random((50, 7)) < 0.2
    assert pass_at_k(passes, 1).tolist() == passes.mean(1).tolist()
    assert pass_at_k(passes, 7).tolist() == passes.max(1).astype(float).tolist()


def test_thousands_of_samples_do_not_overflow():
    passes = np.zeros((1, 4000), dtype=bool)
    passes[0, 17] = True
    assert pass_at_k(passes, 2000)[0] == pytest.approx(0.5, abs=1e-12)


def test_the_default_k_end_with_the_number_of_samples():
    assert [default_k(n) for n in (1, 2, 3, 4, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8, 12]]


def test_without_a_threshold_only_rewards_of_0_and_1_pass_or_fail():
    binary, graded = np.array([[0.0, 1.0]]), np.array([[0.5, 1.0]])
    assert passing(binary, [1.0], None).tolist() == [[False, True]]
    assert passing(graded, [1.0], None) is None
    assert passing(binary, [0.5], None) is None
    assert passing(graded, [0.2], 0.5).tolist() == [[True, True]]
    assert passing(np.array([[float(np.float32(0.7)), 0.6999]]), [], 0.7).tolist() == [[True, False]]
    assert passing(graded, [], 0.75).tolist() == [[False, True]]

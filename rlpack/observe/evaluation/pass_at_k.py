"""pass@k: the probability that at least one of k responses passes.

It is estimated from n ≥ k responses to each prompt, without bias (Chen et al. 2021, arXiv:2107.03374, eq. 1).
"""

from collections.abc import Sequence
from math import comb

import numpy as np


def pass_at_k(passes: np.ndarray, k: int) -> np.ndarray:
    """Return the unbiased estimate of pass@k of each prompt, float64 [P].

    With c of n responses passing, that is 1 - C(n - c, k) / C(n, k): the share of all sets of k responses that contain
    a passing one. The coefficients are whole numbers of any size, so only the quotient is rounded.

    >>> pass_at_k(np.array([[True, False, False], [False, False, False]]), 2).tolist()
    [0.6666666666666666, 0.0]

    Args:
        passes: whether each response passes, bool [P, n].
        k: from 1 to n.
    """
    num_samples = passes.shape[1]
    assert 1 <= k <= num_samples, f"k is {k}, of {num_samples} responses"
    sets = comb(num_samples, k)
    counts, of_prompt = np.unique(passes.sum(1), return_inverse=True)
    return np.array([(sets - comb(num_samples - count, k)) / sets for count in counts.tolist()])[of_prompt]


def default_k(num_samples: int) -> list[int]:
    """Return the powers of two up to the number of samples, and that number.

    >>> default_k(1), default_k(6), default_k(8)
    ([1], [1, 2, 4, 6], [1, 2, 4, 8])
    """
    powers = [1 << exponent for exponent in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


def passing(rewards: np.ndarray, others: Sequence[float], threshold: float | None) -> np.ndarray | None:
    """Return which responses pass, bool [P, n]; None if that is undefined.

    A response without a reward never passes, whatever the threshold.

    Args:
        rewards: rewards of the responses, float64 [P, n], NaN where there is none.
        others: rewards of further responses, such as the greedy ones.
        threshold: minimum reward of a passing response; None means 1, and is defined only if every reward is 0 or 1.
    """
    if threshold is not None:
        return rewards >= float(np.float32(threshold))  # rewards are float32, and float32(0.7) < 0.7
    given = np.concatenate((rewards.ravel(), others))
    is_binary = np.isin(given[~np.isnan(given)], (0.0, 1.0)).all()
    return rewards == 1.0 if is_binary else None

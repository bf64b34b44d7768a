"""Bootstrap intervals of means over prompts (Efron 1979): percentiles of the means of resampled prompts.

Prompts are resampled, not responses: responses to one prompt are not independent. The draws are a pure function of the
seed: only Philox words are used, which don't depend on the version of NumPy.
"""

import numpy as np

CONFIDENCE = 0.95
# Largest number of draws in memory: 32 MiB.
_MOST_DRAWS = 1 << 22


def bootstrap_intervals(values: np.ndarray, *, resamples: int, seed: int) -> np.ndarray:
    """Return the lower and upper ends of the 95 % intervals of means over prompts, float64 [S, 2].

    All statistics are computed on the same resampled prompts.

    >>> bootstrap_intervals(np.array([[1.0], [1.0]]), resamples=100, seed=1).tolist()
    [[1.0, 1.0]]

    Args:
        values: one value per prompt and statistic, float64 [P, S].
        resamples: number of resamples, each of P prompts with replacement.
        seed: seed of the draws.
    """
    num_prompts = len(values)
    generator = np.random.Philox(key=np.array([seed % (1 << 64), 0], dtype=np.uint64))
    at_once = max(1, _MOST_DRAWS // num_prompts)
    means = []
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        drawn = generator.random_raw(count * num_prompts) % np.uint64(num_prompts)
        cells = drawn.astype(np.int64) + np.repeat(np.arange(count), num_prompts) * num_prompts
        times_drawn = np.bincount(cells, minlength=count * num_prompts).reshape(count, num_prompts)
        means.append(times_drawn @ values / num_prompts)
    tail = (1 - CONFIDENCE) / 2
    return np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0).T

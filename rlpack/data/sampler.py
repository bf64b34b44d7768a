"""The prompt order and sample seeds of a run, as pure functions of seed and position.

There is no state between steps, so a resumed run continues at its position without replaying earlier steps. Results do
not depend on the NumPy version: only Philox words, SplitMix64 and a stable sort are used, which are fully specified.
"""

from functools import lru_cache

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = 1 << 64


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the row order of an epoch: `row_order`, read-only and cached for the next step."""
    order = row_order(seed, epoch, size)
    order.flags.writeable = False
    return order


def row_order(seed: int, number: int, size: int) -> np.ndarray:
    """Return a permutation of `size` rows, int64: they are sorted by Philox words keyed by seed and number.

    Philox is the counter-based generator of Salmon et al. (2011).

    >>> sorted(row_order(1, 0, 4).tolist())
    [0, 1, 2, 3]
    """
    words = np.random.Philox(key=np.array([seed % _WORD, number], dtype=np.uint64)).random_raw(size)
    return np.argsort(words, kind="stable")


def sampled_rows(seed: int, size: int, fraction: float) -> np.ndarray:
    """Return the rows of a fraction of a dataset, ascending int64, at least one.

    The rows of a smaller fraction are a subset of those of a larger one.

    >>> smaller, larger = sampled_rows(1, 10, 0.3), sampled_rows(1, 10, 0.5)
    >>> smaller.size, set(smaller) < set(larger), sampled_rows(1, 10, 1.0).tolist() == list(range(10))
    (3, True, True)
    """
    order = row_order(step_seed(seed, "fraction", 0), 0, size)
    return np.sort(order[: max(1, round(size * fraction))])


def prompt_positions(seed: int, size: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return epoch and row, int64 [count] each, of the run's prompts `start` to `start + count - 1`.

    Every epoch visits all rows once, in its own order; a step may span two epochs.

    >>> epochs, rows = prompt_positions(seed=1, size=2, start=1, count=3)
    >>> epochs.tolist(), sorted(rows[1:].tolist())
    ([0, 1, 1], [0, 1])

    Raises:
        ValueError: the dataset is empty, or start or count is negative.
    """
    if size < 1 or start < 0 or count < 0:
        raise ValueError(f"size={size}, start={start}, count={count}; need size > 0, start >= 0 and count >= 0")
    epochs, within = np.divmod(np.arange(start, start + count, dtype=np.int64), size)
    rows = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        rows[in_epoch] = epoch_order(seed, int(epoch), size)[within[in_epoch]]
    return epochs, rows


def splitmix64(state: np.ndarray) -> np.ndarray:
    """Return the SplitMix64 output (Steele, Lea and Flood 2014) of each state, uint64.

    >>> hex(splitmix64(np.zeros(1, dtype=np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    mixed = state + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def step_seed(seed: int, purpose: str, step: int) -> int:
    """Return a seed of 62 bits for one purpose in one step, a hash of the run's seed, the purpose and the step.

    >>> step_seed(1, "train", 2) == step_seed(1, "train", 2) != step_seed(1, "train", 3)
    True
    """
    words = [seed % _WORD, int.from_bytes(purpose.encode()[:8], "little"), step]
    mixed = np.zeros(1, dtype=np.uint64)
    for word in words:
        mixed = splitmix64(mixed ^ np.uint64(word))
    return int(mixed[0]) >> 2


def row_seeds(seed: int, step: int, positions: np.ndarray, samples: int) -> np.ndarray:
    """Return one seed per sample of each prompt, uint64 [len(positions) * samples], prompt by prompt.

    A seed is a hash of the run's seed, the step, the prompt's position (integers) and the sample number only: what a
    row generates does not depend on other rows or on its rank.

    >>> len(set(row_seeds(1, 0, np.arange(2), samples=3).tolist()))
    6
    """
    rows = np.repeat(np.asarray(positions).astype(np.uint64), samples)
    sample = np.tile(np.arange(samples, dtype=np.uint64), len(positions))
    mixed = splitmix64(np.full(rows.shape, seed % _WORD, dtype=np.uint64))
    for word in (np.full(rows.shape, step % _WORD, dtype=np.uint64), rows, sample):
        mixed = splitmix64(mixed ^ word)
    return mixed

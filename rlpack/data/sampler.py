"""Which prompt comes when, and the seed of every sample: pure functions of the run's seed and a position.

Nothing is carried from step to step, so a resumed run goes on at its position without replaying what came before.
Only operations whose results are fixed by their definition are used (Philox words, SplitMix64, a stable sort), so
another version of NumPy gives the same order.
"""

from functools import lru_cache

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = 1 << 64


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the order of epoch `epoch` through a dataset: a permutation of `size` rows, int64, read-only.

    Rows are sorted by words of Philox (Salmon et al., 2011) keyed by seed and epoch.

    >>> sorted(epoch_order(1, 0, 4).tolist())
    [0, 1, 2, 3]
    """
    words = np.random.Philox(key=np.array([seed % _WORD, epoch], dtype=np.uint64)).random_raw(size)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


def prompt_positions(seed: int, size: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return epoch and row (both int64 [count]) of the run's prompts `start` to `start + count - 1`.

    Every epoch goes through all rows once, in an order of its own; a step may cross from one epoch to the next.

    >>> epochs, rows = prompt_positions(seed=1, size=2, start=1, count=3)
    >>> epochs.tolist(), sorted(rows[1:].tolist())
    ([0, 1, 1], [0, 1])

    Raises:
        ValueError: the dataset is empty, or start or count is negative.
    """
    if size < 1 or start < 0 or count < 0:
        raise ValueError(f"size={size}, start={start}, count={count}; need a row at least, and no negative position")
    epochs, within = np.divmod(np.arange(start, start + count, dtype=np.int64), size)
    rows = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = epoch_order(seed, int(epoch), size)[within[here]]
    return epochs, rows


def splitmix64(state: np.ndarray) -> np.ndarray:
    """Return SplitMix64's output (Steele, Lea and Flood, 2014) for each state, uint64.

    >>> hex(splitmix64(np.zeros(1, dtype=np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    mixed = state + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def row_seeds(seed: int, step: int, positions: np.ndarray, samples: int) -> np.ndarray:
    """Return one seed for every sample of every prompt, uint64 [len(positions) * samples], a prompt's side by side.

    A seed is a hash of run seed, step, the prompt's position (whole numbers) and the sample, and of nothing else:
    what a row generates does not depend on its neighbours or on the rank it lands on.

    >>> len(set(row_seeds(1, 0, np.arange(2), samples=3).tolist()))
    6
    """
    rows = np.repeat(np.asarray(positions).astype(np.uint64), samples)
    sample = np.tile(np.arange(samples, dtype=np.uint64), len(positions))
    mixed = splitmix64(np.full(rows.shape, seed % _WORD, dtype=np.uint64))
    for word in (np.full(rows.shape, step % _WORD, dtype=np.uint64), rows, sample):
        mixed = splitmix64(mixed ^ word)
    return mixed

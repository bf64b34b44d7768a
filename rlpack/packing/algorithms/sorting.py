"""Orders of rows: radix sorts, which are faster than NumPy's on int64, and a seeded shuffle."""

import numpy as np

# NumPy radix-sorts 16-bit integers, in linear time; wider ones are sorted digit by digit, the lowest first.
_DIGIT_BITS = 16


def ascending(values: np.ndarray) -> np.ndarray:
    """Return rows by increasing value, int64 [B]; ties keep their order.

    >>> ascending(np.array([3, 0, 2**40, 0])).tolist()
    [1, 3, 0, 2]

    Args:
        values: integers of at least 0, int64 [B].
    """
    highest = int(values.max(initial=0))
    order = np.argsort(values.astype(np.uint16), kind="stable")
    for shift in range(_DIGIT_BITS, highest.bit_length(), _DIGIT_BITS):
        digits = (values >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def decreasing(values: np.ndarray) -> np.ndarray:
    """Return rows by decreasing value, int64 [B]; ties keep their order.

    >>> decreasing(np.array([3, 5, 3])).tolist()
    [1, 0, 2]
    """
    return ascending(int(values.max(initial=0)) - values)


def by_first_row(labels: np.ndarray) -> np.ndarray:
    """Renumber labels in the order of their first rows, int64 [B].

    >>> by_first_row(np.array([7, 3, 7, 5])).tolist()
    [0, 1, 0, 2]
    """
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(first.size)
    return rank[inverse]


def shuffled(count: int, seed: int) -> np.ndarray:
    """Return a permutation of `count` rows that depends on `seed` alone.

    The permutation is the same on every machine and NumPy release: rows are sorted by SplitMix64 (Steele, Lea and
    Flood, OOPSLA 2014) of seed and row.
    """
    mask = 0xFFFFFFFFFFFFFFFF
    key = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & mask)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(key ^ (key >> np.uint64(31)), kind="stable")

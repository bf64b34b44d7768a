"""Seeded traces of lengths, for measuring plans and sizing a cluster without data.

The first four resemble rollouts and documents; the others are known to be hard to pack.
"""

from collections.abc import Callable

import numpy as np

from rlpack.packing.errors import PackingError
from rlpack.packing.lengths import check_count, check_seed

# Planning this many rows takes seconds and a gigabyte.
MAX_ROWS = 2**24


def zipf(random: np.random.Generator, rows: int, longest: int) -> np.ndarray:
    """Return multiples of 64 from a Zipf distribution.

    The exponent is 1.5: mostly short lengths, with a very long tail.
    """
    return 64 * np.minimum(random.zipf(1.5, rows), longest)


def lognormal(random: np.random.Generator, rows: int, longest: int) -> np.ndarray:
    """Return log-normal lengths with a median of a sixteenth of the longest."""
    return random.lognormal(np.log(max(1.0, longest / 16)), 1.0, rows)


def bimodal(random: np.random.Generator, rows: int, longest: int) -> np.ndarray:
    """Return short answers, one in five with a long chain of thought."""
    short, long = random.normal(longest / 24, longest / 96, rows), random.normal(0.7 * longest, 0.12 * longest, rows)
    return np.where(random.random(rows) < 0.8, short, long)


def prompt_groups(random: np.random.Generator, rows: int, longest: int) -> np.ndarray:
    """Return groups of eight consecutive samples whose lengths follow their prompt's difficulty."""
    difficulty = random.lognormal(np.log(max(1.0, longest / 16)), 0.9, -(-rows // 8))
    return np.repeat(difficulty, 8)[:rows] * random.lognormal(0.0, 0.3, rows)


def uniform(random: np.random.Generator, rows: int, longest: int) -> np.ndarray:
    """Return uniform lengths from 1 to the longest."""
    return random.integers(1, longest + 1, rows)


def johnson(random: np.random.Generator, rows: int, longest: int) -> np.ndarray:
    """Return the worst case of first- and best-fit decreasing (Johnson, 1973), shuffled.

    Both algorithms need 11/9 of the optimal number of bins. The intended capacity is 2 · (longest − e), where e is a
    thousandth of the capacity; 30·m rows fit into 9·m bins.
    """
    capacity = _johnson_capacity(longest)
    grain = max(1, capacity // 1000)
    sizes = [capacity // 2 + grain, capacity // 4 + 2 * grain, capacity // 4 + grain, capacity // 4 - 2 * grain]
    return random.permutation(np.resize(np.repeat(sizes, [6, 6, 6, 12]), rows))


def _johnson_capacity(longest: int) -> int:
    return 1000 * max(1, longest // 501)


def triplets(random: np.random.Generator, rows: int, longest: int) -> np.ndarray:
    """Return shuffled triplets that exactly fill bins (Falkenauer, 1996).

    The intended capacity of a bin is twice the longest length.
    """
    capacity, count = 2 * longest, -(-rows // 3)
    first = random.integers(int(0.38 * capacity), max(int(0.38 * capacity) + 1, longest), count)
    low, rest = capacity // 4 + 1, capacity - first
    second = low + (random.random(count) * np.maximum(rest - 2 * low, 0)).astype(np.int64)
    return random.permutation(np.concatenate((first, second, rest - second)))[:rows]


TRACES: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "zipf": zipf,
    "lognormal": lognormal,
    "bimodal": bimodal,
    "prompt_groups": prompt_groups,
    "uniform": uniform,
    "johnson": johnson,
    "triplets": triplets,
}
REALISTIC = ("zipf", "lognormal", "bimodal", "prompt_groups")


def trace(name: str, rows: int, longest: int, *, seed: int = 0) -> np.ndarray:
    """Return `rows` lengths from 1 to `longest`, int64 [rows].

    The same arguments give the same lengths.

    >>> trace("uniform", 4, longest=9, seed=1)
    array([5, 5, 7, 9])

    Raises:
        PackingError: the trace is unknown, a count is below 1 or above its limit, or the seed is negative.
    """
    if name not in TRACES:
        raise PackingError(f"trace is {name!r}; choose one of {', '.join(TRACES)}")
    check_count(rows, "rows", MAX_ROWS)
    check_count(longest, "longest")
    if check_seed(seed) < 0:
        raise PackingError(f"seed is {seed}; it has to be at least 0")
    random = np.random.Generator(np.random.PCG64(seed))
    return np.clip(TRACES[name](random, rows, longest), 1, longest).astype(np.int64)

"""Best-fit: each row goes into the bin where it leaves the least free room.

Bins are kept in buckets by free room, each a linked list. A bitset marks the non-empty buckets, and each bit of the
next level up marks 64 bits of which at least one is set. The next non-empty bucket is found with one lookup per level,
of which there are three for a capacity of 262,143.
"""

import math

import numpy as np

from rlpack.packing.algorithms.jit import compiled


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each row, by best-fit in row order, int64 [B]; bins are numbered in order of opening."""
    words = [-(-(capacity + 1) // 64)]
    while words[-1] > 1:
        words.append(-(-words[-1] // 64))
    starts = np.concatenate(([0], np.cumsum(words)))
    return _best_fit(sizes, capacity, np.zeros(starts[-1], dtype=np.uint64), starts)


@compiled
def _best_fit(sizes: np.ndarray, capacity: int, bits: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the bin of each row; `bits` concatenates all levels; level l starts at `starts[l]`."""
    labels = np.zeros(sizes.size, dtype=np.int64)
    first = np.zeros(capacity + 1, dtype=np.int32)  # number of the bucket's first bin, plus one; 0 is none
    after = np.zeros(sizes.size + 2, dtype=np.int32)
    bins = 0
    for row in range(sizes.size):
        free = _next_filled(bits, starts, int(sizes[row]))
        if free >= 0:
            label = first[free]
            first[free] = after[label]
            if first[free] == 0:
                _clear(bits, starts, free)
        else:
            bins += 1
            free, label = capacity, bins
        labels[row] = label - 1
        free -= int(sizes[row])
        if first[free] == 0:
            _mark(bits, starts, free)
        after[label] = first[free]
        first[free] = label
    return labels


@compiled
def _next_filled(bits: np.ndarray, starts: np.ndarray, bucket: int) -> int:
    """Return the first marked bucket at or after `bucket`, or −1."""
    level, at = 0, bucket
    while level + 1 < starts.size:
        word = starts[level] + (at >> 6)
        if word < starts[level + 1]:
            marks = bits[word] >> np.uint64(at & 63)
            if marks != 0:
                at += _lowest(marks)
                for below in range(level - 1, -1, -1):
                    at = (at << 6) + _lowest(bits[starts[below] + at])
                return at
        level, at = level + 1, (at >> 6) + 1
    return -1


@compiled
def _lowest(marks: int) -> int:
    """Return the position of the lowest set bit, by way of a float, which represents powers of two exactly."""
    return math.frexp(float(marks & (~marks + np.uint64(1))))[1] - 1


@compiled
def _mark(bits: np.ndarray, starts: np.ndarray, bucket: int) -> None:
    """Set a bucket's bit; if it is the first in its word, also set the bit above it, and so on up the levels."""
    at = bucket
    for level in range(starts.size - 1):
        word = starts[level] + (at >> 6)
        before = bits[word]
        bits[word] = before | (np.uint64(1) << np.uint64(at & 63))
        if before != 0:
            break
        at >>= 6


@compiled
def _clear(bits: np.ndarray, starts: np.ndarray, bucket: int) -> None:
    """Clear a bucket's bit; if it was the last in its word, also clear the bit above it, and so on up the levels."""
    at = bucket
    for level in range(starts.size - 1):
        word = starts[level] + (at >> 6)
        bits[word] = bits[word] & ~(np.uint64(1) << np.uint64(at & 63))
        if bits[word] != 0:
            break
        at >>= 6

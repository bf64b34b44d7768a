"""Layouts: the slot of each token of a microbatch, by index arithmetic alone.

Invariants:

1. Every real token has its own slot, in row order, or the slot of an equal token at the same position in another row.
2. In a packed row the segments cover every slot, and no segment holds two sequences.
3. Each slot of a packed row is on exactly one rank of a context-parallel group, and all ranks hold equally many slots.

`tests/unit/packing/analysis/test_layouts.py` asserts them.
"""

from dataclasses import dataclass

import numpy as np

from rlpack.packing.errors import PackingError
from rlpack.packing.lengths import Integers, align, check_count, check_lengths


@dataclass(frozen=True, eq=False)
class Layout:
    """The slots of one microbatch.

    Attributes:
        shape: shape of the model inputs: (1, length) if packed, (rows, length) if padded.
        slots: position of each real token in the flattened `shape`, in row order, int64 [T].
        position_ids: int64 of `shape`; they restart at each sequence.
        cu_seqlens: bounds of the segments, int32 [S+1], from 0 to the last slot; None if padded.
        max_seqlen: slots of the longest segment.
        key_lengths: number of keys of each segment, int64 [S]; None if the keys are the segment's own slots.
        key_slots: slots of the keys of all segments, int64 [Σ key_lengths]; None if the keys are the segments' own
            slots.
    """

    shape: tuple[int, int]
    slots: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray | None
    max_seqlen: int
    key_lengths: np.ndarray | None = None
    key_slots: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class ContextParallelSlots:
    """The part of a packed row on one context-parallel rank.

    Attributes:
        slots: this rank's slots, as indices into the whole packed row, in local order, int64 [T / cp].
        sequence: sequence of each slot, int64 [T / cp].
        is_padding: whether a slot holds no real token, bool [T / cp].
        cu_seqlens: bounds of the sequences in the whole row, alignment included, int32 [S+1].
        local_cu_seqlens: the same on this rank, int32 [S+1].
    """

    slots: np.ndarray
    sequence: np.ndarray
    is_padding: np.ndarray
    cu_seqlens: np.ndarray
    local_cu_seqlens: np.ndarray


def runs(lengths: np.ndarray) -> np.ndarray:
    """Return the positions within each run, counted from 0, int64 [Σ lengths].

    >>> runs(np.array([3, 0, 2])).tolist()
    [0, 1, 2, 0, 1]
    """
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def packed_layout(lengths: Integers, *, pad_to_multiple: int = 1, length: int | None = None) -> Layout:
    """Return the layout of sequences packed into one row of `length` slots.

    A sequence's alignment padding belongs to its segment; the padding up to `length` is a separate segment.

    >>> packed_layout([3, 0, 2], length=6).cu_seqlens.tolist()
    [0, 3, 3, 5, 6]

    Args:
        lengths: tokens of each row; empty for a dummy microbatch.
        pad_to_multiple: multiple that the slots of each sequence are rounded up to.
        length: slots of the whole row; None for as many as needed.

    Raises:
        PackingError: the sequences don't fit.
    """
    counts = check_lengths(lengths)
    segments = align(counts, check_count(pad_to_multiple, "pad_to_multiple"))
    used = int(segments.sum())
    width = used if length is None else length
    if used > width:
        raise PackingError(f"{counts.size} sequences take {used} slots, over the length of {width}; raise the length")
    slots = np.repeat(np.cumsum(segments) - segments, counts) + runs(counts)
    if width > used:
        segments = np.append(segments, width - used)
    bounds = np.concatenate(([0], np.cumsum(segments))).astype(np.int32)
    return Layout((1, width), slots, runs(segments).reshape(1, width), bounds, int(segments.max(initial=0)))


def shared_layout(lengths: np.ndarray, shared: np.ndarray, owners: np.ndarray, length: int) -> Layout:
    """Return the layout of sequences packed into one row, where a sequence may begin with the tokens of another.

    The first `shared` tokens of a sequence use the slots of its owner's tokens. Its remaining tokens form a segment
    whose keys are those of the whole sequence.

    >>> layout = shared_layout(np.array([3, 4]), np.array([0, 2]), np.array([0, 0]), 5)
    >>> layout.slots.tolist(), layout.cu_seqlens.tolist(), layout.key_lengths.tolist(), layout.key_slots.tolist()
    ([0, 1, 2, 0, 1, 3, 4], [0, 3, 5], [3, 4], [0, 1, 2, 0, 1, 3, 4])

    Args:
        lengths: tokens of each sequence, int64 [n].
        shared: leading tokens of each that its owner holds, int64 [n]; at most as many as the owner has.
        owners: index of the sequence that holds them, which itself shares nothing, int64 [n].
        length: slots of the whole row.

    Raises:
        PackingError: the sequences don't fit.
    """
    own = lengths - shared
    used = int(own.sum())
    if used > length:
        raise PackingError(f"{own.size} sequences take {used} slots, over the length of {length}; raise the length")
    starts, within = np.cumsum(own) - own, runs(lengths)
    sequence = np.repeat(np.arange(own.size), lengths)
    is_shared = within < shared[sequence]
    slots = np.where(is_shared, starts[owners[sequence]], (starts - shared)[sequence]) + within
    has_slots = own > 0  # a sequence may consist of shared tokens alone
    padding = np.arange(used, length)
    rest = [padding.size] if padding.size else []
    segments, keys = np.append(own[has_slots], rest).astype(int), np.append(lengths[has_slots], rest).astype(int)
    return Layout(
        shape=(1, length),
        slots=slots,
        position_ids=np.append(within[~is_shared], padding - used).reshape(1, length),
        cu_seqlens=np.concatenate(([0], np.cumsum(segments))).astype(np.int32),
        max_seqlen=int(segments.max()),
        key_lengths=keys,
        key_slots=np.append(slots[has_slots[sequence]], padding),
    )


def padded_layout(lengths: Integers, length: int) -> Layout:
    """Return the layout of one sequence per row, right-padded to `length` slots; one empty row without sequences.

    >>> padded_layout([1, 2], 3).slots.tolist()
    [0, 3, 4]

    Raises:
        PackingError: a sequence is longer than `length`.
    """
    counts = check_lengths(lengths)
    if counts.max(initial=0) > length:
        row = int(np.argmax(counts))
        raise PackingError(f"sequence {row} has {counts[row]} tokens, over the length of {length}; raise the length")
    shape = (max(1, counts.size), length)
    slots = np.repeat(np.arange(counts.size) * length, counts) + runs(counts)
    return Layout(shape, slots, np.tile(np.arange(length), (shape[0], 1)), None, length)


def context_parallel_slots(lengths: Integers, *, cp: int, rank: int, pad_to_multiple: int) -> ContextParallelSlots:
    """Return the slots of a packed row on one context-parallel rank.

    A sequence is cut into 2·cp chunks, and rank r holds chunks r and 2·cp−1−r, so that causal attention costs every
    rank the same.

    >>> context_parallel_slots([5], cp=2, rank=0, pad_to_multiple=4).slots.tolist()
    [0, 1, 6, 7]

    Raises:
        PackingError: `pad_to_multiple` is not a multiple of 2·cp, or the rank is outside the group.
    """
    counts, group = check_lengths(lengths), check_count(cp, "cp")
    multiple = check_count(pad_to_multiple, "pad_to_multiple")
    if group > 1 and multiple % (2 * group):
        raise PackingError(f"pad_to_multiple is {multiple}; context parallelism over {group} needs a multiple of 2·cp")
    if not 0 <= rank < group:
        raise PackingError(f"context-parallel rank is {rank}; it has to be between 0 and {group - 1}")
    segments = align(counts, multiple)
    bounds = np.concatenate(([0], np.cumsum(segments)))
    local = segments // group
    within = runs(local)
    sequence = np.repeat(np.arange(counts.size), local)
    if group > 1:
        chunk = np.maximum(segments // (2 * group), 1)[sequence]
        chunk_number = np.where(within < chunk, rank, 2 * group - 1 - rank)
        within = chunk_number * chunk + within % chunk
    return ContextParallelSlots(
        slots=bounds[sequence] + within,
        sequence=sequence,
        is_padding=within >= counts[sequence],
        cu_seqlens=bounds.astype(np.int32),
        local_cu_seqlens=np.concatenate(([0], np.cumsum(local))).astype(np.int32),
    )

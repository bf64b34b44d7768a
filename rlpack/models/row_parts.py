"""The part of a microbatch's slots that a rank runs the model on, with context or tensor parallelism.

A microbatch is one packed row; padded rows are laid end to end, each as a segment. There are two ways to cut it
(`actor.parallel.cp_method`):

- `ulysses`: equal contiguous parts of the row, regardless of where its sequences begin.
- `all_gather`: each sequence is padded to a multiple of 2·cp slots and cut into 2·cp chunks, and rank r holds chunks r
  and 2·cp−1−r of each. A chunk attends to all earlier ones, so every rank computes the same number of scores.

Invariants:

1. Every slot of the microbatch is on one rank.
2. The ranks hold equal numbers of slots.
3. Positions, labels, masks and loss weights are read from the whole microbatch, so they follow a token to its rank.

`tests/unit/models/test_row_parts.py` asserts them.

Letters: N slots of the microbatch, T slots after padding, t = T / cp slots of a part, S sequences.
"""

from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import torch
from torch import Tensor

from rlpack.models.attention import SegmentKeys, Segments
from rlpack.models.context_parallel import RowSplit
from rlpack.models.inputs import ModelInputs
from rlpack.packing.analysis.layouts import context_parallel_slots, runs


@dataclass(frozen=True)
class RowPart:
    """A rank's part of a microbatch.

    Attributes:
        input_ids: int64 [1, t].
        position_ids: int64 [1, t].
        packed: the segments that attention needs.
        places: int64 [N], the place in this part of each slot of the microbatch; -1 if another rank has it.
    """

    input_ids: Tensor
    position_ids: Tensor
    packed: Segments
    places: Tensor

    @classmethod
    def of(cls, inputs: ModelInputs, split: RowSplit) -> "RowPart":
        """Return this rank's part of a microbatch."""
        cut = _chunks if split.method == "all_gather" and split.num_ranks > 1 else _contiguous
        return cut(inputs, split)


def own_places(part: RowPart | None, slots: Tensor) -> tuple[Tensor | slice, Tensor]:
    """Return an index that selects a rank's own slots among the given ones, and their places in its part.

    Args:
        part: None if the rank runs all slots.
        slots: int64, of the microbatch.
    """
    if part is None:
        return slice(None), slots
    places = part.places[slots]
    own = (places >= 0).nonzero()[:, 0]
    return own, places[own]


def _contiguous(inputs: ModelInputs, split: RowSplit) -> RowPart:
    """Return an equal contiguous part, after padding at the end of the row."""
    num_slots, device = inputs.input_ids.numel(), inputs.input_ids.device
    extra = -num_slots % (split.num_ranks * split.multiple)
    tail = torch.arange(extra, device=device)
    size = (num_slots + extra) // split.num_ranks
    own = slice(split.rank * size, (split.rank + 1) * size)
    places = torch.arange(num_slots, device=device) - own.start
    return RowPart(
        input_ids=torch.cat([inputs.input_ids.flatten(), torch.zeros_like(tail)])[None, own],
        position_ids=torch.cat([inputs.position_ids.flatten(), tail])[None, own],
        packed=replace(_with_padding(inputs, extra), split=split),
        places=torch.where((places >= 0) & (places < size), places, -1),
    )


def _chunks(inputs: ModelInputs, split: RowSplit) -> RowPart:
    """Return this rank's two chunks of each sequence, and the keys that they see."""
    num_slots, device, unit = inputs.input_ids.numel(), inputs.input_ids.device, 2 * split.num_ranks
    lengths = np.array(_lengths(inputs), dtype=np.int64)
    extra = int(-(lengths + -lengths % unit).sum() % (split.num_ranks * lcm(2, split.multiple)))
    lengths = np.append(lengths, extra)
    of_ranks = [
        context_parallel_slots(lengths, cp=split.num_ranks, rank=rank, pad_to_multiple=unit)
        for rank in range(split.num_ranks)
    ]
    own = of_ranks[split.rank]
    # Padding repeats the last token of its sequence, whose position every model has.
    within = np.minimum(own.slots - own.cu_seqlens[own.sequence], lengths[own.sequence] - 1)
    sources = (np.cumsum(lengths) - lengths)[own.sequence] + within
    places = np.full(num_slots + extra, -1)
    places[sources[~own.is_padding]] = np.flatnonzero(~own.is_padding)
    index = torch.from_numpy(sources).to(device)
    tail = torch.arange(extra, device=device)
    chunks = np.diff(own.cu_seqlens) // unit
    gathered = _keys(chunks, own.cu_seqlens[:-1], np.concatenate([part.slots for part in of_ranks]), split, device)
    return RowPart(
        input_ids=torch.cat([inputs.input_ids.flatten(), torch.zeros_like(tail)])[index][None],
        position_ids=torch.cat([inputs.position_ids.flatten(), tail])[index][None],
        packed=replace(Segments.from_lengths(np.repeat(chunks, 2).tolist(), device), keys=gathered),
        places=torch.from_numpy(places[:num_slots]).to(device),
    )


def _keys(
    chunks: np.ndarray, starts: np.ndarray, gathered: np.ndarray, split: RowSplit, device: torch.device
) -> SegmentKeys:
    """Return the keys of each of this rank's chunks: those of its sequence up to the chunk's end.

    Args:
        chunks: slots of a chunk of each sequence, int64 [S].
        starts: first slot of each sequence, int64 [S].
        gathered: the slots of all ranks, rank by rank, int64 [T].
        split: the group.
        device: device of the result.
    """
    numbers = np.array([split.rank, 2 * split.num_ranks - 1 - split.rank])
    lengths = (chunks[:, None] * (numbers + 1)).flatten()
    slots = np.repeat(np.repeat(starts, 2), lengths) + runs(lengths)
    places = np.empty_like(gathered)
    places[gathered] = np.arange(gathered.size)
    return SegmentKeys(
        Segments.from_lengths(lengths.tolist(), device), torch.from_numpy(places[slots]).to(device), split
    )


def _with_padding(inputs: ModelInputs, extra: int) -> Segments:
    """Return the segments of a microbatch as one row, and one of `extra` slots at its end."""
    device = inputs.input_ids.device
    segments = Segments.from_lengths([*_lengths(inputs), extra], device)
    if inputs.packed is None or (keys := inputs.packed.keys) is None:
        return segments
    lengths = [*keys.segments.lengths, extra]
    places = torch.cat([keys.places, inputs.input_ids.numel() + torch.arange(extra, device=device)])
    return replace(segments, keys=SegmentKeys(Segments.from_lengths(lengths, device), places))


def _lengths(inputs: ModelInputs) -> list[int]:
    """Return the slots of each segment of a packed row, or of each padded row."""
    num_rows, width = inputs.input_ids.shape
    return [width] * num_rows if inputs.packed is None else list(inputs.packed.lengths)

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpack.packing import PackingError
from rlpack.packing.analysis.layouts import context_parallel_slots, packed_layout, padded_layout

row_lengths = st.lists(st.integers(0, 20), max_size=12)


@given(lengths=row_lengths, multiple=st.integers(1, 9), tail=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_a_packed_row_gives_every_token_its_slot_and_every_slot_a_segment(
    lengths: list[int], multiple: int, tail: int
) -> None:
    aligned = [-(-length // multiple) * multiple for length in lengths]
    width = sum(aligned) + tail
    layout = packed_layout(lengths, pad_to_multiple=multiple, length=width)
    slots, positions, bounds, start = [], [], [0], 0
    for length, segment in zip(lengths, aligned, strict=True):
        slots += [start + at for at in range(length)]
        positions += list(range(segment))
        start += segment
        bounds.append(start)
    if tail:
        positions += list(range(tail))
        bounds.append(width)
    assert layout.cu_seqlens is not None
    assert (layout.shape, layout.cu_seqlens.dtype) == ((1, width), np.int32)
    assert layout.slots.tolist() == slots
    assert layout.position_ids.tolist() == [positions]
    assert layout.cu_seqlens.tolist() == bounds
    assert layout.max_seqlen == max([*aligned, tail], default=0)


@given(lengths=row_lengths, more=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_padded_rows_are_padded_on_the_right(lengths: list[int], more: int) -> None:
    width = max(lengths, default=0) + more
    layout = padded_layout(lengths, width)
    assert layout.slots.tolist() == [row * width + at for row, length in enumerate(lengths) for at in range(length)]
    assert layout.position_ids.tolist() == [list(range(width))] * max(1, len(lengths))
    assert (layout.shape, layout.cu_seqlens) == ((max(1, len(lengths)), width), None)


def test_a_dummy_microbatch_has_slots_but_no_tokens() -> None:
    packed, padded = packed_layout([], length=4), padded_layout([], 4)
    assert packed.cu_seqlens is not None
    assert (packed.shape, packed.slots.size, packed.cu_seqlens.tolist()) == ((1, 4), 0, [0, 4])
    assert (padded.shape, padded.slots.size) == ((1, 4), 0)


@given(lengths=row_lengths, cp=st.integers(1, 4), more=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_context_parallel_ranks_share_the_slots_of_every_sequence_evenly(
    lengths: list[int], cp: int, more: int
) -> None:
    multiple = 2 * cp * more
    shards = [context_parallel_slots(lengths, cp=cp, rank=rank, pad_to_multiple=multiple) for rank in range(cp)]
    whole = packed_layout(lengths, pad_to_multiple=multiple)
    assert sorted(np.concatenate([shard.slots for shard in shards]).tolist()) == list(range(whole.shape[1]))
    tokens = np.concatenate([shard.slots[~shard.is_padding] for shard in shards])
    assert sorted(tokens.tolist()) == whole.slots.tolist()
    for rank, shard in enumerate(shards):
        assert (shard.cu_seqlens == cp * shard.local_cu_seqlens).all()
        for sequence, (start, stop) in enumerate(zip(shard.cu_seqlens, shard.cu_seqlens[1:], strict=False)):
            chunks = np.arange(start, stop).reshape(2 * cp, -1)
            expected = np.concatenate((chunks[rank], chunks[2 * cp - 1 - rank])) if cp > 1 else chunks.ravel()
            assert shard.slots[shard.sequence == sequence].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: packed_layout([3, 4], length=6), "2 sequences take 7 slots, over the length of 6"),
        (lambda: padded_layout([3, 4], 3), "sequence 1 has 4 tokens, over the length of 3"),
        (lambda: context_parallel_slots([4], cp=2, rank=0, pad_to_multiple=6), "needs a multiple of 2·cp"),
        (lambda: context_parallel_slots([4], cp=2, rank=2, pad_to_multiple=4), "between 0 and 1"),
        (lambda: packed_layout([3], pad_to_multiple=0), "pad_to_multiple is 0"),
    ],
)
def test_sequences_that_do_not_fit_are_rejected(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(PackingError, match=message):
        call()

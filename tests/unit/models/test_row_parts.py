"""The parts of a microbatch on the ranks that share it, without processes: what each holds, sees and computes."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlpack.models.attention import _attend_packed, _Options
from rlpack.models.attention_masks import query_blocks
from rlpack.models.context_parallel import RowSplit
from rlpack.models.inputs import ModelInputs, pack_rows
from rlpack.models.row_parts import RowPart, own_places
from tests.unit.models.test_attention import slow_attention, states
from tests.unit.models.tiny import pad_rows

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/worked_examples.json").read_text())["context_parallel"]
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any)


def parts_of(inputs: ModelInputs, ranks: int, multiple: int = 1, method="all_gather") -> list[RowPart]:
    return [RowPart.of(inputs, RowSplit(None, rank, ranks, multiple, method)) for rank in range(ranks)]


def numbered(lengths: list[int]) -> list[Tensor]:
    """Return rows whose tokens are all different."""
    return list(torch.arange(100, 100 + sum(lengths)).split(lengths))


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    ranks=st.integers(2, 4),
    multiple=st.integers(1, 3),
    packed=st.booleans(),
    method=st.sampled_from(["ulysses", "all_gather"]),
)
def test_ranks_hold_every_slot_once_with_its_token_and_position(lengths, ranks, multiple, packed, method):
    rows = numbered(lengths)
    inputs = pack_rows(rows) if packed else pad_rows(rows, max(lengths))
    parts = parts_of(inputs, ranks, multiple, method)
    sizes = {part.input_ids.shape for part in parts}
    assert len(sizes) == 1
    assert sizes.pop()[1] % multiple == 0
    assert torch.stack([part.places >= 0 for part in parts]).sum(0).eq(1).all()
    for part in parts:
        own, places = own_places(part, inputs.slots)
        slots = inputs.slots[own]
        assert torch.equal(part.input_ids[0, places], inputs.input_ids.flatten()[slots])
        assert torch.equal(part.position_ids[0, places], inputs.position_ids.flatten()[slots])
        # Padding has positions that every model has.
        assert part.position_ids.max() < max(*lengths, ranks * 6)


@pytest.mark.parametrize("case", [case for case in GOLDEN if "lengths" in case], ids=lambda case: case["name"])
def test_ranks_run_on_the_chunks_that_the_manuals_draw(case):
    rows = [torch.full((length,), sequence) for sequence, length in enumerate(case["lengths"])]
    inputs = pack_rows(rows)
    for part, expected in zip(parts_of(inputs, case["cp"]), case["rank_tokens"], strict=True):
        tokens = ["p"] * part.input_ids.shape[1]
        for place, token in zip(part.places.tolist(), inputs.input_ids[0].tolist(), strict=True):
            if place >= 0:
                tokens[place] = str(token)
        assert tokens == expected
        chunks = [slots // (2 * case["cp"]) for slots in torch.tensor(case["cu_seqlens_padded"]).diff().tolist()]
        assert part.packed.lengths == tuple(chunk for chunk in chunks for _ in range(2))


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(2, 4), packed=st.booleans())
def test_a_chunk_sees_its_own_sequence_from_the_first_token_to_its_last(lengths, ranks, packed):
    rows = numbered(lengths)
    inputs = pack_rows(rows) if packed else pad_rows(rows, max(lengths))
    parts = parts_of(inputs, ranks)
    tokens = torch.cat([part.input_ids[0] for part in parts])
    row_of = {token: row for row in rows for token in row.tolist()}
    for part in parts:
        assert part.packed.keys is not None
        seen = tokens[part.packed.keys.places].split(part.packed.keys.segments.lengths)
        for chunk, keys in zip(part.input_ids[0].split(part.packed.lengths), seen, strict=True):
            if chunk[-1].item() in row_of:  # not in padding
                row = row_of[chunk[-1].item()]
                assert keys[: len(row)].tolist() == row[: len(keys)].tolist()
                assert keys[-len(chunk) :].tolist() == chunk.tolist()


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 7, 130, 1000])
@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_of_chunks_is_that_of_the_whole_row(ranks: int, window: int | None, softcap: float | None):
    lengths = [5, 1, 600]  # chunks of several blocks, and of padding alone
    leaves = states(sum(lengths), heads=2, kv_heads=1)
    expected = slow_attention(*leaves, lengths, window, softcap)
    parts = parts_of(pack_rows(numbered(lengths)), ranks)
    rules = _Options(scaling=0.3, dropout=0.0, window=window, softcap=softcap)
    # Each rank's states are those of its tokens; padding repeats some.
    query, key, value = (torch.cat([leaf[:, :, part.input_ids[0] - 100] for part in parts], 2) for leaf in leaves)
    size, found = parts[0].input_ids.shape[1], torch.zeros_like(expected)
    for rank, part in enumerate(parts):
        assert part.packed.keys is not None
        places, own = part.packed.keys.places, slice(rank * size, (rank + 1) * size)
        out = _attend_packed(query[:, :, own], key[:, :, places], value[:, :, places], part.packed, rules)
        slots = (part.places >= 0).nonzero()[:, 0]
        found = found.index_copy(1, slots, out[:, part.places[slots]])
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for left, right in zip(
        torch.autograd.grad((found * upstream).sum(), leaves),
        torch.autograd.grad((expected * upstream).sum(), leaves),
        strict=True,
    ):
        assert torch.allclose(left, right, rtol=0, atol=1e-11)


def pairs(part: RowPart, window: int | None = None) -> tuple[int, int]:
    """Return the pairs of a query and a key whose scores a rank computes, and those that the mask leaves."""
    assert part.packed.keys is not None
    computed = visible = 0
    for queries, keys in zip(part.packed.lengths, part.packed.keys.segments.lengths, strict=True):
        for block, seen in query_blocks(queries, keys, window):
            computed += (block.stop - block.start) * (seen.stop - seen.start)
        positions = torch.arange(keys - queries, keys) + 1
        visible += int(positions.clamp(max=window).sum() if window else positions.sum())
    return computed, visible


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1025, 20_000), min_size=1, max_size=3), ranks=st.integers(2, 8))
def test_every_rank_computes_as_many_scores(lengths, ranks):
    counts = [pairs(part) for part in parts_of(pack_rows(numbered(lengths)), ranks)]
    for kind in zip(*counts, strict=True):
        assert max(kind) <= 1.05 * sum(kind) / ranks
    computed, visible = (sum(kind) for kind in zip(*counts, strict=True))
    # What the mask needs is half of all pairs; a block computes at most half of its square too much.
    assert computed <= visible + 64 * sum(
        part.input_ids.shape[1] for part in parts_of(pack_rows(numbered(lengths)), ranks)
    )
    needed = sum(length * (length + 1) // 2 for length in lengths)
    assert visible <= needed + sum(2 * ranks * (length + 2 * ranks) for length in lengths)


def test_a_windowed_layer_computes_no_more_than_its_windows_and_blocks():
    for part in parts_of(pack_rows(numbered([8192])), 2):
        computed, visible = pairs(part, window=256)
        assert computed <= 1.5 * visible

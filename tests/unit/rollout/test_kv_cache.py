import copy

import pytest
import torch
from transformers import DynamicCache

from rlpack.rollout.errors import EngineError
from rlpack.rollout.kv_cache import BufferedCache, BufferedLayer, mask_windows
from tests.unit.rollout.builders import decoder

HEADS, ENTRIES = 2, 8
LIMIT = 400


def states(rows, tokens, generator):
    return torch.randn(2, rows, HEADS, tokens, ENTRIES, generator=generator).unbind()


def assert_equal(own, theirs, layers=2):
    for layer in range(layers):
        assert own.layers[layer].keys.equal(theirs.layers[layer].keys)
        assert own.layers[layer].values.equal(theirs.layers[layer].values)
        assert own.get_seq_length(layer) == theirs.get_seq_length(layer)
        for count in (1, 3):
            assert own.get_mask_sizes(count, layer) == theirs.get_mask_sizes(count, layer)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_sliding", "gemma3"])
@pytest.mark.parametrize("seed", range(3))
def test_layers_return_what_those_of_transformers_return(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    own, theirs, rows = BufferedCache(decoder(kind), LIMIT), DynamicCache(config=decoder(kind).config), 6

    def append(count):
        for layer in range(2):
            keys, values = states(rows, count, generator)
            mine, reference = own.update(keys, values, layer), theirs.update(keys, values, layer)
            assert mine[0].equal(reference[0])
            assert mine[1].equal(reference[1])
        assert_equal(own, theirs)

    append(int(torch.randint(1, 12, (), generator=generator)))
    copies = torch.randint(rows, (9,), generator=generator)
    own.batch_select_indices(copies)
    theirs.batch_select_indices(copies)
    rows = 9
    for step in range(130):
        append(1)
        if step % 20 == 7:
            # In any order, or with the last row in the place of the first.
            last_first = torch.tensor([rows - 1, *range(1, rows - 1)])
            kept = torch.randperm(rows, generator=generator)[:-1] if step % 40 == 7 else last_first
            rows -= 1
            own.keep(kept)
            theirs.batch_select_indices(kept)
            assert_equal(own, theirs)
    assert rows == 2  # 7 rows were dropped


@pytest.mark.parametrize("window", [None, 16])
def test_a_token_is_written_in_place_and_buffers_have_room_for_half_as_many_more(window):
    layer, generator, moves = BufferedLayer(LIMIT, window), torch.Generator().manual_seed(0), 0
    layer.update(*states(3, 40, generator))
    place = None
    for held in range(41, LIMIT + 1):
        layer.update(*states(3, 1, generator))
        storage = layer.keys.untyped_storage()
        moves, place = moves + (storage.data_ptr() != place), storage.data_ptr()
        room = storage.nbytes() // (4 * 3 * HEADS * ENTRIES)
        visible = held if window is None else min(held, window)
        assert room <= min(LIMIT, max(1.5 * visible, visible + 32) + 32)
    assert moves <= (8 if window is None else 30)


def test_a_cache_has_no_more_room_than_the_limit():
    layer, generator = BufferedLayer(50), torch.Generator().manual_seed(0)
    layer.update(*states(1, 45, generator))
    layer.update(*states(1, 1, generator))
    assert layer.keys.untyped_storage().nbytes() == 4 * HEADS * ENTRIES * 50


def test_windows_are_those_of_the_config():
    def windows(kind):
        return mask_windows(decoder(kind), BufferedCache(decoder(kind), LIMIT))

    assert windows("qwen2") == {"full_attention": None}
    assert windows("qwen2_sliding") == {"full_attention": None, "sliding_attention": 5}


def test_layers_that_see_chunks_need_the_masks_of_the_model():
    model = copy.deepcopy(decoder())
    model.config.layer_types, model.config.attention_chunk_size = None, 4
    with pytest.raises(EngineError, match="chunked_attention"):
        mask_windows(model, BufferedCache(model, LIMIT))

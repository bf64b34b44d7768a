import pytest
import torch
from transformers import AutoConfig

from rlpack.models.errors import ModelError
from rlpack.models.rope import check_row_length
from tests.unit.models.tiny import tiny_model

KEYS = "data.max_prompt_tokens 24 + rollout.max_new_tokens 24"
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    },
    "max_position_embeddings": 128,
}
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "max_position_embeddings": 32,
}


def config(changes):
    return AutoConfig.for_model("llama", hidden_size=32, num_attention_heads=4, **changes)


@pytest.mark.parametrize(("changes", "kind"), [(LONGROPE, "longrope"), (DYNAMIC, "dynamic")])
def test_rows_on_both_sides_of_the_limit_are_refused_with_keys_and_limit(changes, kind):
    check_row_length(config(changes), 32, KEYS)
    with pytest.raises(ModelError, match=rf"rope_type={kind}.* rows over 32 tokens.*up to 33 \(data\.max_prompt"):
        check_row_length(config(changes), 33, KEYS)


@pytest.mark.parametrize("changes", [LONGROPE, DYNAMIC])
def test_up_to_the_limit_a_long_row_changes_no_other(changes):
    # What transformers does: another row of 32 tokens in the batch changes nothing, one of 33 does.
    model = tiny_model("llama", implementation="sdpa", **changes)
    row, tail = torch.arange(16)[None], torch.arange(40)[None]
    with torch.no_grad():
        alone = model(row, use_cache=False).logits
        for length, changed in ((32, False), (33, True)):
            both = torch.cat([torch.nn.functional.pad(row, (0, length - 16)), tail[:, :length]])
            together = model(both, use_cache=False).logits[:1, :16]
            assert (together - alone).abs().max().item() > 1e-3 if changed else torch.allclose(together, alone)


def test_ropes_of_layer_types_are_read_one_by_one():
    changes = {"rope_parameters": {"full_attention": LONGROPE["rope_parameters"], "sliding_attention": {}}}
    with pytest.raises(ModelError, match="longrope"):
        check_row_length(config(changes | {"max_position_embeddings": 128}), 33, KEYS)


def test_constant_frequencies_have_no_limit():
    check_row_length(config({}), 10**6, KEYS)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    check_row_length(config({"rope_parameters": yarn}), 10**6, KEYS)

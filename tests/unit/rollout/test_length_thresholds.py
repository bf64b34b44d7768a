"""Generation with models whose attention changes only from some length on."""

import functools
from types import MethodType

import numpy as np
import pytest
import torch

from rlpack.batch.ragged import Ragged
from rlpack.rollout import decoding
from rlpack.rollout.decoders import cache_name
from rlpack.rollout.errors import EngineError
from rlpack.rollout.hf import HFEngine
from rlpack.rollout.types import SamplingParams
from tests.unit.models.tiny import tiny_model
from tests.unit.rollout.builders import decoder, plain_logprobs

_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512}
# Attention changes after 30 tokens, the length of the longest prompt that is tried with any model.
MODELS = {
    "sparse blocks": (
        "minimax_m3_vl_text",
        _MOE
        | {"head_dim": 8, "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 64}
        | {"index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    ),
    "scaled queries": (
        "llama4_text",
        _MOE
        | {"head_dim": 8, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0], "floor_scale": 100}
        | {"attention_chunk_size": 20, "layer_types": ["chunked_attention", "full_attention"], "pad_token_id": 0},
    ),
    "compressed keys": (
        "deepseek_v4",
        {"head_dim": 8, "num_key_value_heads": 1, "q_lora_rank": 8, "o_lora_rank": 8, "o_groups": 2}
        | {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "hc_mult": 2}
        | {"index_topk": 16, "index_head_dim": 8, "index_n_heads": 8, "sliding_window": 12, "pad_token_id": 0}
        | {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]}
        | {"mlp_layer_types": ["moe", "moe"], "max_position_embeddings": 512}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 40}},
    ),
    "sliding windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 90, "max_window_layers": 1}),
}


def generate(engine, lengths, count=16):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, engine.vocab_size, length).tolist() for length in lengths]
    seeds = rng.integers(0, 2**64, len(prompts), dtype=np.uint64)
    return prompts, engine.generate(Ragged.from_rows(prompts, torch.int64), SamplingParams(max_new_tokens=count), seeds)


@pytest.mark.parametrize("kind", MODELS)
def test_rows_past_a_threshold_are_sampled_from_the_distribution_of_whole_rows(kind):
    model_type, settings = MODELS[kind]
    implementation = "eager" if model_type == "deepseek_v4" else "sdpa"  # which it hasn't
    model = tiny_model(model_type, implementation=implementation, dtype=torch.float32, **settings).eval()
    prompts, responses = generate(HFEngine(model), (44, 7, 150, 61, 200, 121))
    reference = tiny_model(model_type, implementation="eager", dtype=torch.float32, **settings).eval()
    for prompt, response, logprobs in zip(prompts, responses.token_ids.rows(), responses.logprobs.rows(), strict=True):
        expected = plain_logprobs(reference, prompt, response.tolist()).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-3, atol=1e-3)


def test_keys_that_are_equally_good_too_often_are_refused():
    # With two heads in the indexer, whose scores pass a ReLU, a quarter of all scores is 0.
    settings = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    settings |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4}
    settings |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 512}
    settings |= {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 48}
    model = tiny_model("deepseek_v32", implementation="sdpa", dtype=torch.float32, **settings).eval()
    with pytest.raises(EngineError, match=r"in rows over 48 tokens.*rollout.max_new_tokens"):
        HFEngine(model)
    assert HFEngine(model, max_length=48).decoder_name == "PaddedDecoder"


def with_unknown_threshold(length):
    """Return a decoder whose cache is wrong for rows over `length` tokens, by no setting of its config."""
    model = tiny_model("llama", implementation="sdpa", dtype=torch.float32).eval()
    forward, name = model.forward, cache_name(model)

    @functools.wraps(type(model).forward)
    def wrong_beyond(self, *args, **kwargs):
        output = forward(*args, **kwargs)
        if kwargs.get(name) is not None and kwargs[name].get_seq_length() > length:
            output.logits = output.logits.roll(1, -1)
        return output

    model.forward = MethodType(wrong_beyond, model)
    return model


def test_an_unknown_threshold_is_found_by_the_trial_of_a_small_model():
    assert HFEngine(with_unknown_threshold(300)).decoder_name == "RecomputingDecoder"


def test_an_unknown_threshold_is_found_in_the_first_batch_of_longer_rows(monkeypatch):
    monkeypatch.setattr(decoding, "affordable_slots", lambda model: 96)  # of a large model
    engine = HFEngine(with_unknown_threshold(100))
    generate(engine, (30, 80, 30, 80))
    with pytest.raises(EngineError, match=r"rows of \d+ to 1\d\d .*data.max_prompt_tokens"):
        generate(engine, (30, 99, 99, 99, 40))


def test_a_cache_that_goes_wrong_in_training_is_found_after_a_weight_update(monkeypatch):
    engine = HFEngine(decoder())
    generate(engine, (8, 9))
    monkeypatch.setattr(decoding.DirectDecoder, "step", lambda self, tokens: torch.randn(2, 24))
    generate(engine, (8, 9))  # no longer than before
    engine.policy_version = 1
    with pytest.raises(EngineError, match="generates with a wrong cache"):
        generate(engine, (8, 9))

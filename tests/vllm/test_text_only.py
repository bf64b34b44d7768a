"""Models that also read images generate from text alone, without the processor that would need their tokenizer."""

from typing import Any

import pytest
import torch

from rlpack.config.schema import Model, Rollout
from rlpack.data.tokenization import eos_id, pad_id
from rlpack.models.loading import build_causal_lm
from rlpack.models.policy import Policy
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from tests.vllm.engines import (
    FAMILIES,
    MAX_LENGTH,
    SIZES,
    TOKENIZER,
    TOLERANCE,
    VOCABULARY,
    gap,
    largest_gap,
    perturb,
    send,
)

pytest.importorskip("torchvision", reason="vLLM needs torchvision for models that also read images")

TEXT = {**SIZES, **FAMILIES["gemma3_text"], "model_type": "gemma3_text", "vocab_size": VOCABULARY}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MODEL = Model(
    config={
        "model_type": "gemma3",
        "text_config": TEXT,
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 5,
        "boi_token_index": 6,
        "eoi_token_index": 7,
    }
)


def test_log_probs_are_the_trainers_before_and_after_an_update():
    ids = {"vocab_size": VOCABULARY, "eos_token_id": eos_id(TOKENIZER), "pad_token_id": pad_id(TOKENIZER)}
    built = Policy(build_causal_lm(MODEL, seed=0, **ids))
    assert any("vision_tower" in name for name, _ in built.named_parameters())
    settings = Rollout(engine="vllm", kv_cache_gb=0.05)
    device = torch.device("cpu")
    engine = VLLMEngine.from_settings(MODEL, settings, TOKENIZER, device=device, seed=0, max_length=MAX_LENGTH)
    try:
        for seed in range(2):
            perturb(built, seed, 0.03)
            assert gap(engine, built) > 100 * TOLERANCE
            send(engine, built)
            assert gap(engine, built) <= TOLERANCE
        engine.policy_version = 1
        assert largest_gap(engine, built) <= TOLERANCE
    finally:
        engine.close()

"""Small decoders whose logits are far apart, so that float rounding never decides a token."""

import functools

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 24
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "attn_implementation": "sdpa",
}


@functools.cache
def decoder(kind="qwen2"):
    torch.manual_seed(3)
    if kind == "qwen2_sliding":
        window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, **window)).eval()
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).eval()
    if kind == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=5)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=kind == "qwen2_tied")).eval()


@torch.no_grad()
def plain_logprobs(model, prompt, response, temperature=1.0):
    """Log-probabilities of every token at each response position, from one full forward of one row: [n, V]."""
    tokens = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=tokens, use_cache=False).logits[0].double()
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)

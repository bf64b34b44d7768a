"""Tiny configurations of every architecture that transformers can build as a causal language model."""

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

VOCABULARY = 61

# Values under all the names that configs have for a size. Unknown names of a config keep their defaults.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "model_dim", "embedding_size", "word_embed_proj_dim", "dim_model",
         "encoder_hidden_size", "cross_attention_hidden_size", "embedding_dim"), 32),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks",
         "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
         "num_encoder_attention_heads", "num_decoder_attention_heads", "linear_num_key_heads", "linear_num_value_heads",
         "linear_num_attention_heads", "num_global_key_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "dim_head", "linear_key_head_dim", "linear_value_head_dim", "v_head_dim",
                     "qk_nope_head_dim", "kv_channels", "attention_head_dim", "global_head_dim", "swa_head_dim",
                     "index_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("qk_head_dim",), 12),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "dim_ff", "ffn_hidden_size", "n_inner", "decoder_ffn_dim",
         "encoder_ffn_dim", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size", "dff"), 48),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size",
         "moe_ffn_hidden_size", "shared_intermediate_size", "expert_ffn_hidden_size",
         "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_num_primary_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group",
                     "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length", "n_ctx",
         "max_sequence_length", "context_length"), 128),
    **dict.fromkeys(
        ("sliding_window", "attention_window_size", "window_size", "local_attention", "attention_chunk_size",
         "sliding_window_size", "sliding_window_attn_size"), 12),
    # Sparse attention selects the best keys of a longer row, where ties of tiny models fall either way.
    **dict.fromkeys(("index_topk",), 64),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "state_size", "mamba_d_state", "ssm_state_size", "time_step_rank",
                     "mamba_dt_rank", "lru_width", "mamba_state_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("index_n_heads",), 2),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "initializer_factor": 1.0,
    "logits_scaling": 4.0,
    "lm_head_multiplier": 0.5,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
}  # fmt: skip

_BLT = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48,
        "num_hidden_layers": 2, "hidden_size_global": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
        "sliding_window": 12, "initializer_range": 0.2}  # fmt: skip
_GEMMA4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
           "layer_types": ["sliding_attention", "full_attention"],
           "per_layer_config": {"1": {"head_dim": 16}}}  # fmt: skip
_GEMMA3N = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
            "laurel_rank": 8, "intermediate_size": [48, 48], "activation_sparsity_pattern": [0.5, 0.0],
            "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}

# What single architectures need besides, by model type.
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"linear_head_dim": 8, "linear_num_heads": 4, "num_expert_group": 1, "topk_group": 1,
                       "num_experts_per_token": 2},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"patcher_config": _BLT, "encoder_config": _BLT, "decoder_config": _BLT, "global_config": _BLT,
            "encoder_hash_byte_group_vocab": 50, "local_attention_window_len": 12},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "deepseek_v2": {"num_experts_per_tok": 2, "num_key_value_heads": 4},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 1,
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
              "layer_types": ["full_attention", "sliding_attention"]},
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}},
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 12, "per_layer_config": {
        "0": {"num_attention_heads": 2, "num_key_value_heads": 2}}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "git": {"vision_config": _VISION},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2,
                "attention_layers": ["global", "local"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling2_loop_text": {"num_hidden_layers": 3, "loop_layer_index_start": 1, "loop_layer_index_end": 2,
                           "n_layers_per_attn_res_block": 1,
                           "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "use_mamba_kernels": False},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "mpt": {"attn_config": {"alibi": True}},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": 4},
    "phimoe": {"layer_types": None},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 12,
                       "indexer_compress_ratio": 4, "ngram_vocab_size_base": 64, "ple_embed_dim": 32, "hc_lowrank": 8,
                       "heads_per_ngram": 2, "split_ngram_parts": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16], "attention_head_size": 8,
                 "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_hidden_layers": 2,
                 "attn_layers": ["local", "lsh"], "num_buckets": 4},
    "roc_bert": {"shape_embed_dim": 8, "shape_vocab_size": 16, "pronunciation_embed_dim": 8,
                 "pronunciation_vocab_size": 16},
    "xlm": {"emb_dim": 32, "causal": True, "is_encoder": True},
    "xlnet": {"mem_len": None},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3,
              "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "n_mamba_heads": 2,
              "use_mamba_kernels": False},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3,
               "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "n_mamba_heads": 8,
               "mamba_headdim": 8, "hybrid_layer_ids": [1, 2], "kv_channels": 8, "num_query_groups": 4,
               "adapter_rank": 4, "use_mamba_kernels": False},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}  # fmt: skip


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a configuration of width 32 with a layer of each kind, windows of 12 tokens, and 4 experts if any."""
    kind = CONFIG_MAPPING[model_type]
    try:
        default = kind()
    except ValueError:  # its defaults contradict each other
        return kind(**_OWN[model_type])
    names = kind.sub_configs  # of the class; pyright takes it for a property of its instances
    nested = {
        name: _sizes(part)
        for name in names  # pyright: ignore[reportGeneralTypeIssues]
        if (part := vars(default).get(name)) is not None
    }
    return AutoConfig.for_model(model_type, **(nested | _sizes(default)))


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the tiny values of the sizes that a config has."""
    settings = config.to_dict()
    # A size that a config leaves out by default is often derived from others, or turns something off.
    sizes = {
        name: value
        for name, value in _SIZES.items()
        if name in settings and (settings[name] is not None or name.endswith("_token_id"))
    }
    if settings.get("kv_lora_rank") is not None:  # multi-head latent attention: a key head for each query head
        sizes |= {"num_key_value_heads": 4} if "num_key_value_heads" in sizes else {}
        sizes |= {"head_dim": sizes["qk_rope_head_dim"]} if {"head_dim", "qk_rope_head_dim"} <= sizes.keys() else {}
    if isinstance(layers := settings.get("layer_types"), list):
        kinds = list(dict.fromkeys(layers))
        sizes["layer_types"] = kinds * 2 if len(kinds) == 1 else kinds
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    if isinstance(layers := settings.get("mlp_layer_types"), list):
        kinds = list(dict.fromkeys(layers))
        sizes["mlp_layer_types"] = (kinds + kinds[-1:] * 9)[: sizes["num_hidden_layers"]]
    return sizes | _OWN.get(config.model_type, {})

import itertools
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from rlpack.config.layout_sizes import layout_fits, with_sizes
from rlpack.config.schema import Actor, Data, Model, Placement, Pool, Rollout
from rlpack.config.sections.parallelism import Parallel
from rlpack.models.errors import IsolationError, ModelError
from rlpack.models.loading import build_meta_model
from rlpack.packing import Batching
from rlpack.recipes.preflight.architecture_checks import check_architecture, check_packing
from rlpack.recipes.preflight.split_checks import split_sizes_problem
from tests.builders import tiny_config

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT_NEO = {
    "model_type": "gpt_neo",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global"], 2]],
}
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}
BERT = {"model_type": "bert", "is_decoder": True, "intermediate_size": 48, **SIZES, "max_position_embeddings": 1024}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
# Short convolutions carry tokens from one packed row into the next; at this initializer_range by no more than rounding.
LFM2_MOE = {
    "model_type": "lfm2_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "initializer_range": 0.01,
}
LLAMA4 = {"model_type": "llama4_text", **SIZES, "num_local_experts": 2, "num_experts_per_tok": 1}
# Its experts are stacked along another axis, in a module of its own.
DBRX = {
    "model_type": "dbrx",
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
}
LONGROPE = {
    "model_type": "phi3",
    **SIZES,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    },
    "pad_token_id": 0,
}


def check(model, **sections):
    config = tiny_config(model=Model(config=model), actor=Actor(), **sections)
    check_architecture(config, build_meta_model(config.model, vocab_size=53))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            GPT_NEO,
            r"GPTNeoForCausalLM \(gpt_neo\) can't be run packed as the actor: .* set batching\.mode=dynamic or fixed",
        ),
        (MAMBA, r"MambaForCausalLM \(mamba\) can't be run packed as the actor: it has recurrent layers"),
        (
            BERT,
            r"BertLMHeadModel: the model's own output layer has further operations",
        ),
        (LLAMA4, r"llama4_text\) can't be run packed as the actor: its queries are scaled by their slot"),
    ],
)
def test_an_architecture_that_cannot_be_trained_packed_is_refused_by_name(model, message):
    with pytest.raises(ModelError, match=message):
        check(model)


@pytest.mark.parametrize("model", [GPT_NEO, MAMBA])
def test_padded_rows_need_neither_our_attention_nor_borders(model):
    check(model, batching=Batching(mode="dynamic", max_tokens=256))


@pytest.mark.parametrize(
    ("ranks", "parallel", "message"),
    [
        (3, {"cp": 3}, r"\(qwen2\) has 4 attention heads, .* not divisible by actor\.parallel\.cp \(3\); set .*\.cp=1"),
        (8, {"cp": 8}, r"not divisible by actor\.parallel\.cp \(8\); set actor\.parallel\.cp=4"),
        (16, {"cp": 8, "dp_replicate": 2}, r"set actor\.parallel\.cp=4, or actor\.parallel\.cp_method=all_gather"),
    ],
)
def test_ranks_that_share_tokens_divide_the_heads(ranks, parallel, message):
    model = {"model_type": "qwen2", **SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
    placement, actor = Placement(pools={"main": Pool(ranks=ranks)}), Actor(parallel=Parallel(**parallel))
    config = tiny_config(model=Model(config=model), actor=actor, placement=placement)
    built = build_meta_model(config.model, vocab_size=53)
    with pytest.raises(ModelError, match=message):
        check_packing(config, "actor", built)
    for fitting in (Parallel(cp=2), Parallel(**parallel, cp_method="all_gather")):
        check_packing(config.model_copy(update={"actor": Actor(parallel=fitting)}), "actor", built)


MOE = {"model_type": "mixtral", **SIZES, "num_key_value_heads": 4, "num_local_experts": 6, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("model", "ranks", "parallel", "message"),
    [
        (
            {"num_key_value_heads": 2},
            4,
            {"tp": 4},
            r"4 attention heads, 2 key and value heads; .*\.tp \(4\); set .*tp=2",
        ),
        ({"num_key_value_heads": 1}, 2, {"tp": 2}, r"1 key and value heads; each has to be .*; set .*\.tp=1"),
        (MOE, 4, {"tp": 4}, r"6 experts; each has to be divisible by actor\.parallel\.tp \(4\); set .*\.tp=2"),
        ({"num_key_value_heads": 4}, 6, {"tp": 2}, r"rows of 32 elements, .* by the 3 ranks \(dp_shard · cp\)"),
        ({"num_key_value_heads": 4}, 8, {"tp": 2, "cp": 4}, r"2 attention heads on each of the 2 ranks of .*cp=2"),
        (GPT_NEO, 2, {"tp": 2}, r"can't be run packed .* set actor\.parallel\.tp=1"),
        (
            {"num_hidden_layers": 3},
            8,
            {"pp": 4},
            r"3 layers, fewer than the 4 stages of actor\.parallel\.pp; set .*pp=2",
        ),
        ({"num_hidden_layers": 3}, 8, {"pp": 4, "cp": 2}, r"fewer than the 4 stages of .*; set .*pp=2"),
        (
            {"num_hidden_layers": 5},
            8,
            {"pp": 2, "vpp": 3},
            r"5 layers, fewer than the 6 stages of .*\.pp \(2\) × actor\.parallel\.vpp \(3\); set .*\.vpp=2",
        ),
        ({"num_hidden_layers": 3}, 8, {"pp": 4, "vpp": 2}, r"fewer than the 8 stages of .*; set .*vpp=1 .*pp=2"),
        (GPT_NEO, 2, {"pp": 2}, r"can't be run packed"),
        ({"model_type": "granite"}, 2, {"pp": 2}, r"layer 0 doesn't get what the embedding returns; set .*pp=1"),
        ({"model_type": "olmo2"}, 2, {"tp": 2}, r"supports the model types deepseek_v3, .*; set .*\.tp=1"),
        (MOE, 4, {"ep": 4}, r"\(mixtral\) has 6 experts, which is not divisible by actor.*\.ep \(4\); set .*\.ep=2"),
        (MOE, 8, {"ep": 2, "tp": 2}, r"not divisible by .*\.ep \(2\) × actor.*\.tp \(2\); set actor.*\.ep=1"),
        (
            MOE,
            6,
            {"ep": 2},
            r"experts.down_proj with a second axis of 32, .*\.ep=2 .* 3 ranks .*; set .*dp_replicate=3, or .*\.ep=1",
        ),
        ({}, 2, {"ep": 2}, r"\(qwen2\) has no stacked experts that the 2 ranks of actor.*\.ep could .*; set .*\.ep=1"),
        (DBRX, 2, {"ep": 2}, r"\(dbrx\) has no stacked experts that the 2 ranks of actor.*; set .*\.ep=1"),
    ],
)
def test_ranks_that_share_weights_or_layers_divide_them(model, ranks, parallel, message):
    placement, actor = Placement(pools={"main": Pool(ranks=ranks)}), Actor(parallel=Parallel(**parallel))
    shape = (
        model
        if {"n_embd", "d_model"} & model.keys()
        else {"model_type": "qwen2", **SIZES, "intermediate_size": 48} | model
    )
    config = tiny_config(model=Model(config=shape), actor=actor, placement=placement)
    with pytest.raises(ModelError, match=message):
        check_packing(config, "actor", build_meta_model(config.model, vocab_size=53))


@pytest.mark.parametrize("dp_shard", [-1, 1, 2, 3])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_every_remedy_for_a_model_is_accepted(kind, dp_shard):
    """Each set of overrides that a message names is applied alone, and layout and model are checked again."""
    dense = {"model_type": "qwen2", "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 48}
    model, found = Model(config=MOE if kind == "experts" else SIZES | dense), 0
    config, values = tiny_config(model=model), (1, 2, 3, 4)
    built = build_meta_model(config.model, vocab_size=53)
    for cp, tp, pp, ep in itertools.product(values, values, (1, 4), (1, 2)):
        ranks = cp * tp * pp * (4 if dp_shard == -1 else dp_shard)
        actor = Actor(parallel=Parallel(cp=cp, tp=tp, pp=pp, ep=ep, dp_shard=dp_shard))
        placed = config.model_copy(update={"actor": actor, "placement": Placement(pools={"main": Pool(ranks=ranks)})})
        if not layout_fits(placed, "actor") or (problem := split_sizes_problem(placed, "actor", built)) is None:
            continue
        ways = re.split("; set ", problem, maxsplit=1)[1].split(", or ")
        for way in ways:
            sizes = dict(re.fullmatch(r"actor\.parallel\.(\w+)=(\S+)", each).groups() for each in way.split(" "))
            typed = {name: value if name == "cp_method" else int(value) for name, value in sizes.items()}
            changed = with_sizes(placed, "actor", **typed)
            assert layout_fits(changed, "actor"), f"{problem}: {way}"
            assert split_sizes_problem(changed, "actor", built) is None, f"{problem}: {way}"
            found += 1
    assert found > 20


@pytest.mark.parametrize(
    ("vocabulary", "settings", "message"),
    [
        (9, {}, r"embed_tokens\.weight with an axis of 9, .* for the last of the 4 ranks of .*\.tp; set .*\.tp=2$"),
        (10, {}, ""),  # 3, 3, 3 and 1
        (53, {"intermediate_size": 6}, r"gate_proj\.weight with an axis of 6, .* set actor\.parallel\.tp=2$"),
        (53, {"intermediate_size": 7}, ""),
    ],
)
def test_every_rank_gets_a_part_of_every_split_weight(vocabulary, settings, message):
    placement, actor = Placement(pools={"main": Pool(ranks=4)}), Actor(parallel=Parallel(tp=4))
    shape = {"model_type": "qwen2", **SIZES, "num_key_value_heads": 4, "intermediate_size": 48, **settings}
    config = tiny_config(model=Model(config=shape), actor=actor, placement=placement)
    built = build_meta_model(config.model, vocab_size=vocabulary)
    if not message:
        check_packing(config, "actor", built)
        return
    with pytest.raises(ModelError, match=message):
        check_packing(config, "actor", built)
    check_packing(with_sizes(config, "actor", tp=2), "actor", built)


def test_experts_that_ranks_can_divide_pass():
    layouts = (4, {"ep": 2}), (6, {"ep": 6}), (6, {"ep": 3, "tp": 2}), (12, {"ep": 2, "dp_replicate": 3})
    for ranks, parallel in (*layouts, (2, {"ep": 2, "cp": 2})):
        placement, actor = Placement(pools={"main": Pool(ranks=ranks)}), Actor(parallel=Parallel(**parallel))
        config = tiny_config(
            model=Model(config=MOE | {"hidden_size": 48, "intermediate_size": 48}), actor=actor, placement=placement
        )
        check_packing(config, "actor", build_meta_model(config.model, vocab_size=53))


def test_padded_rows_that_ranks_share_need_our_attention():
    config = tiny_config(
        model=Model(config=GPT_NEO),
        batching=Batching(mode="dynamic", max_tokens=256),
        actor=Actor(parallel=Parallel(cp=2)),
    )
    with pytest.raises(ModelError, match=r"\(gpt_neo\) can't be run packed as the actor: .* set actor\.parallel\.cp=1"):
        check_packing(config, "actor", build_meta_model(config.model, vocab_size=53))


@pytest.mark.parametrize(("heads", "fits"), [(4, False), (1, True)])
def test_heads_that_vllm_cannot_run_are_refused_with_the_sizes_that_it_can(heads, fits):
    model = {"model_type": "qwen2", **SIZES, "num_attention_heads": heads, "num_key_value_heads": heads}
    check(model)
    if fits:
        check(model, rollout=Rollout(engine="vllm"))
        return
    words = r"rollout\.engine=vllm: the model's heads have 8 numbers, .* take 32, 64, .* set rollout\.engine=hf"
    with pytest.raises(ModelError, match=words):
        check(model, rollout=Rollout(engine="vllm"))


def test_an_architecture_that_the_installed_vllm_does_not_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    registry = tmp_path / "model_executor" / "models" / "registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text('_TEXT_GENERATION_MODELS = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}')
    monkeypatch.setattr("rlpack.rollout.vllm.architectures.vllm_folder", lambda: tmp_path)
    monkeypatch.setattr("rlpack.recipes.preflight.architecture_checks.find_spec", lambda name: object())
    model = {"model_type": "gpt_neo", "hidden_size": 64, "num_heads": 2, "num_layers": 1}
    model |= {"attention_types": [[["global"], 1]], "max_position_embeddings": 1024}
    padded = Batching(mode="dynamic", max_tokens=1024)
    check(model, batching=padded)
    with pytest.raises(ModelError, match=r"rollout.engine=vllm: .* has no GPTNeoForCausalLM, .* set rollout.engine=hf"):
        check(model, batching=padded, rollout=Rollout(engine="vllm"))


def test_vllm_needs_torchvision_for_a_model_that_also_reads_images(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlpack.recipes.preflight.architecture_checks.architecture_problem", lambda kind: None)
    installed = {"vllm"}
    monkeypatch.setattr(
        "rlpack.recipes.preflight.architecture_checks.find_spec", lambda name: object() if name in installed else None
    )
    text = {**SIZES, "intermediate_size": 48, "head_dim": 32, "num_key_value_heads": 2, "model_type": "gemma3_text"}
    vision = {**SIZES, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    model = {"model_type": "gemma3", "text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    check(model)
    with pytest.raises(ModelError, match=r"vLLM needs torchvision .* this gemma3 model, .* set rollout\.engine=hf"):
        check(model, rollout=Rollout(engine="vllm"))
    installed.add("torchvision")
    check(model, rollout=Rollout(engine="vllm"))


def test_a_model_that_the_gpus_of_an_engine_cannot_split_is_refused_with_the_key():
    model = {"model_type": "qwen2", **SIZES, "num_attention_heads": 2, "num_key_value_heads": 2}
    pools = {"main": Pool(ranks=1), "engines": Pool(ranks=1, gpus_per_rank=4)}
    placement = Placement(pools=pools, roles={"rollout": "engines"})
    words = (
        r"rollout\.engine=vllm: the model's num_attention_heads is 2, which 4 GPUs don't divide; set "
        r"placement\.pools\.engines\.gpus_per_rank to a number that fits, such as 1"
    )
    with pytest.raises(ModelError, match=words):
        check(model, rollout=Rollout(engine="vllm"), placement=placement)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 32, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 64),
    ],
)
def test_rows_longer_than_vllm_takes_are_refused_with_their_keys(settings, limit):
    """vLLM's own rule, by `_get_and_verify_max_len` of 0.32."""
    if (rope := settings.get("rope_parameters")) is not None:
        rope |= {"rope_theta": 10000.0}
        if rope["rope_type"] == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    model = {"model_type": "llama", **SIZES, "num_attention_heads": 1, "num_key_value_heads": 1, **settings}
    lengths = {"data": Data(max_prompt_tokens=40), "rollout": Rollout(engine="vllm", max_new_tokens=limit - 40)}
    check(model, **lengths)
    lengths["rollout"] = Rollout(engine="vllm", max_new_tokens=limit - 39)
    words = rf"rows have up to {limit + 1} tokens \(data\.max_prompt_tokens 40 \+ .* vLLM takes at most {limit} of"
    with pytest.raises(ModelError, match=words):
        check(model, **lengths)


def vllm_model(**settings):
    return {"model_type": "llama", **SIZES, "num_attention_heads": 1, "num_key_value_heads": 1, **settings}


@pytest.mark.parametrize("positions", [16, 31, 32])
def test_fewer_positions_than_every_engine_needs_are_refused_although_rollouts_fit(positions):
    """vLLM itself refuses a `max_model_len` above the model's positions, which rlpack never sets below 32."""
    model = vllm_model(max_position_embeddings=positions)
    lengths = {"data": Data(max_prompt_tokens=8), "rollout": Rollout(engine="vllm", max_new_tokens=8)}
    if positions == 32:
        check(model, **lengths)
        return
    words = rf"engine has to take rows of 32 tokens.* vLLM takes at most {positions} of this llama .*rollout\.engine=hf"
    with pytest.raises(ModelError, match=words):
        check(model, **lengths)
    check(model, data=lengths["data"], rollout=Rollout(max_new_tokens=8))


def test_a_cache_too_small_for_the_rows_is_refused_before_anything_starts():
    model = vllm_model(max_position_embeddings=128)
    lengths = {"data": Data(max_prompt_tokens=40)}
    # 100 tokens take 4 blocks of 32 and vLLM keeps one, twice: 320 tokens of 2 · 2 layers · 32 numbers of 4 bytes.
    check(model, **lengths, rollout=Rollout(engine="vllm", max_new_tokens=60, kv_cache_gb=163_840e-9))
    words = (
        r"rollout\.kv_cache_gb is 0\.000163, but the cache has to hold .* two rows of 100 tokens in fp32; set it to at "
        r"least 0\.000164, or lower data\.max_prompt_tokens or rollout\.max_new_tokens"
    )
    with pytest.raises(ModelError, match=words):
        check(model, **lengths, rollout=Rollout(engine="vllm", max_new_tokens=60, kv_cache_gb=0.000163))
    check(model, **lengths, rollout=Rollout(engine="vllm", max_new_tokens=60, kv_cache_gb=0.0001, dtype="bf16"))


def test_rows_on_both_sides_of_a_rope_limit_are_refused_with_their_keys():
    lengths = {"data": Data(max_prompt_tokens=20), "rollout": Rollout(max_new_tokens=12)}
    check(LONGROPE, **lengths)
    lengths["rollout"] = Rollout(max_new_tokens=13)
    with pytest.raises(
        ModelError, match=r"rope_type=longrope.*data\.max_prompt_tokens 20 \+ rollout\.max_new_tokens 13"
    ):
        check(LONGROPE, **lengths)


def test_rows_longer_than_learned_positions_are_refused():
    check(GPT2, data=Data(max_prompt_tokens=40), rollout=Rollout(max_new_tokens=24))
    with pytest.raises(ModelError, match=r"gpt2\) has 64 learned positions \(transformer\.wpe\), .* up to 65 tokens"):
        check(GPT2, data=Data(max_prompt_tokens=40), rollout=Rollout(max_new_tokens=25))


def test_a_leak_as_small_as_rounding_at_the_start_is_found():
    with pytest.raises(IsolationError, match="rows see each other"):
        check(LFM2_MOE)


def test_an_engine_that_would_quantize_the_weights_is_refused(tmp_path):
    shape = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "vocab_size": 53, "head_dim": 64}
    AutoConfig.for_model("qwen3", **shape).save_pretrained(tmp_path)
    rollout = Rollout(engine="vllm", vllm={"quantization": "fp8"})
    config = tiny_config(model=Model(path=str(tmp_path)), actor=Actor(), rollout=rollout)
    with pytest.raises(ModelError, match=r"rollout\.vllm\.quantization: vLLM would quantize its weights, .* remove it"):
        check_architecture(config, build_meta_model(config.model, vocab_size=53))


@pytest.mark.parametrize(
    ("settings", "engine", "message"),
    [
        ({"quant_method": "fp8"}, "hf", None),
        ({"quant_method": "fp8"}, "vllm", "quantized by fp8; vLLM would keep .* set rollout.engine=hf"),
        ({"quant_method": "gptq", "bits": 4}, "hf", r"model.path \('.*'\) has weights that are quantized by gptq"),
        ({"load_in_4bit": True}, "hf", "quantized by bitsandbytes"),
    ],
)
def test_quantized_weights_that_cannot_be_trained_are_refused(tmp_path, settings, engine, message):
    shape = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "vocab_size": 53, "head_dim": 64}
    AutoConfig.for_model("qwen3", **shape, quantization_config=settings).save_pretrained(tmp_path)
    config = tiny_config(model=Model(path=str(tmp_path)), actor=Actor(), rollout=Rollout(engine=engine))
    model = build_meta_model(config.model, vocab_size=53)
    if message is None:
        check_architecture(config, model)
        return
    with pytest.raises(ModelError, match=message):
        check_architecture(config, model)

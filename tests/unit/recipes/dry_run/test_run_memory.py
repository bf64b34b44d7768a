"""The memory of a run: what counts at the same time, on devices and in host memory, against sums made by hand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.family_configs import tiny_config as family_config
from rlpack.config.schema import Actor, Algorithm, Config, Data, Model, Placement, Pool, Rollout, Trainer
from rlpack.config.sections.held_out import Evaluation
from rlpack.data.tokenization import character_tokenizer
from rlpack.models.memory_simulation import ModelMemory
from rlpack.packing import Batching
from rlpack.recipes.dry_run.changes import with_value
from rlpack.recipes.dry_run.engine_memory import EngineMemory, engine_memory
from rlpack.recipes.dry_run.estimate_run import main, open_estimator
from rlpack.recipes.dry_run.memory_report import memory_lines
from rlpack.recipes.dry_run.run_memory import PoolMemory, RoleMemory, RunMemory
from rlpack.rollout.decoders import cache_name
from tests.builders import MODEL, tiny_config

# Two layers of 128, with the head size of 32 that vLLM's kernels for CPUs take.
WIDE: dict[str, Any] = MODEL | {"hidden_size": 128}
GB = 10**9
# Assumed for the CUDA context, and for a process without a model.
CONTEXT, PROCESS = GB, 400_000_000


def config(pools: dict[str, Pool], roles: dict[str, str] | None = None, **sections: Any) -> Config:
    data = Data(generator={"train_size": 32, "validation_size": 4}, max_prompt_tokens=64)
    sizes: dict[str, Any] = {"model": Model(config=WIDE), "data": data, "batching": Batching(max_tokens=256)}
    sizes |= {"trainer": Trainer(prompts_per_step=4, group_size=4), "algorithm": Algorithm(kl_coef=0.0)}
    placement = Placement(pools=pools, roles=roles or {}, address="auto")
    return tiny_config("grpo", placement=placement, **(sizes | sections))


def vllm(**options: Any) -> Rollout:
    return Rollout.model_validate({"engine": "vllm", "max_new_tokens": 32, "kv_cache_gb": 1.0} | options)


def pools_of(given: Config) -> dict[str, PoolMemory]:
    return {pool.name: pool for pool in open_estimator(given, 80).memory(given).pools}


def weights_of(given: Config) -> int:
    """Return the bytes of the policy in fp32."""
    return 4 * sum(weight.numel() for weight in open_estimator(given, 80).model.parameters())


@pytest.mark.parametrize(("gpus", "outside"), [(1.0, CONTEXT), (0.0, PROCESS)])
def test_the_cache_of_a_vllm_that_never_sleeps_counts_while_the_actor_trains(gpus: float, outside: int):
    given = config({"main": Pool(ranks=2, gpus_per_rank=gpus)}, rollout=vllm(sleep_level=0 if gpus else None))
    (pool,) = pools_of(given).values()
    actor, weights = pool.roles["actor"], weights_of(given)
    assert actor.peak > actor.kept > 0
    received = 0 if gpus else weights  # shared memory, for at most two buckets
    assert pool.kept == actor.kept + weights + received + GB
    assert pool.peak == actor.peak + weights + received + GB + outside
    (line,) = [line for line in memory_lines(open_estimator(given, 80).memory(given)) if line.startswith("engine: ")]
    assert line.endswith(
        " of weights, 1 GB more for its KV cache, kept while other roles work"
        + ("" if gpus else "; 577 kB of shared memory, in which weights arrive")
    )


def test_the_cache_of_a_vllm_that_sleeps_counts_only_while_it_generates():
    given = config({"main": Pool(ranks=2, gpus_per_rank=1.0)}, rollout=vllm())
    (pool,) = pools_of(given).values()
    actor, weights = pool.roles["actor"], weights_of(given)
    assert actor.peak - actor.kept < weights + GB
    assert pool.kept == actor.kept
    assert pool.peak == actor.kept + weights + GB + CONTEXT


def test_the_cache_of_transformers_counts_only_while_it_generates():
    given = config({"main": Pool(ranks=2, gpus_per_rank=1.0)}, rollout=Rollout(max_new_tokens=32))
    (pool,) = pools_of(given).values()
    actor, weights = pool.roles["actor"], weights_of(given)
    # Keys and values of 2 layers, 8 rows of 64 + 32 tokens, 2 heads of 32 numbers, with room for half as many again.
    cache = 3 * (2 * 2 * (8 * 96) * (2 * 32) * 4) // 2
    assert pool.kept == actor.kept + weights
    assert pool.peak == pool.kept + max(cache, actor.peak - actor.kept, actor.start) + CONTEXT


@pytest.mark.parametrize(
    ("evaluation", "limit", "rows"),
    [
        ({"samples": 7}, 256, 14),  # of 4 held-out prompts on 2 ranks, against 8 rows in training
        ({"samples": 4, "sets": {"more": {"split": "train", "limit": 6}}}, 256, 12),
        ({"samples": 7}, 10, 10),
    ],
)
def test_the_cache_of_transformers_has_the_rows_of_an_evaluation(evaluation: dict[str, Any], limit: int, rows: int):
    rollout = Rollout(max_new_tokens=32, max_num_seqs=limit)
    sections: dict[str, Any] = {"rollout": rollout, "evaluation": Evaluation.model_validate(evaluation)}
    given = config({"main": Pool(ranks=2, gpus_per_rank=1.0)}, **sections)
    (pool,) = pools_of(given).values()
    assert pool.engine is not None
    assert pool.engine.cache == 3 * (2 * 2 * (rows * 96) * (2 * 32) * 4) // 2


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v2", "deepseek_v3", "deepseek_v32", "longcat_flash", "axk1"])
def test_the_cache_of_transformers_has_the_size_of_the_models_cache(model_type: str):
    model = AutoModelForCausalLM.from_config(family_config(model_type), dtype=torch.float32).eval()
    rollout, tokens = Rollout(max_new_tokens=32), 64 + 32
    given = config({"main": Pool(ranks=1, gpus_per_rank=1.0)}, rollout=rollout)
    with torch.no_grad():
        cache = model(torch.ones(1, tokens, dtype=torch.int64), use_cache=True)[cache_name(model)]
    stored = [each for layer in cache.layers for each in vars(layer).values() if torch.is_tensor(each)]
    expected = sum(each.nbytes for each in stored if each.ndim > 2)  # the others describe the layer
    assert engine_memory(given, model, 2, 80 * GB).cache == 3 * (2 * expected) // 2


@pytest.mark.parametrize(
    ("model_type", "settings", "layer_tokens"),
    [
        # A layer with a window of 16 has a prompt of 64 tokens first.
        ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 2}, 2 * 96 + 2 * 64),
        ("gemma3_text", {"sliding_window": 80, "sliding_window_pattern": 2}, 2 * 96 + 2 * 80),
        ("gemma3_text", {"sliding_window": 4096, "sliding_window_pattern": 2}, 4 * 96),
        ("gemma3n_text", {"layer_types": ["full_attention"] * 4, "num_kv_shared_layers": 3}, 96),
        ("gemma4_text", {"sliding_window": 16, "global_head_dim": 64}, 3 * 64 + 2 * 96),  # the last layer is full
        ("mistral", {"sliding_window": 16}, 4 * 64),
    ],
)
def test_the_cache_of_transformers_has_the_size_of_each_layer(
    model_type: str, settings: dict[str, Any], layer_tokens: int
):
    given = config({"main": Pool(ranks=1, gpus_per_rank=1.0)}, rollout=Rollout(max_new_tokens=32))
    assert engine_memory(given, model_with(model_type, settings), 5, 80 * GB).cache == (
        3 * (5 * 2 * layer_tokens * (2 * 32) * 4) // 2
    )


def model_with(model_type: str, settings: dict[str, Any]) -> PreTrainedModel:
    """Return a model of four layers, with two heads of keys and values of 32 numbers."""
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    shape |= {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "pad_token_id": 0}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(shape | settings)))


def test_fewer_rows_at_once_are_proposed_if_the_cache_does_not_fit(capsys: pytest.CaptureFixture[str]):
    rollout, evaluation = Rollout(max_new_tokens=32, max_num_seqs=2048), Evaluation(samples=500)
    given = config({"main": Pool(ranks=1, gpus_per_rank=1.0)}, rollout=rollout, evaluation=evaluation)
    assert not main(given, 1.2, print)
    shown = capsys.readouterr().out
    # Of the 2000 rows of the evaluation, 0.29 GB of keys and values.
    assert re.findall(r"^  rollout.max_num_seqs=(\d+)  \(", shown, re.MULTILINE) == ["1024"]


@pytest.mark.parametrize("gpus", [1.0, 2.0])
def test_a_pool_that_only_generates_has_weights_and_cache(gpus: float):
    pools = {"main": Pool(ranks=1, gpus_per_rank=1.0), "engines": Pool(ranks=2, gpus_per_rank=gpus)}
    given = config(pools, {"rollout": "engines"}, rollout=vllm())
    engines = pools_of(given)["engines"]
    assert engines.peak == weights_of(given) // gpus + GB // gpus + CONTEXT


def test_a_vllm_whose_share_does_not_hold_its_weights_and_a_row_does_not_fit(capsys: pytest.CaptureFixture[str]):
    shape = WIDE | {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32}
    sections: dict[str, Any] = {"model": Model(config=shape), "actor": Actor(isolation_check=False)}

    def given(share: float, **options: Any) -> Config:
        rollout = vllm(kv_cache_gb=None, vllm={"gpu_memory_utilization": share} | options)
        return config({"main": Pool(ranks=4, gpus_per_rank=1.0)}, rollout=rollout, **sections)

    assert main(given(0.2), 12, print)
    capsys.readouterr()
    weights = weights_of(given(0.2))
    assert weights > 0.15 * 12 * GB
    row = 2 * 2 * (2 * 128) * (64 + 32) * 4
    just, short = ((weights + row + more) / (12 * GB) for more in (1000, -1000))
    assert open_estimator(given(just), 12).memory(given(just)).excess <= 0
    assert open_estimator(given(short), 12).memory(given(short)).excess in (1000, 1001)
    assert main(given(short, cpu_offload_gb=1.0), 12, print)
    capsys.readouterr()
    assert not main(given(0.15), 12, print)
    shown = capsys.readouterr().out
    assert (
        "it does not fit: vLLM's share of 1.8 GB of a GPU of pool main doesn't hold 1.9 GB of weights and 393 kB for "
        "the KV cache of the longest row; raise rollout.vllm.gpu_memory_utilization, or generate in a pool with more "
        "gpus_per_rank\neach of these changes makes it fit:\n"
    ) in shown
    assert re.search(r"^  rollout.vllm.gpu_memory_utilization=0.2  \([\d.]+ GB of a GPU\)$", shown, re.MULTILINE)
    assert re.search(r"^  actor.precision=bf16  \([\d.]+ GB of a GPU\)$", shown, re.MULTILINE)
    assert "actor.offload" not in shown


def test_the_share_of_a_vllm_over_several_gpus_holds_their_parts_of_the_weights():
    pools = {"main": Pool(ranks=1, gpus_per_rank=1.0), "engines": Pool(ranks=2, gpus_per_rank=2.0)}
    given = config(pools, {"rollout": "engines"}, rollout=vllm(kv_cache_gb=None, vllm={"gpu_memory_utilization": 5e-6}))
    engine = pools_of(given)["engines"].engine
    assert engine is not None
    row = 2 * 2 * (2 * 32) * (64 + 32) * 4
    assert (engine.weights, engine.row, engine.share) == (weights_of(given) // 2, row // 2, 400_000)
    assert engine.missing == 0


@pytest.mark.parametrize(
    "argument",
    [
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"load_format": "bitsandbytes"},
        {"hf_overrides": {"num_hidden_layers": 1}},
        {"decode_context_parallel_size": 2},
        {"cpu_offload_gb": 1.0},
    ],
)
def test_a_vllm_whose_weights_or_cache_may_be_smaller_is_not_refused(argument: dict[str, Any]):
    pool, share = {"main": Pool(ranks=1, gpus_per_rank=1.0)}, {"gpu_memory_utilization": 1e-6}
    model = open_estimator(config(pool), 80).model
    missing = [
        engine_memory(config(pool, rollout=vllm(kv_cache_gb=None, vllm=options)), model, 4, 80 * GB).missing
        for options in (share, share | argument)
    ]
    assert missing[0] > missing[1] == 0


@pytest.mark.parametrize(
    ("model_type", "settings", "layer_tokens"),
    [
        ("llama", {}, 4 * 96),
        ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 2}, 2 * 96 + 2 * 16),  # every second slides
        ("mistral", {"sliding_window": 16}, 4 * 16),
        ("mistral", {"sliding_window": 128}, 4 * 96),
        ("mistral", {"sliding_window": None}, 4 * 96),
        ("qwen3_next", {}, 96),  # three of four layers are linear
        ("gemma3n_text", {"layer_types": ["full_attention"] * 4, "num_kv_shared_layers": 3}, 96),
        ("gemma4_text", {"sliding_window": 16, "global_head_dim": 64}, 3 * 16 + 2 * 96),  # the last layer is full
        ("jamba", {}, 0),
    ],
)
def test_a_row_counts_where_a_vllm_certainly_keeps_it(model_type: str, settings: dict[str, Any], layer_tokens: int):
    given = config({"main": Pool(ranks=1, gpus_per_rank=1.0)}, rollout=vllm(kv_cache_gb=None))
    assert engine_memory(given, model_with(model_type, settings), 4, 80 * GB).row == 2 * layer_tokens * (2 * 32) * 4


@pytest.mark.parametrize("offload", ["none", "parameters"])
def test_weights_and_gradients_of_bf16_files_count_in_fp32(offload: str, tmp_path: Path):
    pools = {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        saved = AutoConfig.for_model(**WIDE, vocab_size=128)
        AutoModelForCausalLM.from_config(saved, dtype=dtype).save_pretrained(folder)
        character_tokenizer("".join(map(chr, range(32, 127))) + "\n").save_pretrained(folder)
        actor = Actor.model_validate({"isolation_check": False, "offload": offload})
        sections: dict[str, Any] = {"model": Model(path=str(folder)), "rollout": Rollout(max_new_tokens=32)}
        sections["algorithm"] = Algorithm(kl_coef=0.1)
        given = config({"main": Pool(ranks=1, gpus_per_rank=1.0)}, actor=actor, **sections)
        (pools[dtype],) = pools_of(given).values()
    counted, weights = pools[torch.bfloat16].roles["actor"].model, weights_of(given)
    assert counted.gradients == weights
    assert counted.optimizer == 2 * weights
    for role in ("actor", "reference"):  # with the buffers of positions
        assert pools[torch.bfloat16].roles[role].model.weights == pytest.approx(weights, rel=1e-3)
    assert pools[torch.bfloat16] == pools[torch.float32]


def model_of(weights: int, *, optimizer: int = 0, gradients: int = 0) -> ModelMemory:
    return ModelMemory(weights, optimizer, gradients, {"weights": weights}, {}, 0, 0)


def test_a_whole_model_is_in_the_host_memory_of_every_rank_as_it_starts():
    # Roles of a rank start one after another, so the largest counts; an engine's weights may sleep there meanwhile.
    roles = {
        "actor": RoleMemory(model_of(35 * GB), start=200 * GB),
        "reference": RoleMemory(model_of(0), start=280 * GB),
    }
    engine = EngineMemory(14 * GB, 26 * GB, host=14 * GB, sleeps=True)
    pool = PoolMemory("main", 2, gpus_per_rank=1.0, limit=None, roles=roles, engine=engine)
    assert pool.host == PROCESS + 14 * GB + 280 * GB
    (problem,) = RunMemory((pool,), store=GB, host_limit=500 * GB).problems()
    assert problem == (
        "all ranks together need 590 GB of host memory, but the machine has 500 GB; as a role of pool main starts, "
        "each rank holds a whole model of up to 280 GB"
    )
    assert "a rank's host memory: 294 GB, with up to 280 GB for a whole model as a role starts" in "\n".join(
        memory_lines(RunMemory((pool,), store=GB, host_limit=None))
    )


def test_moments_are_not_in_host_memory_before_the_first_step():
    actor = RoleMemory(model_of(10 * GB, optimizer=20 * GB, gradients=10 * GB), "parameters", start=30 * GB)
    reference = RoleMemory(model_of(10 * GB), "parameters", start=30 * GB)
    for roles, host in (
        ({"actor": actor}, 40 * GB),  # later: weights, gradients and moments
        ({"reference": reference}, 30 * GB),  # at its start, before its own weights are offloaded
        ({"actor": actor, "reference": reference}, 50 * GB),  # later, against 10 + 30 at the start
    ):
        assert PoolMemory("main", 2, gpus_per_rank=1.0, limit=None, roles=roles, engine=None).host == PROCESS + host


def test_pools_start_one_after_another():
    first, second = (
        PoolMemory(
            name, 2, gpus_per_rank=1.0, limit=None, roles={name: RoleMemory(model_of(0), start=size)}, engine=None
        )
        for name, size in (("actor", 30 * GB), ("critic", 50 * GB))
    )
    assert RunMemory((first, second), store=0, host_limit=None).host == 4 * PROCESS + 2 * 50 * GB


def test_ranks_on_cpus_have_their_models_in_one_memory():
    role = RoleMemory(model_of(10 * GB), start=30 * GB)
    pool = PoolMemory("main", 2, gpus_per_rank=0.0, limit=None, roles={"reference": role}, engine=None)
    assert pool.host == pool.peak == PROCESS + 40 * GB


@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_an_engine_may_have_a_whole_model_in_host_memory_as_it_starts(engine: str, path: bool, tmp_path: Path):
    """The `hf` engine loads any model whole in fp32; vLLM loads files, which rlpack writes for a new model."""
    sections: dict[str, Any] = {"rollout": Rollout(max_new_tokens=32) if engine == "hf" else vllm(dtype="bf16")}
    if path:
        saved = AutoConfig.for_model(**WIDE, vocab_size=128)
        AutoModelForCausalLM.from_config(saved).save_pretrained(tmp_path)
        character_tokenizer("".join(map(chr, range(32, 127))) + "\n").save_pretrained(tmp_path)
        sections["model"] = Model(path=str(tmp_path))
    pools = {"main": Pool(ranks=1, gpus_per_rank=1.0), "engines": Pool(ranks=2, gpus_per_rank=1.0)}
    given = config(pools, {"rollout": "engines"}, **sections)
    engines = pools_of(given)["engines"]
    whole = 0 if path and engine == "vllm" else weights_of(given)
    assert engines.host == PROCESS + whole


def test_a_bucket_holds_at_least_one_weight():
    shape = MODEL | {"hidden_size": 1024, "intermediate_size": 2**18, "num_hidden_layers": 1}
    given = config({"main": Pool(ranks=1)}, rollout=vllm(), model=Model(config=shape))
    engine = open_estimator(given, 80).engine(given)
    assert engine is not None
    assert engine.bucket == 4 * 1024 * 2**18
    assert engine.received == 2 * engine.bucket < engine.weights
    adapters = with_value(with_value(given, "actor.lora.rank", 4), "rollout.lora", "adapter")
    engine = open_estimator(given, 80).engine(adapters)
    assert engine is not None
    assert not engine.received  # they arrive in files

"""vLLM's engine arguments from the `rollout` section: sizes calculated by hand, and names that can't be set."""

import importlib.machinery
import importlib.util
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    MambaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rlpack.config.schema import Rollout
from rlpack.models.cached_layers import CachedLayer
from rlpack.models.errors import ModelError
from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.argument_names import OWN_ARGUMENTS, argument_names, argument_problems
from rlpack.rollout.vllm.arguments import Shape, engine_arguments, shape_problem, split_problem

SHAPE = Shape(head_size=32, layers=5 * (CachedLayer(heads=3, numbers=2 * 32),), vocab_size=64)
# Keys and values of one token: 2 · 5 layers · 3 heads · 32 numbers · 4 bytes.
TOKEN_BYTES = 3840
GB = 10**9

ARG_UTILS = '''
from dataclasses import dataclass
@dataclass
class Other:
    not_an_argument: int = 1
@dataclass
class EngineArgs:
    """All arguments."""
    model: str = "some/model"
    swap_space: float = 4
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    _private: int = 0
    plain = 3
    def method(self):
        local: int = 1
@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
    scheduling_policy: str = "fcfs"
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that puts a source file in the place of the installed vLLM's engine arguments."""

    def install(source: str | None) -> Path:
        path = tmp_path / "engine" / "arg_utils.py"
        path.parent.mkdir(exist_ok=True)
        if source is not None:
            path.write_text(source)
        spec = importlib.machinery.ModuleSpec("vllm", None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path)]
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "vllm" else find_spec(name))
        return path

    return install


def arguments(*, dtype: str = "fp32", max_length: int = 100, gpus: int = 0, **rollout):
    settings = Rollout(**({"engine": "vllm"} | rollout))
    return engine_arguments(settings, SHAPE, model="m", dtype=dtype, max_length=max_length, gpus=gpus)


def with_memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


@pytest.mark.parametrize(
    ("max_length", "rows", "dtype", "num_bytes"),
    [
        # 100 tokens take 4 blocks of 32, and vLLM keeps one: 160 tokens a row.
        (100, 10, "fp32", 10 * 160 * TOKEN_BYTES),
        (100, 10, "bf16", 10 * 160 * TOKEN_BYTES // 2),
        (128, 10, "fp32", 10 * 160 * TOKEN_BYTES),
        (129, 10, "fp32", 10 * 192 * TOKEN_BYTES),
        (32, 256, "fp32", 256 * 64 * TOKEN_BYTES),
        (32, 1, "fp32", 2 * 64 * TOKEN_BYTES),  # never less than two rows
    ],
)
def test_the_cache_holds_the_rows_that_run_at_once(monkeypatch, max_length, rows, dtype, num_bytes):
    with_memory(monkeypatch, 1000 * GB)
    given = arguments(max_length=max_length, max_num_seqs=rows, dtype=dtype)
    assert given["kv_cache_memory_bytes"] == num_bytes


@pytest.mark.parametrize(("available", "num_bytes"), [(16_000_000, 2_000_000), (1000, 2 * 160 * TOKEN_BYTES)])
def test_the_cache_takes_an_eighth_of_the_available_memory_but_two_rows_at_least(monkeypatch, available, num_bytes):
    with_memory(monkeypatch, available)
    assert arguments()["kv_cache_memory_bytes"] == num_bytes


def test_the_cache_has_the_size_of_its_key_on_both_devices():
    for gpus in (0, 1):
        assert arguments(kv_cache_gb=0.25, gpus=gpus)["kv_cache_memory_bytes"] == GB // 4
    assert arguments(kv_cache_gb=0.3, gpus=3)["kv_cache_memory_bytes"] == GB // 10  # vLLM's argument is of each GPU
    assert "kv_cache_memory_bytes" not in arguments(gpus=1)  # vLLM takes its share of the GPU


def test_a_cache_too_small_for_two_rows_is_refused_with_the_size_that_it_needs():
    needed = 2 * 160 * TOKEN_BYTES  # 1,228,800
    assert arguments(kv_cache_gb=needed / GB)["kv_cache_memory_bytes"] == needed
    with pytest.raises(EngineError, match=r"set it to at least 0\.00123, or"):
        arguments(kv_cache_gb=(needed - 1) / GB)
    # Three heads on six GPUs: two GPUs hold each.
    assert arguments(kv_cache_gb=2 * needed / GB, gpus=6)["kv_cache_memory_bytes"] == needed // 3
    with pytest.raises(EngineError, match=r"set it to at least 0\.00246, or"):
        arguments(kv_cache_gb=(2 * needed - 1) / GB, gpus=6)
    with pytest.raises(EngineError) as caught:
        arguments(kv_cache_gb=0.001)
    assert str(caught.value) == (
        "rollout.kv_cache_gb is 0.001, but the cache has to hold the keys and values of two rows of 100 tokens in "
        "fp32; set it to at least 0.00123, or lower data.max_prompt_tokens or rollout.max_new_tokens"
    )


@pytest.mark.parametrize("max_length", [1, 33, 100, 777, 4096, 100_000, 3_000_000])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_size_that_a_refusal_names_is_enough(max_length, dtype):
    with pytest.raises(EngineError) as caught:
        arguments(kv_cache_gb=1e-9, max_length=max_length, dtype=dtype)
    named = re.findall(r"set it to at least ([\d.]+), or", str(caught.value))[0]
    arguments(kv_cache_gb=float(named), max_length=max_length, dtype=dtype)
    assert len(named.strip("0.").replace(".", "")) <= 3


def test_more_rows_than_tokens_of_prompts_fit_on_a_cpu():
    assert arguments(max_num_seqs=5000)["max_num_batched_tokens"] == 5000  # vLLM refuses fewer
    assert arguments(max_num_seqs=50)["max_num_batched_tokens"] == 4096


def test_larger_blocks_count_in_the_size_of_the_cache(monkeypatch):
    with_memory(monkeypatch, 1000 * GB)
    # One block of 512 holds the row, and vLLM keeps one.
    given = arguments(max_num_seqs=4, vllm={"block_size": 512})
    assert (given["block_size"], given["kv_cache_memory_bytes"]) == (512, 4 * 1024 * TOKEN_BYTES)


def test_rows_run_as_the_section_says():
    given = arguments(max_length=5000, max_num_seqs=7, dtype="bf16")
    assert (given["max_model_len"], given["max_num_seqs"], given["dtype"]) == (5000, 7, "bfloat16")
    assert given["logprobs_mode"] == "processed_logprobs"
    # On a CPU a prompt runs whole, however long it is.
    assert (given["enable_chunked_prefill"], given["max_num_batched_tokens"]) == (False, 5000)
    assert arguments()["max_num_batched_tokens"] == 4096
    assert "enable_chunked_prefill" not in arguments(gpus=1)


@pytest.mark.parametrize(
    ("compiles", "gpus", "is_eager"), [(None, 0, True), (None, 1, False), (True, 0, False), (False, 1, True)]
)
def test_models_are_compiled_on_gpus_alone_unless_the_key_says_otherwise(compiles, gpus, is_eager):
    assert arguments(compile=compiles, gpus=gpus)["enforce_eager"] is is_eager


def test_several_gpus_of_a_rank_share_the_model():
    assert arguments(gpus=4)["tensor_parallel_size"] == 4
    assert arguments(gpus=4)["distributed_executor_backend"] == "mp"
    assert arguments(gpus=0)["tensor_parallel_size"] == 1


def test_only_engines_on_gpus_that_are_to_sleep_are_made_for_it():
    assert arguments(gpus=1, sleep_level=1)["enable_sleep_mode"] is True
    for others in ({"gpus": 1}, {"gpus": 1, "sleep_level": 0}, {"gpus": 0, "sleep_level": 1}):
        assert "enable_sleep_mode" not in arguments(**others)


def test_a_further_argument_replaces_a_default():
    assert arguments(vllm={"max_num_batched_tokens": 64})["max_num_batched_tokens"] == 64


@pytest.mark.parametrize("size", [8, 16, 20, 24, 48, 72, 100, 320])
def test_heads_that_no_kernel_takes_are_refused_with_the_sizes_that_work(size: int):
    problem = shape_problem(Shape(size, (), 8), on_gpu=False)
    assert problem is not None
    assert f"heads have {size} numbers" in problem
    assert "32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512" in problem
    assert "rollout.engine=hf" in problem
    assert shape_problem(Shape(size, (), 8), on_gpu=True) is None


@pytest.mark.parametrize("size", [32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512])
def test_heads_of_the_other_sizes_pass(size: int):
    assert shape_problem(Shape(size, (), 8), on_gpu=False) is None


def shape_of(head_size: int, *, kv_heads: int, layers: int, window: int | None = None) -> Shape:
    return Shape(head_size, layers * (CachedLayer(kv_heads, 2 * head_size, window),), vocab_size=9)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (Qwen2Config(hidden_size=96, num_attention_heads=3, num_key_value_heads=1, num_hidden_layers=2, vocab_size=9),
            shape_of(32, kv_heads=1, layers=2)),
        (Gemma3TextConfig(hidden_size=96, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=4,
            head_dim=64, vocab_size=9), shape_of(64, kv_heads=3, layers=4, window=4096)),
        (Qwen3MoeConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, head_dim=16,
            vocab_size=9), shape_of(16, kv_heads=2, layers=1)),
        (GPT2Config(n_embd=64, n_head=2, n_layer=3, vocab_size=9), shape_of(32, kv_heads=2, layers=3)),
        (Gemma3Config(text_config={"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3,
            "num_hidden_layers": 4, "head_dim": 64, "vocab_size": 9}), shape_of(64, kv_heads=3, layers=4, window=4096)),
    ],
    ids=["no head_dim", "head_dim", "experts", "other names", "a text config"],
)  # fmt: skip
def test_the_shape_is_that_of_the_models_config(config, shape):
    assert Shape.of(config) == shape


@pytest.mark.parametrize(("gpus", "share"), [(0, 1), (1, 1), (4, 4)])
def test_every_gpu_caches_the_compressed_keys_and_values_of_latent_attention(gpus: int, share: int):
    config = DeepseekV3Config(num_hidden_layers=3, kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=128)
    needed = 2 * 160 * 3 * (512 + 64) * 2 * share
    for size in (needed, needed - 1):
        settings = Rollout(engine="vllm", kv_cache_gb=size / GB)
        with nullcontext() if size == needed else pytest.raises(EngineError, match="kv_cache_gb is"):
            engine_arguments(settings, Shape.of(config), model="m", dtype="bf16", max_length=100, gpus=gpus)


def test_layers_of_several_head_sizes_are_cached():
    config = Gemma4TextConfig(num_hidden_layers=12, num_key_value_heads=4, head_dim=256, global_head_dim=512)
    assert Shape.of(config).cache_bytes(100, "bf16") == 2 * 4 * (10 * 256 + 2 * 512) * 100 * 2


DIVISIBLE = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 65}


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_gpus_that_divide_a_models_sizes_or_repeat_its_key_heads_split_it(gpus: int):
    assert split_problem(Qwen2Config(**DIVISIBLE), gpus) is None


@pytest.mark.parametrize(
    ("sizes", "gpus", "words"),
    [
        ({}, 3, "the model's num_attention_heads is 8, which 3 GPUs don't divide"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "num_key_value_heads is 3, which 2 GPUs neither"),
        ({"intermediate_size": 70}, 4, "the model's intermediate_size is 70, which 4 GPUs don't divide"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 63}, 3,
            "vocab_size, rounded up to a multiple of 64, is 128, which 3 GPUs don't divide"),
    ],
)  # fmt: skip
def test_gpus_that_cannot_split_a_model_are_refused_with_the_size(sizes, gpus, words):
    """vLLM's own rules: `ModelConfig.verify_with_parallel_config`, its layers' assertions, and `divide` of 0.32."""
    assert words in str(split_problem(Qwen2Config(**DIVISIBLE | sizes), gpus))


def test_experts_are_split_by_their_own_width():
    config = Qwen3MoeConfig(
        **DIVISIBLE | {"num_attention_heads": 4, "intermediate_size": 63, "moe_intermediate_size": 30}
    )
    assert split_problem(config, 2) is None
    assert "moe_intermediate_size is 30, which 4 GPUs" in str(split_problem(config, 4))


def test_a_model_without_heads_is_refused():
    with pytest.raises(ModelError, match=r"a mamba model has no attention heads, .* set rollout\.engine=hf"):
        Shape.of(MambaConfig())


def test_the_names_are_those_of_the_installed_source(installed):
    installed(ARG_UTILS)
    names = {"model", "swap_space", "block_size", "kv_cache_dtype", "enable_log_requests", "scheduling_policy"}
    assert argument_names() == names


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, r"can't be read from .*arg_utils\.py"),
        ("def (", r"can't be read from .*arg_utils\.py"),
        ("class EngineArgs:\n    swap_space: int = 1\n", "has no class EngineArgs with its arguments; rlpack works wi"),
    ],
)
def test_a_source_of_another_form_is_refused(installed, source, words):
    installed(source)
    with pytest.raises(EngineError, match=words):
        argument_names()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("model", "set model.path instead"),
        ("dtype", "set rollout.dtype instead"),
        ("max_model_len", "set data.max_prompt_tokens and rollout.max_new_tokens instead"),
        ("kv_cache_memory_bytes", "set rollout.kv_cache_gb instead"),
        ("enforce_eager", "set rollout.compile instead"),
        ("max_lora_rank", "set actor.lora.rank instead"),
        ("max_loras", "remove it"),
        ("max_cpu_loras", "remove it"),
        ("lora_target_modules", "remove it"),
        ("spec_method", "remove it"),
        ("seed", "remove it"),
        ("worker_extension_cls", "remove it"),
    ],
)
def test_an_argument_that_rlpack_sets_is_refused_with_the_key_to_set(installed, name: str, instead: str):
    installed(ARG_UTILS)
    problems = list(argument_problems({name: 1}, on_gpu=False))
    assert problems == [f"rollout.vllm.{name}: rlpack sets this argument of vLLM itself; {instead}"]


@pytest.mark.parametrize("name", ["enable_return_routed_experts", "aux_output_config"])
def test_results_that_a_run_does_not_read_are_refused_and_a_server_returns_them(installed, name: str):
    path = installed(ARG_UTILS.replace("swap_space", f"{name}: object = None\n    swap_space", 1))
    (problem,) = argument_problems({name: True}, on_gpu=True)
    assert problem.startswith(f"rollout.vllm.{name}: vLLM would return the experts that it chose, which rlpack doesn't")
    assert "; remove it, and set actor.moe.replay_routing=true to replay those" in problem
    frontend = path.parent.parent / "entrypoints" / "common" / "cli_args.py"
    frontend.parent.mkdir(parents=True)
    frontend.write_text("class BaseFrontendArgs:\n    chat_template: str | None = None\n")
    assert list(argument_problems({name: True}, on_gpu=True, section="vllm", own={}, of_server=True)) == []


def test_all_arguments_that_rlpack_gives_vllm_are_its_own_but_those_with_a_default():
    given = arguments(gpus=0).keys()
    assert arguments(gpus=0)["language_model_only"] is arguments(gpus=0)["skip_tokenizer_init"] is True
    assert given - OWN_ARGUMENTS.keys() == {"block_size", "max_num_batched_tokens", "use_tqdm_on_load"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("swap_spaces", "; did you mean rollout.vllm.swap_space?"),
        ("kv_cache_typ", "; did you mean rollout.vllm.kv_cache_dtype?"),
        ("modell", "; remove it"),  # the nearest name can't be set
        ("qqqq", "; remove it"),
        ("_private", "; remove it"),
        ("not_an_argument", "; remove it"),
    ],
)
def test_an_unknown_argument_is_named_with_the_nearest_one(installed, name: str, hint: str):
    installed(ARG_UTILS)
    problems = list(argument_problems({name: 1}, on_gpu=False))
    assert problems == [f"rollout.vllm.{name} is not an engine argument of the installed vLLM{hint}"]


@pytest.mark.parametrize(("size", "on_cpu", "on_gpu"), [(16, False, True), (64, True, True), (32, True, True)])
def test_blocks_on_a_cpu_have_a_multiple_of_32_tokens(installed, size: int, on_cpu: bool, on_gpu: bool):
    installed(ARG_UTILS)
    expected = [f"rollout.vllm.block_size is {size}; it has to be a positive multiple of 32 on CPUs, such as 64"]
    assert list(argument_problems({"block_size": size}, on_gpu=False)) == ([] if on_cpu else expected)
    assert (list(argument_problems({"block_size": size}, on_gpu=True)) == []) is on_gpu


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0"), (-32, "-32"), (64.0, "64.0"), ("64", "'64'"), (True, "true"), (None, "null"), ([64], r"\[64\]")],
)
def test_what_is_no_size_of_a_block_is_refused_on_both_devices(installed, size, shown: str):
    installed(ARG_UTILS)
    for on_gpu, words in (
        (False, "a positive multiple of 32 on CPUs, such as 64"),
        (True, "a whole number of at least"),
    ):
        (problem,) = argument_problems({"block_size": size}, on_gpu=on_gpu)
        assert re.match(rf"rollout\.vllm\.block_size is {shown}; it has to be {words}", problem)


@pytest.mark.parametrize("share", [0, 1.1, "0.5", None, True, -0.5])
def test_a_share_of_the_gpu_is_a_share(installed, share):
    installed(ARG_UTILS.replace("swap_space", "gpu_memory_utilization: float = 0.9\n    swap_space", 1))
    (problem,) = argument_problems({"gpu_memory_utilization": share}, on_gpu=True)
    assert problem.endswith("; it has to be a number above 0 and up to 1")
    for fitting in (0.5, 1, 1.0):
        assert list(argument_problems({"gpu_memory_utilization": fitting}, on_gpu=True)) == []


def test_no_argument_needs_no_source(installed):
    installed(None)
    assert list(argument_problems({}, on_gpu=False)) == []

"""The arguments of vLLM's server: sizes calculated by hand, and the words of its command line."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import BloomConfig, GPT2Config, MambaConfig, Phi3Config, Qwen2Config

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.server_arguments import command_line, server_arguments
from rlpack.rollout.vllm.server_options import ServerOptions

GB = 10**9
# Keys and values of one token in fp32: 2 · 5 layers · 3 heads · 32 numbers · 4 bytes.
TOKEN_BYTES = 3840


def config(**changes) -> Qwen2Config:
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 5}
    return Qwen2Config(**({"max_position_embeddings": 1000, "vocab_size": 9} | sizes | changes))


def arguments(model=None, **options):
    return server_arguments(model or config(), ServerOptions(**options), model="folder", name="mine")


def with_memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


def test_the_longest_row_is_the_models_where_the_cache_has_room(monkeypatch):
    with_memory(monkeypatch, 1000 * GB)
    given = arguments()
    assert given["max_model_len"] == 1000
    # 1000 tokens take 32 blocks of 32, and vLLM keeps one; 256 rows at once.
    assert given["kv_cache_memory_bytes"] == 256 * 33 * 32 * TOKEN_BYTES
    assert (given["model"], given["served_model_name"], given["host"], given["port"]) == (
        "folder",
        "mine",
        "127.0.0.1",
        0,
    )


@pytest.mark.parametrize("options", [{}, {"kv_cache_gb": 100.0}])
def test_the_longest_row_of_a_longrope_model_has_the_frequencies_of_short_rows(monkeypatch, options: dict):
    with_memory(monkeypatch, 100_000 * GB)
    factors = [1.0] * 16
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": [2.0] * 16}
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 64}
    phi = Phi3Config(
        **sizes,
        pad_token_id=0,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters=rope | {"original_max_position_embeddings": 4096},
    )
    assert arguments(phi, **options)["max_model_len"] == 4096
    assert arguments(phi, max_length=8192, **options)["max_model_len"] == 8192


def test_without_room_the_longest_row_is_the_one_that_the_cache_holds_twice(monkeypatch):
    # An eighth of it holds 20 blocks of 32 tokens: two rows of 9 blocks, and one more each.
    with_memory(monkeypatch, 8 * 20 * 32 * TOKEN_BYTES)
    given = arguments()
    assert given["max_model_len"] == 9 * 32
    assert given["kv_cache_memory_bytes"] == 20 * 32 * TOKEN_BYTES
    assert arguments(kv_cache_gb=(2 * 4 * 32 * TOKEN_BYTES + 1) / GB)["max_model_len"] == 3 * 32


def test_a_given_cache_too_small_for_a_given_length_is_refused_with_the_size_that_it_needs():
    with pytest.raises(EngineError) as caught:
        arguments(max_length=100, kv_cache_gb=0.001)
    assert str(caught.value) == (
        "--kv-cache-gb is 0.001, but the cache has to hold the keys and values of two rows of 100 tokens in fp32; set "
        "it to at least 0.00123, or lower --max-length"
    )


def test_a_length_over_the_models_is_refused_unless_the_config_is_overridden(monkeypatch):
    with_memory(monkeypatch, 1000 * GB)
    words = r"--max-length is 1001, but vLLM takes at most 1000 tokens of this qwen2 model .*; lower it to 1000 or less"
    with pytest.raises(EngineError, match=words):
        arguments(max_length=1001)
    assert arguments(max_length=1001, vllm={"hf_overrides": {"max_position_embeddings": 2000}})["max_model_len"] == 1001
    assert arguments(GPT2Config(n_positions=64, n_embd=64, n_head=2, n_layer=1))["max_model_len"] == 64


@pytest.mark.parametrize(("kind", "longest"), [("linear", 2500), ("dynamic", 2500), ("default", 1000)])
def test_a_rope_that_stretches_positions_raises_the_longest_row_as_it_does_in_a_run(monkeypatch, kind, longest):
    """vLLM multiplies the positions by the factor: `_get_and_verify_max_len` of 0.32."""
    with_memory(monkeypatch, 1000 * GB)
    factor = {} if kind == "default" else {"factor": 2.5}
    model = config(rope_parameters={"rope_type": kind, "rope_theta": 1e4} | factor)
    assert arguments(model)["max_model_len"] == longest
    assert arguments(model, max_length=longest)["max_model_len"] == longest
    with pytest.raises(EngineError, match=f"at most {longest} tokens"):
        arguments(model, max_length=longest + 1)


def test_a_model_that_names_no_limit_serves_2048_tokens_or_what_is_given(monkeypatch):
    with_memory(monkeypatch, 1000 * GB)
    unlimited = BloomConfig(hidden_size=64, n_head=2, n_layer=1, vocab_size=9)
    assert arguments(unlimited)["max_model_len"] == 2048
    assert arguments(unlimited, max_length=4096)["max_model_len"] == 4096


@pytest.mark.parametrize(
    ("saved", "chosen", "dtype"),
    [
        (torch.float32, None, "float32"),
        (torch.bfloat16, None, "bfloat16"),
        (torch.float16, None, "bfloat16"),
        (None, None, "float32"),
        (torch.bfloat16, "fp32", "float32"),
    ],
)
def test_the_type_is_that_of_the_files_unless_chosen(saved, chosen, dtype):
    assert arguments(config(dtype=saved), dtype=chosen)["dtype"] == dtype


def test_heads_that_no_kernel_takes_and_models_without_attention_are_refused():
    with pytest.raises(EngineError, match=r"heads have 24 numbers.*; serve it on a GPU"):
        arguments(config(hidden_size=72))
    with pytest.raises(EngineError, match=r"'folder' is a mamba model without attention heads"):
        arguments(MambaConfig())


def test_a_server_on_gpus_leaves_the_cache_to_vllm_and_shares_the_model_by_vllms_own_key():
    given = arguments(on_gpu=True, vllm={"tensor_parallel_size": 4})
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (4, "mp")
    assert "kv_cache_memory_bytes" not in given
    stages = arguments(on_gpu=True, vllm={"pipeline_parallel_size": 2})
    assert (stages["tensor_parallel_size"], stages["distributed_executor_backend"]) == (1, "mp")
    assert arguments(vllm={"tensor_parallel_size": 2})["distributed_executor_backend"] == "mp"
    assert arguments()["distributed_executor_backend"] == "uni"
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    shared = arguments(on_gpu=True, kv_cache_gb=0.5, vllm=sizes)
    assert shared["kv_cache_memory_bytes"] == GB // 8  # vLLM's argument is of each GPU
    assert "gpu_memory_utilization" not in given
    own = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    assert arguments(on_gpu=True, vllm=own)["distributed_executor_backend"] == "ray"
    assert given["enforce_eager"] is False
    assert arguments(on_gpu=True, vllm={"enforce_eager": True})["enforce_eager"] is True


def test_a_server_with_a_given_cache_needs_no_share_of_a_gpu_to_be_free():
    assert arguments(on_gpu=True, kv_cache_gb=0.5)["gpu_memory_utilization"] == 0.01
    own = {"gpu_memory_utilization": 0.7}
    assert arguments(on_gpu=True, kv_cache_gb=0.5, vllm=own)["gpu_memory_utilization"] == 0.7
    assert "gpu_memory_utilization" not in arguments(kv_cache_gb=0.5)


def test_on_gpus_vllm_fits_the_longest_row_to_the_memory_that_it_measures():
    """-1 does this in vLLM, for models with a limit: `_get_and_verify_max_len` of 0.32."""
    given = arguments(on_gpu=True)
    assert given["max_model_len"] == -1
    assert "--max-model-len=-1" in command_line(given)
    assert arguments(on_gpu=True, max_length=100)["max_model_len"] == 100
    assert arguments(on_gpu=True, kv_cache_gb=2 * 4 * 32 * TOKEN_BYTES / GB)["max_model_len"] == 3 * 32
    unlimited = BloomConfig(hidden_size=64, n_head=2, n_layer=1, vocab_size=9)
    assert arguments(unlimited, on_gpu=True)["max_model_len"] == 2048


def test_no_path_of_the_server_is_left_to_vllms_own_check_of_the_token():
    from rlpack.rollout.vllm import require_token

    module, _, name = arguments()["middleware"].rpartition(".")
    assert (module, name) == (require_token.__name__, require_token.RequireToken.__name__)


def test_further_arguments_replace_defaults_and_none_leaves_vllms():
    words = command_line(arguments(vllm={"max_num_seqs": 2, "seed": None, "override_generation_config": {"top_k": 3}}))
    assert words[words.index("--max-num-seqs") + 1] == "2"
    assert "--seed" not in words
    assert words[words.index("--override-generation-config") + 1] == '{"top_k": 3}'

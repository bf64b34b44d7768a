"""Updates that are loaded directly: what vLLM computes then is bit by bit what it computes with its own loading."""

import os

import pytest
import torch

from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.errors import BucketError, EngineError
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from tests.vllm.engines import CANARY, FAMILIES, TOLERANCE, gap, perturb, policy, send, start, why_not_direct

# An engine takes 10 s to start; `make test-vllm-long` starts all.
MOE, DENSE = ["mixtral"], [("qwen2", True, "fp32"), ("gemma3_text", False, "bf16")]
if os.environ.get("RLPACK_DIRECT_LOAD") == "all":
    MOE = ["mixtral", "qwen3_moe"]
    DENSE = [(family, tied, dtype) for family in FAMILIES if family not in MOE for tied in (True, False)
             for dtype in ("fp32", "bf16")]  # fmt: skip


@pytest.mark.parametrize(("family", "tied", "dtype"), DENSE)
def test_an_update_that_is_loaded_directly_gives_the_bits_of_one_that_vllm_loads(family: str, tied: bool, dtype: str):
    """The same weights, by vLLM in a new engine, and directly after others; buckets cut layers at many places."""
    built, other = (policy(family, tied=tied, seed=seed) for seed in (3, 4))
    engine = start(family, tied=tied, dtype=dtype)
    try:
        send_as(engine, built, 10**9)
        expected = engine.logprobs(CANARY)
        assert why_not_direct(engine) == ""
        for bucket_bytes in (1, 10_000, 100_000, 10**9):
            send_as(engine, other, bucket_bytes)
            assert not engine.logprobs(CANARY).equal(expected)
            send_as(engine, built, bucket_bytes)
            assert engine.logprobs(CANARY).equal(expected), bucket_bytes
        assert why_not_direct(engine) == ""
    finally:
        engine.close()


def send_as(engine: VLLMEngine, built, bucket_bytes: int) -> None:
    """Send weights in the engine's type."""
    stream = WeightStream(built, engine.dtype, bucket_bytes=bucket_bytes)
    engine.check_weights(stream.layout)
    for bucket in stream:
        engine.load_bucket(bucket)
    engine.finish_update()


@pytest.mark.parametrize("family", MOE)
def test_experts_which_vllm_packs_are_always_loaded_by_vllm(family: str):
    engine, built = start(family, tied=False), policy(family, tied=False)
    try:
        for seed in range(3):
            perturb(built, seed, 0.02)
            send(engine, built, bucket_bytes=(10_000, 100_000, 10**9)[seed])
            assert gap(engine, built) <= TOLERANCE
            assert "experts" in why_not_direct(engine)
    finally:
        engine.close()


def test_the_first_update_makes_the_plan_even_in_buckets_that_cut_layers():
    engine, built = start("qwen2", tied=False), policy("qwen2", tied=False)
    try:
        send(engine, built, bucket_bytes=1)
        assert why_not_direct(engine) == ""
        perturb(built, 1, 0.02)
        send(engine, built, bucket_bytes=1)
        assert gap(engine, built) <= TOLERANCE
    finally:
        engine.close()


def test_weights_that_are_not_those_of_the_plan_are_refused_and_vllm_loads_the_next_update(shared_engine: VLLMEngine):
    built = policy("qwen2", tied=False, seed=51)
    send(shared_engine, built)
    assert why_not_direct(shared_engine) == ""
    stream = WeightStream(built, torch.float32)
    (weights,) = list(stream)
    shared_engine.check_weights(stream.layout)
    name = "model.layers.1.mlp.up_proj.weight"
    shared_engine.load_bucket(weights | {name: weights[name][:-1].contiguous()})
    with pytest.raises(BucketError, match=rf"weight {name} .* is not as in the first update"):
        shared_engine.finish_update()
    send(shared_engine, built)
    assert gap(shared_engine, built) <= TOLERANCE
    assert why_not_direct(shared_engine) == ""


def test_an_update_without_one_of_its_weights_is_refused_by_name(shared_engine: VLLMEngine):
    built = policy("qwen2", tied=False, seed=52)
    send(shared_engine, built)
    stream = WeightStream(built, torch.float32)
    (weights,) = list(stream)
    shared_engine.check_weights(stream.layout)
    del weights["model.layers.0.self_attn.k_proj.bias"]
    shared_engine.load_bucket(weights)
    with pytest.raises(EngineError, match=r"1 weights of the update are missing, the first is .*0\.self_attn\.k_proj"):
        shared_engine.finish_update()
    send(shared_engine, built)
    assert gap(shared_engine, built) <= TOLERANCE

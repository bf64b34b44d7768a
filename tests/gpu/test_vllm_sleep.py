"""vLLM on CUDA: sleep frees GPU memory, and an engine that wakes generates as before."""

from collections.abc import Iterator

import pytest
import torch

from rlpack.rollout.device_memory import used_bytes
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from tests.gpu.test_vllm_weights import CLOSE, FAR, pytestmark
from tests.vllm.engines import gap, policy, prompts_of, sampled, send, start

__all__ = ["pytestmark"]

CACHE_GB = 2.0
DEVICE = torch.device("cuda")


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[VLLMEngine]:
    started = start("qwen2", tied=False, device="cuda", sleep_level=request.param, kv_cache_gb=CACHE_GB)
    yield started
    started.close()


def test_an_engine_starts_asleep_and_each_sleep_frees_nine_tenths_of_its_cache(engine: VLLMEngine):
    asleep = used_bytes(DEVICE)
    for seed in (1, 2):
        built = policy("qwen2", tied=False, seed=seed)
        send(engine, built)
        assert gap(engine, built) <= CLOSE
        awake = used_bytes(DEVICE)
        assert awake - asleep >= 0.9 * CACHE_GB * 1e9
        engine.sleep()
        assert awake - used_bytes(DEVICE) >= 0.9 * CACHE_GB * 1e9


@pytest.mark.parametrize("engine", [1], indirect=True)
def test_weights_that_were_moved_to_host_memory_come_back_unchanged(engine: VLLMEngine):
    send(engine, policy("qwen2", tied=False, seed=1))
    params = SamplingParams(max_new_tokens=8)
    before = sampled(engine, prompts_of(3, 5), params)
    engine.sleep()
    assert engine.wake()
    after = sampled(engine, prompts_of(3, 5), params)
    assert after.token_ids.values.equal(before.token_ids.values)


@pytest.mark.parametrize("engine", [2], indirect=True)
def test_discarded_weights_come_back_by_an_update(engine: VLLMEngine):
    assert not engine.wake()
    built = policy("qwen2", tied=False, seed=3)
    send(engine, built)
    assert gap(engine, built) <= CLOSE
    assert gap(engine, policy("qwen2", tied=False, seed=4)) > FAR

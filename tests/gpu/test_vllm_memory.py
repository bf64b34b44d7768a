"""vLLM on CUDA starts next to a trainer that holds, or has cached, most of a GPU."""

from collections.abc import Iterator

import pytest
import torch

from rlpack.rollout.vllm.argument_names import SHARE_WITH_GIVEN_CACHE
from tests.gpu.test_vllm_weights import CLOSE, pytestmark
from tests.vllm.engines import gap, policy, send, start

__all__ = ["pytestmark"]

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def most_of_a_gpu() -> Iterator[list[torch.Tensor]]:
    held = [
        torch.empty(int(0.7 * torch.cuda.get_device_properties(DEVICE).total_memory), dtype=torch.uint8, device=DEVICE)
    ]
    yield held
    held.clear()
    torch.cuda.empty_cache()


def check_starts(**rollout) -> None:
    """Start an engine, and check that its weights can be updated."""
    engine, built = start("qwen2", tied=True, device="cuda", **rollout), policy("qwen2", tied=True, seed=1)
    try:
        send(engine, built)
        assert gap(engine, built) <= CLOSE
    finally:
        engine.close()


def test_an_engine_takes_half_of_a_gpu_that_a_trainer_has_only_cached(most_of_a_gpu: list[torch.Tensor]):
    most_of_a_gpu.clear()
    assert torch.cuda.memory_reserved() > torch.cuda.get_device_properties(DEVICE).total_memory / 2
    check_starts(kv_cache_gb=None, vllm={"gpu_memory_utilization": 0.5})


def test_an_engine_with_a_given_cache_starts_where_less_than_half_of_a_gpu_is_free(most_of_a_gpu: list[torch.Tensor]):
    check_starts(kv_cache_gb=0.5, vllm={"gpu_memory_utilization": SHARE_WITH_GIVEN_CACHE})
    assert most_of_a_gpu

"""`rollout.lora=adapter` with vLLM itself: its log-probs with an adapter are those of transformers with peft's."""

from collections.abc import Iterator

import pytest
import torch

from rlpack.config.sections.optimization import Lora
from rlpack.models.adapters import add_adapters
from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from tests.vllm.engines import TOLERANCE, causal_lm, gap, prompts_of, sampled, start, token_gaps

SEED, RANK = 3, 4


def adapted(family: str, **settings: object) -> Policy:
    """Return a policy with adapters whose base weights are those of an engine with the same seed."""
    model = causal_lm(family, tied=True, seed=SEED)
    add_adapters(model, Lora.model_validate({"rank": RANK, "alpha": 8.0} | settings), seed=1)
    return Policy(model)


@torch.no_grad()
def train(policy: Policy, seed: int) -> None:
    """Change all matrices of adapters; B starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in policy.named_parameters():
        if "lora_" in name:
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)


def send_adapters(engine: VLLMEngine, policy: Policy) -> None:
    stream = WeightStream(policy, torch.float32, adapters_only=True, bucket_bytes=10_000)
    engine.check_weights(stream.layout)
    assert len(stream.layout) > 1
    for bucket in stream:
        engine.load_bucket(bucket)
    engine.finish_update()


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    started = start("qwen2", tied=True, seed=SEED, lora="adapter", vllm={"max_lora_rank": RANK})
    yield started
    started.close()


def test_each_update_is_used_at_once(engine: VLLMEngine):
    """Prompts are the same throughout: cached keys of an older adapter would show."""
    policy, prompts = adapted("qwen2"), prompts_of(5, 40, 70)
    for version in range(1, 5):
        train(policy, seed=version)
        assert gap(engine, policy) > 0.1  # the update is not there yet
        send_adapters(engine, policy)
        assert gap(engine, policy) < TOLERANCE
        for temperature in (0.7, 1.3):
            params = SamplingParams(max_new_tokens=20, temperature=temperature)
            assert max(token_gaps(policy, prompts, sampled(engine, prompts, params), params)) < TOLERANCE


def test_an_update_that_lacks_a_bucket_is_not_used(engine: VLLMEngine):
    policy = adapted("qwen2")
    stream = WeightStream(policy, torch.float32, adapters_only=True, bucket_bytes=10_000)
    engine.check_weights(stream.layout)
    engine.load_bucket(stream.gather(0))
    with pytest.raises(EngineError, match=r"of 28 matrices of adapters arrived before the update was to end"):
        engine.finish_update()
    send_adapters(engine, policy)
    assert gap(engine, policy) < TOLERANCE


def test_some_layers_can_be_adapted(engine: VLLMEngine):
    policy = adapted("qwen2", targets=("*.q_proj", "*.down_proj"), alpha=20.0)
    train(policy, seed=9)
    send_adapters(engine, policy)
    assert gap(engine, policy) < TOLERANCE

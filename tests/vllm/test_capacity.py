"""Engines short of cache, which preempt rows and compute them again, and compiled engines sample the same responses."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from tests.vllm.engines import CANARY, TOLERANCE, gap, policy, prompts_of, sampled, send, start, token_gaps

PROMPTS = prompts_of(*(5 + 7 * row % 60 for row in range(16)))
PARAMS = SamplingParams(max_new_tokens=350, temperature=1.0)
MAX_LENGTH = 512
# Two rows of 512 tokens, the least that is accepted: 1,024 bytes a token.
TWO_ROWS_GB = 0.00118


@pytest.fixture(scope="module")
def roomy() -> Iterator[VLLMEngine]:
    built = start("qwen2", tied=False, max_length=MAX_LENGTH, kv_cache_gb=0.05)
    send(built, policy("qwen2", tied=False))
    yield built
    built.close()


def test_rows_that_were_preempted_are_the_same_rows(roomy: VLLMEngine, monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.metrics.stats import IterationStats

    preempted = 0
    update = IterationStats.update_from_events

    def counted(self: IterationStats, *arguments: Any, **options: Any) -> None:
        nonlocal preempted
        before = self.num_preempted_reqs
        update(self, *arguments, **options)
        preempted += self.num_preempted_reqs - before

    monkeypatch.setattr(IterationStats, "update_from_events", counted)
    expected = sampled(roomy, PROMPTS, PARAMS)
    assert preempted == 0
    built = policy("qwen2", tied=False)
    engine = start("qwen2", tied=False, max_length=MAX_LENGTH, kv_cache_gb=TWO_ROWS_GB)
    try:
        send(engine, built)
        made = sampled(engine, PROMPTS, PARAMS)
        assert preempted > 0, "the cache held all rows"
    finally:
        engine.close()
    for one, other in zip(made.token_ids.rows(), expected.token_ids.rows(), strict=True):
        assert torch.equal(one, other)
    assert max(token_gaps(built, PROMPTS, made, PARAMS)) < TOLERANCE


def test_a_compiled_engine_has_the_trainers_log_probs_and_the_rows_of_an_eager_one(roomy: VLLMEngine):
    built = policy("qwen2", tied=False)
    engine = start("qwen2", tied=False, max_length=MAX_LENGTH, compile=True)
    try:
        send(engine, built)
        assert gap(engine, built) < TOLERANCE
        made, expected = sampled(engine, PROMPTS, PARAMS), sampled(roomy, PROMPTS, PARAMS)
        assert max(token_gaps(built, PROMPTS, made, PARAMS)) < TOLERANCE
        same = [torch.equal(*rows) for rows in zip(made.token_ids.rows(), expected.token_ids.rows(), strict=True)]
        assert np.mean(same) > 0.8  # rounding differs, so that a draw at the border of two tokens may, too
        other = policy("qwen2", tied=False, seed=8)  # compiled code reads the new weights
        send(engine, other)
        assert gap(engine, other) < TOLERANCE
        assert not torch.allclose(engine.logprobs(CANARY), roomy.logprobs(CANARY), atol=0.1)
    finally:
        engine.close()

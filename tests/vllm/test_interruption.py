"""Interrupted rows keep what they sampled, and go on with the weights that the engine has then."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlpack.models.policy import Policy
from rlpack.rollout.decoders import cache_name
from rlpack.rollout.types import Generations, SamplingParams
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from tests.vllm.engines import TOLERANCE, gap, policy, prompts_of, row_logits, sampled, send, start, token_gaps

PROMPTS = prompts_of(5, 17, 1, 30)
LONG_PROMPTS = prompts_of(150, 170)
PARAMS = SamplingParams(max_new_tokens=400, stop_token_ids=(7,))
# Seconds of work, so that rows can be interrupted.
LONG = SamplingParams(max_new_tokens=1500)
SEEDS = np.arange(4, dtype=np.uint64) + 11


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    built = start("qwen2", tied=False, max_length=2048, kv_cache_gb=0.2)
    yield built
    built.close()


def answers(engine: VLLMEngine, count: int) -> dict[int, Any]:
    """Return the responses to all rows in flight."""
    responses: dict[int, Any] = {}
    end = time.monotonic() + 60.0
    while len(responses) < count and time.monotonic() < end:
        for row in engine.finished(1.0):
            assert not row.failure, row.failure
            responses[row.key] = row.response
    assert len(responses) == count
    return responses


def begin(engine: VLLMEngine, params: SamplingParams, after_s: float) -> None:
    engine.begin(range(PROMPTS.num_rows), PROMPTS, params, SEEDS)
    time.sleep(after_s)


def in_order(engine: VLLMEngine, responses: dict[int, Any], params: SamplingParams) -> Generations:
    return engine.to_generations([responses[key] for key in sorted(responses)], params)


def test_tokens_have_the_logprobs_of_the_weights_that_sampled_them(engine: VLLMEngine):
    policies = {}
    for version in (1, 2, 3):
        policies[version] = policy("qwen2", tied=False, seed=version)
        if version == 1:
            send(engine, policies[1])
            engine.policy_version = 1
            begin(engine, LONG, after_s=0.3)
            continue
        engine.interrupt()
        send(engine, policies[version])
        assert gap(engine, policies[version]) < TOLERANCE, "the canary is scored while rows wait"
        engine.policy_version = version
        engine.resume()
        time.sleep(0.3)
    made = in_order(engine, answers(engine, PROMPTS.num_rows), LONG)
    rows = zip(made.token_ids.rows(), made.logprobs.rows(), made.policy_versions.rows(), PROMPTS.rows(), strict=True)
    for tokens, logprobs, versions, prompt in rows:
        assert tokens.numel() == LONG.max_new_tokens
        assert versions.tolist() == sorted(versions.tolist())
        assert set(versions.tolist()) == {1, 2, 3}, "the test was too fast or too slow to interrupt twice"
        whole = torch.cat([prompt, tokens])
        for version in (1, 2, 3):
            expected = row_logits(policies[version], whole)[prompt.numel() - 1 : -1].log_softmax(-1)
            own = versions == version
            assert torch.allclose(expected.gather(1, tokens[:, None])[own, 0], logprobs[own], atol=TOLERANCE)


def test_greedy_rows_are_those_without_an_interruption(engine: VLLMEngine):
    params = SamplingParams(temperature=0.0, max_new_tokens=300, stop_token_ids=(7,))
    whole = sampled(engine, PROMPTS, params, SEEDS)
    begin(engine, params, after_s=0.2)
    for _ in range(3):
        engine.interrupt()
        engine.resume()
        time.sleep(0.1)
    made = in_order(engine, answers(engine, PROMPTS.num_rows), params)
    assert made.token_ids.values.equal(whole.token_ids.values)
    assert made.finish_reasons == whole.finish_reasons


def test_continued_rows_draw_other_random_numbers_than_at_their_beginning(engine: VLLMEngine):
    # Without an output layer all tokens are equally likely, and a row's tokens show its random numbers alone.
    flat = policy("qwen2", tied=False)
    with torch.no_grad():
        flat.model.get_output_embeddings().weight.zero_()
    send(engine, flat)
    engine.policy_version = 1
    begin(engine, LONG, after_s=0.3)
    engine.interrupt()
    engine.policy_version = 2
    engine.resume()
    made = in_order(engine, answers(engine, PROMPTS.num_rows), LONG)
    for tokens, versions in zip(made.token_ids.rows(), made.policy_versions.rows(), strict=True):
        cut = int((versions == 1).sum())
        assert 0 < cut < tokens.numel() - 20
        assert not tokens[cut : cut + 20].equal(tokens[:20])


def test_rows_that_begin_during_an_interruption_wait(engine: VLLMEngine):
    engine.interrupt()
    begin(engine, PARAMS, after_s=0.0)
    assert engine.finished(1.0) == []
    engine.resume()
    assert len(answers(engine, PROMPTS.num_rows)) == PROMPTS.num_rows


def test_requests_that_a_paused_vllm_refuses_are_sent_again(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch):
    from rlpack.rollout.vllm import library

    front_end, paused = engine._engine, asyncio.Event()
    generate, pause_generation = front_end.generate, front_end.pause_generation

    async def refuse_until_paused(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        if not paused.is_set():  # in transit until the pause, then refused, which vLLM does from 0.33 on
            await paused.wait()
            raise library.RetryableRequestError("Generation is paused.")
        async for output in generate(*arguments, **options):
            yield output

    async def pause(**options: Any) -> None:
        await pause_generation(**options)
        paused.set()

    monkeypatch.setattr(front_end, "generate", refuse_until_paused)
    monkeypatch.setattr(front_end, "pause_generation", pause)
    begin(engine, PARAMS, after_s=0.1)
    engine.interrupt()
    assert engine.finished(0.1) == []
    engine.resume()
    assert len(answers(engine, PROMPTS.num_rows)) == PROMPTS.num_rows


@torch.no_grad()
def logprobs_over_a_cache(tokens: torch.Tensor, older: Policy, newer: Policy, cached: int) -> torch.Tensor:
    """Return log p(token | tokens before it) of the newer policy, over keys and values of the older one's first tokens.

    f32 [L - cached - 1], for the tokens after the first uncached one.
    """
    cache = older.model(input_ids=tokens[None, :cached], use_cache=True)[cache_name(older.model)]
    arguments = {cache_name(newer.model): cache, "use_cache": True}
    logits = newer.model(input_ids=tokens[None, cached:], **arguments).logits[0]
    return logits[:-1].log_softmax(-1).gather(1, tokens[cached + 1 :, None])[:, 0]


def test_kept_keys_and_values_are_those_of_the_weights_that_computed_them():
    engine = start("qwen2", tied=False, max_length=2048, kv_cache_gb=0.2, kv_cache="keep")
    try:
        policies = {version: policy("qwen2", tied=False, seed=version) for version in (1, 2)}
        send(engine, policies[1])
        engine.policy_version = 1
        # Several blocks of keys and values of these prompts stay in the cache.
        older = sampled(engine, LONG_PROMPTS, PARAMS, SEEDS[:2])
        begin(engine, LONG, after_s=0.5)
        engine.interrupt()
        send(engine, policies[2])
        assert gap(engine, policies[2]) < TOLERANCE, "the canary reads no cache"
        engine.policy_version = 2
        engine.resume()
        made = in_order(engine, answers(engine, PROMPTS.num_rows), LONG)
        fresh = sampled(engine, LONG_PROMPTS, PARAMS, SEEDS[:2])
        block = engine._engine.vllm_config.cache_config.block_size
    finally:
        engine.close()
    for prompt, tokens, logprobs, versions in zip(
        PROMPTS.rows(), made.token_ids.rows(), made.logprobs.rows(), made.policy_versions.rows(), strict=True
    ):
        whole, before = torch.cat([prompt, tokens]), int((versions == 1).sum())
        given = prompt.numel() + before
        assert block < given < whole.numel() - 20, "the test was too fast or too slow to interrupt"
        cached = (given - 1) // block * block  # whole blocks, and at least one token is computed again
        expected = logprobs_over_a_cache(whole, policies[1], policies[2], cached)[given - cached - 1 :]
        assert torch.allclose(expected, logprobs[before:], atol=TOLERANCE)
        cleared = row_logits(policies[2], whole)[given - 1 : -1].log_softmax(-1).gather(1, whole[given:, None])[:, 0]
        assert not torch.allclose(cleared, logprobs[before:], atol=10 * TOLERANCE)
    assert LONG_PROMPTS.lengths.min() > 2 * block
    assert max(token_gaps(policies[1], LONG_PROMPTS, older, PARAMS)) < TOLERANCE
    assert max(token_gaps(policies[2], LONG_PROMPTS, fresh, PARAMS)) < TOLERANCE, "the cache has older keys"

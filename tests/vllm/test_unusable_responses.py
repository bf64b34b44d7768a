"""A response of vLLM that can't be used fails its own row, with the reason; the engine goes on."""

from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.distributed.context import RankContext
from rlpack.rollout.canary import TOLERANCES
from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from rlpack.workers.rollout import RolloutWorker
from tests.vllm.engines import TOKENIZER, VOCABULARY, policy, prompts_of, send

PARAMS = SamplingParams(max_new_tokens=6)
PROMPTS = (3, 5, 4)
SPOILED = 1  # whose prompt has 5 tokens


def logprobs_of(output: Any, values: np.ndarray, tokens: Any = None) -> Any:
    flat = output.logprobs
    starts = list(flat.start_indices)[: len(values)]
    ids = flat.token_ids if tokens is None else tokens
    return SimpleNamespace(start_indices=starts, token_ids=list(ids), logprobs=values)


def changed(output: Any, **fields: Any) -> Any:
    names = ("token_ids", "logprobs", "finish_reason", "weight_versions")
    return SimpleNamespace(**({name: getattr(output, name) for name in names} | fields))


def with_value(value: float) -> Callable[[Any], Any]:
    def spoil(output: Any) -> Any:
        values = np.array(output.logprobs.logprobs, dtype=np.float64)
        values[output.logprobs.start_indices[2]] = value
        return changed(output, logprobs=logprobs_of(output, values))

    return spoil


def missing(output: Any) -> Any:
    return changed(output, logprobs=None)


def too_few(output: Any) -> Any:
    flat = output.logprobs
    short = SimpleNamespace(
        start_indices=list(flat.start_indices)[:-1], token_ids=flat.token_ids, logprobs=flat.logprobs
    )
    return changed(output, logprobs=short)


def outside(output: Any) -> Any:
    tokens = [*list(output.token_ids)[:-1], VOCABULARY]
    ids = list(output.logprobs.token_ids)
    ids[output.logprobs.start_indices[-1]] = VOCABULARY
    values = np.array(output.logprobs.logprobs, dtype=np.float64)
    short = SimpleNamespace(start_indices=output.logprobs.start_indices, token_ids=ids, logprobs=values)
    return changed(output, token_ids=tokens, logprobs=short)


def other_tokens(output: Any) -> Any:
    return changed(output, token_ids=[(token + 1) % VOCABULARY for token in output.token_ids])


def cut_off(output: Any) -> Any:
    return changed(output, finish_reason="error")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (missing, "vLLM returned 0 log-probs for the 6 tokens"),
        (too_few, "vLLM returned 5 log-probs for the 6 tokens"),
        (with_value(float("nan")), "vLLM returned the log-prob nan for token 2; it has to be finite and at most 0"),
        (with_value(0.5), "vLLM returned the log-prob 0.5 for token 2; it has to be finite and at most 0"),
        (outside, f"token id {VOCABULARY}"),
        (other_tokens, "vLLM returned log-probs for tokens that it has not sampled"),
        (cut_off, "vLLM ended the request after 6 tokens with 'error'"),
    ],
    ids=["missing", "too few", "NaN", "positive", "outside the vocabulary", "of other tokens", "cut off"],
)
def test_a_spoiled_response_is_named_and_generated_again(
    shared_engine: VLLMEngine, spoil: Callable[[Any], Any], words: str, monkeypatch: pytest.MonkeyPatch
):
    send(shared_engine, policy("qwen2", tied=False, seed=70))
    shared_engine.policy_version = 7
    sample, left = shared_engine._engine.generate, [1]

    async def generate(prompt: Any, *args: Any, **named: Any) -> AsyncIterator[Any]:
        async for output in sample(prompt, *args, **named):
            is_spoiled = bool(left) and output.finished and len(prompt["prompt_token_ids"]) == PROMPTS[SPOILED]
            if is_spoiled:
                left.clear()
            yield SimpleNamespace(outputs=[spoil(output.outputs[0])]) if is_spoiled else output

    monkeypatch.setattr(shared_engine._engine, "generate", generate)
    worker = RolloutWorker(
        RankContext(),
        shared_engine,
        TOKENIZER,
        canary_tolerance=TOLERANCES[torch.float32],
        rebuild=lambda: shared_engine,
    )
    prompts, count = prompts_of(*PROMPTS), len(PROMPTS)
    ids = {"group_ids": torch.zeros(count, dtype=torch.int64), "uid": ["one"] * count}
    rows = BatchedDataDict({"input_ids": prompts, "seeds": torch.arange(count), **ids})
    ended = worker.advance(rows, PARAMS, 0, 0, 30.0, count)
    assert [bool(failure) for failure in ended["engine_failure"]] == [False, True, False]
    failure = ended["engine_failure"][SPOILED]
    assert failure.startswith("its response of policy version 7 can't be used: ")
    assert words in failure
    assert ended["engine_has_failed"].tolist() == [False] * count
    assert ended["engine_version"].tolist() == [7] * count
    again = worker.advance(rows.select([SPOILED]), PARAMS, 0, 0, 30.0, 1)
    assert again["engine_failure"] == [""]
    alone = shared_engine.generate(prompts, PARAMS, np.arange(count))
    assert again["input_ids"].rows()[0][PROMPTS[SPOILED] :].tolist() == alone.token_ids.rows()[SPOILED].tolist()

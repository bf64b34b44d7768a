"""Sampling parameters to vLLM, and results that vLLM may return, back to the types of rlpack."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlpack.batch.ragged import Ragged
from rlpack.rollout.assemble import assemble
from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import SamplingParams, TrajectoryBatch
from rlpack.rollout.vllm.requests import prompt_logprobs, to_generations, to_prompt, to_sampling

PARAMS = SamplingParams(max_new_tokens=3, stop_token_ids=(1, 9))


def flat(tokens: list[int], logprobs: list[float], per_token: int = 1) -> SimpleNamespace:
    """Return log-probs as vLLM's `FlatLogprobs` has them: for each token itself and those next to it in rank."""
    return SimpleNamespace(
        start_indices=[per_token * index for index in range(len(tokens))],
        token_ids=[token + 50 * rank for token in tokens for rank in range(per_token)],
        logprobs=[value - 9 * rank for value in logprobs for rank in range(per_token)],
    )


def with_starts(starts: list[int], tokens: list[int], logprobs: Sequence[float] | None = None) -> SimpleNamespace:
    """Return damaged log-probs: the first entry of each position, and all entries."""
    return SimpleNamespace(start_indices=starts, token_ids=tokens, logprobs=logprobs or [-1.0] * len(tokens))


def span(start: int, end: int, version: str) -> SimpleNamespace:
    return SimpleNamespace(start=start, end=end, version=version)


def completion(tokens: list[int], **changes) -> SimpleNamespace:
    """Return a finished `vllm.CompletionOutput`."""
    fields = {
        "token_ids": tokens,
        "logprobs": flat(tokens, [-0.5 - index for index in range(len(tokens))]),
        "finish_reason": "stop" if tokens and tokens[-1] in PARAMS.stop_token_ids else "length",
        "weight_versions": [span(0, len(tokens), "4")],
    }
    return SimpleNamespace(**(fields | changes))


def assembled(*outputs: SimpleNamespace, params: SamplingParams = PARAMS):
    """Return the rollout batch of some results, as the rollout role makes it."""
    prompts = Ragged.from_rows([torch.tensor([5, 6])] * len(outputs), torch.int64)
    made = TrajectoryBatch.single_turn(prompts, to_generations(outputs, params))
    ids = torch.arange(len(outputs))
    return assemble(made, group_ids=ids, uids=[str(n) for n in ids.tolist()], vocab_size=40, policy_version=4)


def test_results_become_columns_in_their_order():
    first = completion([7, 8, 9], weight_versions=[span(0, 1, "3"), span(1, 3, "4")])
    second = completion([2, 3, 4], logprobs=flat([2, 3, 4], [-1.0, 0.0, 1e-7], per_token=3))
    made = to_generations([first, second, completion([1])], PARAMS)
    assert [row.tolist() for row in made.token_ids.rows()] == [[7, 8, 9], [2, 3, 4], [1]]
    assert [row.tolist() for row in made.logprobs.rows()] == [[-0.5, -1.5, -2.5], [-1.0, 0.0, 0.0], [-0.5]]
    assert [row.tolist() for row in made.policy_versions.rows()] == [[3, 4, 4], [4, 4, 4], [4]]
    assert made.finish_reasons == ["stop", "length", "stop"]
    assert assembled(first, second)["response_lengths"].tolist() == [3, 3]


def test_greedy_tokens_are_certain():
    made = to_generations([completion([7, 8, 2])], SamplingParams(temperature=0, max_new_tokens=3))
    assert made.logprobs.values.tolist() == [0.0] * 3


def test_no_row_is_a_result_too():
    assert to_generations([], PARAMS).token_ids.num_rows == 0


FAULTS = {
    "no log-probs": (completion([2, 3, 4], logprobs=None), "vLLM returned 0 log-probs for the 3 tokens of row 1"),
    "a log-prob too few": (
        completion([2, 3, 4], logprobs=flat([2, 3], [-1, -1])),
        "vLLM returned 2 log-probs for the 3 tokens of row 1",
    ),
    "a log-prob too many": (
        completion([2, 3, 4], logprobs=flat([2, 3, 4, 4], [-1] * 4)),
        "vLLM returned 4 log-probs for the 3 tokens of row 1",
    ),
    "no log-prob of the last token": (
        completion([2, 3, 4], logprobs=with_starts([0, 1, 2], [2, 3])),
        "vLLM returned 2 log-probs for the 3 tokens of row 1",
    ),
    "no log-prob of the first of two equal tokens": (
        completion([5, 5, 4], logprobs=with_starts([0, 0, 1], [5, 4])),
        "vLLM returned 2 log-probs for the 3 tokens of row 1",
    ),
    "starts beyond the log-probs": (
        completion([2, 3, 4], logprobs=with_starts([0, 9, 3], [2, 3, 4])),
        "vLLM returned 1 log-probs for the 3 tokens of row 1",
    ),
    "fewer values than ids": (
        completion([2, 3, 4], logprobs=with_starts([0, 1, 2], [2, 3, 4], [-1, -1])),
        "vLLM returned 2 log-probs for the 3 tokens of row 1",
    ),
    "log-probs of other tokens": (
        completion([2, 3, 4], logprobs=flat([2, 4, 3], [-1, -1, -1])),
        "log-probs of row 1 for tokens that it has not sampled",
    ),
    "a log-prob of NaN": (
        completion([2, 3, 4], logprobs=flat([2, 3, 4], [-1, float("nan"), -1])),
        "the log-prob nan for token 1 of row 1; it has to be finite and at most 0",
    ),
    "a positive log-prob": (
        completion([2, 3, 4], logprobs=flat([2, 3, 4], [-1, -1, 1e-3])),
        r"log-prob 0\.001 for token 2 of row 1",
    ),
    "an infinite log-prob": (
        completion([2, 3, 4], logprobs=flat([2, 3, 4], [-1, -float("inf"), -1])),
        "log-prob -inf for token 1 of row 1",
    ),
    "an id outside the vocabulary": (completion([2, 40, 4]), r"token id 40 .* of row 1; it has to be from 0 to 39"),
    "a negative id": (completion([2, -1, 4]), "token id -1 .* of row 1"),
    "an aborted request": (
        completion([2, 3], finish_reason="abort"),
        "ended the request of row 1 after 2 tokens with 'abort'; a response ends with 'stop' or 'length'",
    ),
    "an unfinished request": (completion([2], finish_reason=None), "row 1 after 1 tokens with None"),
    "no token": (completion([]), "row 1 after 0 tokens with 'length'"),
    "an early end": (
        completion([2, 3]),
        "ended the response of row 1 after 2 of 3 tokens, without a stop token",
    ),
    "an early stop": (
        completion([2, 3], finish_reason="stop"),
        "ended the response of row 1 after 2 of 3 tokens, without a stop token",
    ),
    "a token too many": (completion([2, 3, 4, 5]), "row 1 after 4 tokens, and 3 were asked for"),
    "a stop token in the middle": (completion([2, 9, 4]), "row 1 continued after the stop token 9"),
    "no versions": (completion([2, 3, 4], weight_versions=None), "no policy version for token 0 of row 1"),
    "a token without a version": (
        completion([2, 3, 4], weight_versions=[span(0, 2, "4")]),
        "no policy version for token 2 of row 1",
    ),
    "a version in words": (
        completion([2, 3, 4], weight_versions=[span(0, 3, "default")]),
        "policy version 'default' .* of row 1",
    ),
    "a version that was never published": (
        completion([2, 3, 4], weight_versions=[span(0, 3, "5")]),
        "policy version 5 in segment 1 .* of row 1",
    ),
}


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize(("output", "words"), FAULTS.values(), ids=FAULTS)
def test_a_result_that_cannot_be_used_is_refused_and_its_row_named(
    output: SimpleNamespace, words: str, temperature: float
):
    with pytest.raises(EngineError, match=words):
        assembled(completion([2, 3, 4]), output, params=replace(PARAMS, temperature=temperature))


def test_a_prompt_is_salted_with_its_version():
    prompt = to_prompt(np.array([3, 4]), 7)
    assert prompt == {"prompt_token_ids": [3, 4], "cache_salt": "7"}
    assert to_prompt(np.array([3, 4]), 8)["cache_salt"] != prompt["cache_salt"]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_seed_is_never_the_one_that_means_none(seed: int):
    given = to_sampling(PARAMS, seed)["seed"]
    assert given == seed % 2**63
    assert 0 <= given < 2**63


def test_sampling_parameters_keep_their_values():
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=8, stop_token_ids=(3, 4))
    given = to_sampling(params, 6)
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 8, "stop_token_ids": [3, 4], "seed": 6}
    assert given.items() >= (expected | {"ignore_eos": True, "logprobs": 0, "flat_logprobs": True}).items()
    assert "n" not in given


def prompted(**changes) -> SimpleNamespace:
    """Return a finished `vllm.RequestOutput`; vLLM has no log-prob for the first token of a prompt."""
    scores = flat([4, 5, 6], [-99.0, -0.25, -0.5])
    return SimpleNamespace(**({"prompt_token_ids": [4, 5, 6], "prompt_logprobs": scores} | changes))


def test_log_probs_of_a_prompt_begin_with_0():
    assert prompt_logprobs(prompted(), 3).tolist() == [0.0, -0.25, -0.5]


def test_log_probs_of_a_prompt_as_vllm_returns_them():
    """The first token has no entry at all, and the others have the token's and those of the highest rank."""
    scores = SimpleNamespace(start_indices=[0, 0, 2], token_ids=[5, 1, 6, 2], logprobs=[-0.25, -0.1, -0.5, -0.3])
    assert prompt_logprobs(prompted(prompt_logprobs=scores), 3).tolist() == [0.0, -0.25, -0.5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_logprobs": None}, "0 log-probs for a prompt of 3 tokens"),
        ({"prompt_logprobs": flat([4, 5], [-1, -1])}, "2 log-probs for a prompt of 3 tokens"),
        ({"prompt_logprobs": with_starts([0, 0, 1], [5])}, "tokens that are not those of the prompt"),
        ({"prompt_logprobs": flat([4, 6, 5], [-1, -1, -1])}, "tokens that are not those of the prompt"),
    ],
)
def test_log_probs_that_do_not_fit_their_prompt_are_refused(changes, words):
    with pytest.raises(EngineError, match=words):
        prompt_logprobs(prompted(**changes), 3)

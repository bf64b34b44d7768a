"""Convert sampling parameters to vLLM's, and its results to `rlpack.rollout.types`.

Invariants (tests/vllm/test_sampling.py, tests/unit/rollout/vllm/test_requests.py):

1. each row is a separate request (n = 1) with its own seed, so its tokens depend on no other row;
2. log-probs are those of the distribution that was sampled from, and 0 for greedy rows, as in every engine;
3. a response ends with `stop` if its last token is a stop token, else with `length`; any other end is an error.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpack.batch.ragged import Ragged
from rlpack.rollout.errors import EngineError, SamplingError
from rlpack.rollout.types import FinishReason, Generations, SamplingParams

# vLLM takes seeds of 63 bits, and reads -1 as no seed.
_SEED_MASK = (1 << 63) - 1
# Rounding of the softmax can give a certain token a log-prob of 1e-7.
_ROUNDING = 1e-5


class _Logprobs(NamedTuple):
    """Log-probs of tokens, with the attributes of vLLM's `FlatLogprobs`."""

    start_indices: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


class _VersionSpan(NamedTuple):
    """The policy version of consecutive tokens, with the attributes of vLLM's spans."""

    start: int
    end: int
    version: str


class JoinedOutput(NamedTuple):
    """A response that was sampled in parts, with the attributes of `vllm.CompletionOutput` that are read here."""

    token_ids: list[int]
    logprobs: _Logprobs | None
    finish_reason: str | None
    weight_versions: list[_VersionSpan]


def joined(parts: Sequence[Any]) -> Any:
    """Join the parts of one response, each a `vllm.CompletionOutput`; it ends as the last part does."""
    if len(parts) == 1:
        return parts[0]
    spans, offset = [], 0
    for part in parts:
        spans += [
            _VersionSpan(offset + span.start, offset + span.end, span.version) for span in part.weight_versions or ()
        ]
        offset += len(part.token_ids)
    return JoinedOutput(
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=_joined_logprobs(parts),
        finish_reason=parts[-1].finish_reason,
        weight_versions=spans,
    )


def _joined_logprobs(parts: Sequence[Any]) -> _Logprobs | None:
    """Return the log-probs of all parts; None if a part with tokens has none."""
    flats = [part.logprobs for part in parts if len(part.token_ids)]
    if any(flat is None for flat in flats):
        return None
    starts, offset = [], 0
    for flat in flats:
        starts.append(np.asarray(flat.start_indices, dtype=np.int64) + offset)
        offset += len(flat.token_ids)
    return _Logprobs(
        np.concatenate([np.zeros(0, dtype=np.int64), *starts]),
        np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(flat.token_ids) for flat in flats)]),
        np.concatenate([np.zeros(0), *(np.asarray(flat.logprobs, dtype=np.float64) for flat in flats)]),
    )


def continuation_seed(seed: int, num_sampled: int) -> int:
    """Return the seed for a row's tokens after the first `num_sampled`; for 0, the row's own seed.

    Each request restarts its random numbers, so the row's seed would draw those of its first tokens again.
    """
    if num_sampled == 0:
        return seed
    return int(np.random.SeedSequence([seed & _SEED_MASK, num_sampled]).generate_state(1, np.uint64)[0])


def to_prompt(token_ids: Sequence[int], policy_version: int) -> dict[str, Any]:
    """Return a prompt of token ids, which shares cached prefixes only with prompts of the same policy version."""
    return {"prompt_token_ids": list(token_ids), "cache_salt": str(policy_version)}


def to_sampling(params: SamplingParams, seed: int) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.SamplingParams` for one row.

    Args:
        params: how tokens are sampled.
        seed: seed of the row; only its lowest 63 bits are used.
    """
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": int(seed) & _SEED_MASK,
        "max_tokens": params.max_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,  # only of the sampled token
        "flat_logprobs": True,
        "detokenize": False,
    }


def check_sampling(params: SamplingParams) -> None:
    """Refuse parameters that vLLM would refuse in every request.

    Raises:
        SamplingError: says why.
    """
    from rlpack.rollout.vllm import library

    try:
        library.SamplingParams(**to_sampling(params, 0))
    except library.VLLMClientError as error:
        raise SamplingError(f"vLLM refuses the sampling parameters of rollout: {error}") from error


def to_generations(outputs: Sequence[Any], params: SamplingParams) -> Generations:
    """Return the results of all rows, in their order.

    Args:
        outputs: a finished `vllm.CompletionOutput` for each row.
        params: how tokens were sampled.

    Raises:
        EngineError: a row has no result that can be used; it is named.
    """
    # The caller names a single row.
    names = [f" of row {row}" for row in range(len(outputs))] if len(outputs) > 1 else [""]
    named = list(zip(names, outputs, strict=False))
    reasons: list[FinishReason] = [_finish_reason(of_row, output, params) for of_row, output in named]
    tokens = [torch.tensor(output.token_ids, dtype=torch.int64) for output in outputs]
    logprobs = [_logprobs(of_row, output, params) for of_row, output in named]
    versions = [_versions(of_row, output) for of_row, output in named]
    return Generations(
        token_ids=Ragged.from_rows(tokens, torch.int64),
        logprobs=Ragged.from_rows(logprobs, torch.float32),
        policy_versions=Ragged.from_rows(versions, torch.int32),
        finish_reasons=reasons,
    )


def _finish_reason(of_row: str, output: Any, params: SamplingParams) -> FinishReason:
    tokens = output.token_ids
    if output.finish_reason not in {"stop", "length"} or not tokens:
        raise EngineError(
            f"vLLM ended the request{of_row} after {len(tokens)} tokens with {output.finish_reason!r}; "
            "a response ends with 'stop' or 'length'"
        )
    if len(tokens) > params.max_new_tokens:
        raise EngineError(
            f"vLLM ended the response{of_row} after {len(tokens)} tokens, and {params.max_new_tokens} were asked for"
        )
    if stops := [token for token in tokens[:-1] if token in params.stop_token_ids]:
        raise EngineError(f"vLLM's response{of_row} continued after the stop token {stops[0]}")
    if tokens[-1] in params.stop_token_ids:
        return "stop"
    if len(tokens) < params.max_new_tokens:
        raise EngineError(
            f"vLLM ended the response{of_row} after {len(tokens)} of {params.max_new_tokens} tokens, without a "
            "stop token"
        )
    return "length"


def _logprobs(of_row: str, output: Any, params: SamplingParams) -> torch.Tensor:
    """Return the log-probs of a row's tokens, f32 [n]."""
    tokens, numbers = _first_entries(output.logprobs)
    if tokens.size != len(output.token_ids):
        raise EngineError(f"vLLM returned {tokens.size} log-probs for the {len(output.token_ids)} tokens{of_row}")
    if not np.array_equal(tokens, np.asarray(output.token_ids)):
        raise EngineError(f"vLLM returned log-probs{of_row} for tokens that it has not sampled")
    values = torch.from_numpy(numbers)
    if (wrong := ~(values.isfinite() & (values <= _ROUNDING))).any():
        index = int(wrong.nonzero()[0])
        raise EngineError(
            f"vLLM returned the log-prob {values[index].item():g} for token {index}{of_row}; it has to be finite "
            "and at most 0"
        )
    return torch.zeros_like(values) if params.is_greedy else values.clamp(max=0.0)


def _versions(of_row: str, output: Any) -> torch.Tensor:
    """Return the policy version that sampled each token of a row, int32 [n]."""
    count = len(output.token_ids)
    versions = torch.full((count,), -1, dtype=torch.int32)
    for span in output.weight_versions or ():
        if not span.version.isdecimal():
            raise EngineError(f"vLLM returned the policy version {span.version!r} for tokens{of_row}")
        versions[span.start : span.end] = int(span.version)
    if count and int(versions.min()) < 0:
        raise EngineError(f"vLLM returned no policy version for token {int(versions.argmin())}{of_row}")
    return versions


def prompt_logprobs(output: Any, length: int) -> torch.Tensor:
    """Return log p(token | tokens before it) of a prompt, f32 [length]; 0 for its first token.

    Args:
        output: a finished `vllm.RequestOutput` of a request for flat log-probs of its prompt.
        length: number of tokens of the prompt.

    Raises:
        EngineError: there is not one log-prob per token.
    """
    flat = output.prompt_logprobs
    count = 0 if flat is None else len(flat.start_indices)
    if count != length:
        raise EngineError(f"vLLM returned {count} log-probs for a prompt of {length} tokens")
    tokens, values = _first_entries(flat, after=1)  # the first token has no log-prob
    if not np.array_equal(tokens, np.asarray(output.prompt_token_ids[1:])):
        raise EngineError("vLLM returned log-probs of tokens that are not those of the prompt")
    return torch.from_numpy(np.concatenate([np.zeros(1, dtype=np.float32), values]))


def _first_entries(flat: Any, *, after: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids [n] and log-probs f32 [n] of the first entries of positions; those without any are left out.

    Args:
        flat: a `vllm.logprobs.FlatLogprobs`, or None. The entries of a position follow one another.
        after: number of positions to leave out first.
    """
    if flat is None:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    tokens, values = np.asarray(flat.token_ids, np.int64), np.asarray(flat.logprobs, np.float32)
    count = min(tokens.size, values.size)
    starts = np.asarray(flat.start_indices[after:], np.int64)
    first = starts[starts < np.minimum(np.append(starts[1:], count), count)]
    return tokens[first], values[first]

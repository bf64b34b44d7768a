"""Sample tokens from logits, each row with its own stream of random numbers.

Invariants (tests/unit/rollout/test_sampling.py):

1. a row's stream is a pure function of (seed, position): there is no generator state, so a row gets the same numbers in
   any batch and after a restart;
2. a token is the inverse of the cumulative distribution at one uniform number; a token of probability 0 is never
   sampled.
"""

import math

import numpy as np
import torch
from torch import Tensor

from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import SamplingParams

# Largest number of probabilities in memory at once: 64 MiB for each copy.
_MAX_ENTRIES = 1 << 24
# Tokens per block; a block is drawn first, then a token in it.
_BLOCK = 128


def uniforms(seeds: np.ndarray, position: int) -> np.ndarray:
    """Return one number in [0, 1) per seed, float64 [B]: entry `position` of the seed's stream.

    The streams are those of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195). Its state starts at
    the seed and grows by the constant γ before each number, so the state of entry `position`, counted from 0, is
    seed + (position + 1)·γ modulo 2^64; mixing the state's bits gives the number. Seeds have to be hashes themselves:
    streams whose seeds differ by a small multiple of γ overlap.

    >>> float(uniforms(np.array([7], dtype=np.uint64), 0)[0]) == float(uniforms(np.array([9, 7]), 0)[1])
    True
    """
    gamma = 0x9E3779B97F4A7C15
    step = np.uint64((position + 1) * gamma % 2**64)
    state = seeds.astype(np.uint64) + step
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def sample(logits: Tensor, params: SamplingParams, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return one token per row, int64 [B], and its log-prob, f32 [B], after the filters.

    >>> logits = torch.tensor([[0.0, 0.0]]).log_softmax(-1)
    >>> sample(logits, SamplingParams(), np.array([0.6]))
    (tensor([1]), tensor([-0.6931]))

    Args:
        logits: [B, V] of any floating type.
        params: temperature, top-k, top-p; greedy if the temperature is 0.
        numbers: uniform in [0, 1), float64 [B]; unused when greedy.

    Raises:
        EngineError: logits of a row are not finite.
    """
    if params.is_greedy:
        highest, tokens = logits.float().max(-1)
        _check_finite(highest, logits)
        return tokens, torch.zeros_like(highest)
    targets = torch.from_numpy(numbers).to(logits.device)
    rows = max(1, _MAX_ENTRIES // logits.shape[-1])
    if len(logits) <= rows:
        return _sample_chunk(logits, params, targets)
    chunks = zip(logits.split(rows), targets.split(rows), strict=True)
    sampled = [_sample_chunk(chunk, params, numbers) for chunk, numbers in chunks]
    return torch.cat([tokens for tokens, _ in sampled]), torch.cat([logprobs for _, logprobs in sampled])


def filtered_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the log-probs that `sample` samples from, f32 [B, V]; filtered tokens have -inf.

    >>> filtered_logprobs(torch.tensor([[2.0, 1.0, 0.0]]), SamplingParams(top_k=2)).exp()
    tensor([[0.7311, 0.2689, 0.0000]])
    """
    return _filtered(logits, params).log_softmax(-1)


def _filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the logits after temperature and filters, f32 [B, V]; filtered tokens have -inf."""
    scaled = logits.float()
    if params.temperature != 1:
        scaled = scaled / params.temperature
    if 0 < params.top_k < scaled.shape[-1]:
        smallest = scaled.topk(params.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    if params.top_p < 1:
        ordered, tokens = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
        # The mass before a token decides, so the most likely one is always kept.
        is_beyond = ordered.cumsum(-1) - ordered >= params.top_p
        scaled = scaled.masked_fill(is_beyond.scatter(-1, tokens, is_beyond), -torch.inf)
    return scaled


def _sample_chunk(logits: Tensor, params: SamplingParams, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution at `targets` [B].

    In large vocabularies a block of tokens is drawn first, then a token of it: a cumulative sum over all tokens takes
    longer than everything else here.
    """
    probabilities = _filtered(logits, params).softmax(-1)
    if probabilities.shape[-1] <= 2 * _BLOCK:
        tokens, _ = _invert(probabilities.cumsum(-1, dtype=torch.float64), targets[:, None], logits)
    else:
        padding = -probabilities.shape[-1] % _BLOCK
        padded = torch.nn.functional.pad(probabilities, (0, padding)) if padding else probabilities
        blocks = padded.unflatten(1, (-1, _BLOCK))
        sums = blocks.sum(-1)
        chosen, missing = _invert(sums.cumsum(-1, dtype=torch.float64), targets[:, None], logits)
        # The target's position within the block; rounding may move it out of [0, 1) by an ulp.
        shares = (1 - missing / sums.gather(1, chosen)).clamp(0, 1 - 2.0**-53)
        block = blocks.gather(1, chosen[:, :, None].expand(-1, 1, _BLOCK)).squeeze(1)
        tokens = chosen * _BLOCK + _invert(block.cumsum(-1, dtype=torch.float64), shares, logits)[0]
    return tokens.squeeze(1), probabilities.gather(1, tokens).log().squeeze(1)


def _invert(cumulative: Tensor, shares: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return where cumulative sums pass a share of their total, int64 [B, 1], and by how much, float64 [B, 1].

    Args:
        cumulative: sums of entries of 0 or more, float64 [B, n].
        shares: in [0, 1), float64 [B, 1].
        logits: the logits that the entries were computed from, for the error.

    Raises:
        EngineError: sums of a row are not finite.
    """
    total = cumulative[:, -1:]
    _check_finite(total.squeeze(1), logits)
    # No target reaches the total: the largest share is 1 - 2^-53, whose product with any total rounds to less. So with
    # `right` the entry is always positive.
    targets = shares * total
    entries = torch.searchsorted(cumulative, targets, right=True)
    return entries, cumulative.gather(1, entries) - targets


def _check_finite(summary: Tensor, logits: Tensor) -> None:
    """Raise on logits that cannot be sampled from; `summary` [B] is not finite for such rows."""
    if not math.isfinite(summary.sum(dtype=torch.float64).item()):
        row = int((~summary.isfinite()).nonzero()[0])
        broken = int((~logits[row].isfinite()).sum())
        raise EngineError(
            f"{broken} of {logits.shape[-1]} logits of running row {row} are NaN or infinite; the weights are broken"
        )

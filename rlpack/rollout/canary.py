"""The canary: after every load, the engine and the trainer both score a fixed prompt.

If a weight was lost, mixed up or rounded on the way, the log-probs differ, and the run stops before a token is sampled
with it. The prompt is random tokens, so that every layer contributes. The cost is one forward pass of 24 tokens on each
side.

Two differences are bounded: the largest of any token, and the mean over tokens, whose rounding errors vary less.
Rounding grows with the spread of the log-probs, so both are also bounded by a share of the log-probs' standard
deviation. How large that share is depends on the model. The first publication of a process only has to meet the bounds
for any model of its dtypes (`TOLERANCES`), and measures the share. Later publications may differ by four times as much
(`calibrated`). Their bounds are never below `CanaryTolerance.least`, which exceeds the rounding in every model and
state that was measured, and never above the bounds for any model.

Rounding was measured with the trainer's forward pass against vLLM's and the `hf` engine's: Qwen2, Qwen3, Llama, Gemma 3
and Qwen3-MoE (2 layers, hidden size 128, 68 tokens), tied and untied in fp32, untied in bf16; new models with an
initializer range of 0.02, 0.1 and 0.25, and the first two after 30, 100, 200 and 400 steps of AdamW at 3e-3, in which
the spread grows from 0.17 to 2.2 nats:

| | mean difference / spread | largest difference / spread | least bounds |
|---|---|---|---|
| fp32, vLLM | 2e-7 to 1.6e-6 | 5e-7 to 6.9e-6 | 5e-6 and 4e-5 |
| fp32, `hf` | 1e-8 to 1e-6 | 2e-7 to 3e-6 | 5e-6 and 4e-5 |
| bf16, vLLM | 3e-3 to 1.7e-2 | 8e-3 to 0.13 | 0.05 and 0.5 |
| bf16, `hf` | 4e-3 to 1.9e-2 | 1e-2 to 0.23 | 0.05 and 0.5 |

The largest difference in bf16 is that of a token that a router sent to another expert. In fp32, even log-probs that are
all equal are allowed their own rounding: 1.2e-6 nats on average, 1.2e-5 for one token.

Deep models need no other bounds. New models with 24 to 48 layers and an initializer range of 0.02 (Qwen2 and Llama,
hidden size 128 to 256, 70 tokens) have mean differences of up to 0.26 of the least bound, both in vLLM and in
transformers (8 rows at once, and token by token). At 48 layers this falls to 0.1 within 60 steps of AdamW at 1e-3 or
3e-3. With a vocabulary of 151,936 tokens, whose log-probs near -12 nats round twice as much, it is up to 0.6 at any
depth (2 to 48 layers). With a range of 0.1, rounding grows with depth and width: with 48 layers of hidden size 256, the
mean difference is 2.2 times the least bound. The first publication measures this, so that later ones may differ by four
times as much.

Measured on 30 random Qwen2 models (2 to 24 layers, hidden size 64 to 256, initializer range 0.02 to 0.2), trainer in
bf16 and engine in fp32: correct weights differ by at most 0.9 nats in one token, 0.27 nats on average, and 0.11 of the
standard deviation; with 64 tokens on other models these were 1.5, 0.28 and 0.16.

| fault in the engine's weights | found by the largest difference | by either bound |
|---|---|---|
| embedding, final norm or head zeroed; head shifted by one row | 14 of 30 | 30 of 30 |
| one layer's weights replaced by another layer's, or all zeroed | 11, 9 | 28, 26 |
| one layer's output projection transposed, or zeroed | 3, 2 | 26, 21 |
| one layer's value projection or input norm zeroed | 2, 2 | 21, 21 |
| one layer's MLP matrix or MLP norm zeroed | 7 | 18 |
| one layer's query or key projection zeroed | 0, 0 | 3, 3 |
| all weights stale by one step of ±0.001, ±0.01, ±0.03 | 0, 9, 17 | 1, 30, 30 |
| one layer's weights stale by one step of ±0.001, ±0.01, ±0.03 | 0, 0, 0 | 0, 5, 22 |

Four rows of 16 tokens detect each fault in the same number of models, give or take two. With 100 M parameters on a CPU,
they add 0.08 s to each publication instead of 0.04 s; without the canary it takes 0.14 s (benchmarks/RESULTS.md).

The table applies to the bounds for any model. In bf16, these reliably detect neither a layer that is stale by a typical
step nor a lost query or key projection.

In fp32, the bounds of the first publication detect a 1 % change of any one parameter of any one layer, in new models
with the usual initializer range of 0.02 and in trained models, for all five families
(tests/unit/rollout/test_canary_sensitivity.py; with vLLM, tests/vllm/test_families.py). In new models, the least
visible changes are those of the last layer's queries and keys, 1.6e-5 nats on average, which is 80 to 160 times the
rounding, and of a router, 30 times. More tokens would not help: with 96 tokens in one row or in four, the ratios are
the same. Log-probs can't reveal, in theory or in fp32:

- the scale of a matrix that is followed by a norm: queries and keys in Qwen3, Qwen3-MoE and Gemma 3; also values,
  output, up and down projections in Gemma 3. Scale affects log-probs only through the norm's epsilon: 1.5e-8 nats for
  queries and keys, a tenth of the rounding, and 1e-6 for values and outputs. A change of single entries is detected;
- a 1 % change of a bias near 0: after 30 steps, 3e-6 nats for the biases of queries and keys in Qwen2, where 5e-6 is
  allowed;
- queries and keys where attention has little effect: below a hidden size of 64 with a range of 0.02 (the effect grows
  with its square), and in a model that has collapsed to one distribution for all contexts (5e-7 nats after 30 steps on
  a quarter of the vocabulary).

The digests of buckets detect such changes if they happen in transit (`rlpack.rollout.bucket_receiver`).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlpack.rollout.errors import CanaryError

CANARY_LENGTH = 24  # tokens of a row
_NUM_ROWS, _SEED = 1, 20


class CanaryTolerance(NamedTuple):
    """Bounds on the differences between engine and trainer, in nats.

    Attributes:
        largest: bound on the difference of one token.
        mean: bound on the mean difference.
        share: bound on the mean difference as a share of the log-probs' standard deviation.
        largest_share: the same for the difference of one token.
        floor: mean difference that is always allowed; for a single token, ten times as much is.
        least: lower limits on the `share`, `largest_share` and `floor` that `calibrated` returns.
    """

    largest: float
    mean: float
    share: float = 0.25
    largest_share: float = math.inf
    floor: float = 1e-4
    least: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def limits(self, spread: float) -> tuple[float, float]:
        """Return the bounds on the largest and the mean difference, given the log-probs' standard deviation."""
        largest = max(_LARGEST * self.floor, self.largest_share * spread if spread else 0.0)
        return min(self.largest, largest), min(self.mean, max(self.floor, self.share * spread))


# By the less precise type of the two forward passes; the module's docstring says how they were measured.
TOLERANCES = {
    torch.float32: CanaryTolerance(1e-3, 1e-4, least=(5e-6, 4e-5, 1.2e-6)),
    torch.bfloat16: CanaryTolerance(2.0, 0.5, least=(0.05, 0.5, 1e-4)),
}
# A model's later differences may be this many times those of its first publication.
_SLACK = 4.0
# The largest difference of a token may be this many times the floor of the mean.
_LARGEST = 10.0


def canary_tokens(vocab_size: int) -> Tensor:
    """Return the fixed prompt, int64 [1, 24]; the same for the same vocabulary.

    >>> canary_tokens(100).shape
    torch.Size([1, 24])
    """
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(vocab_size, (_NUM_ROWS, CANARY_LENGTH), generator=generator)


def canary_tolerance(*dtypes: torch.dtype) -> CanaryTolerance:
    """Return the bounds on differences between correct forward passes in these types."""
    return max(TOLERANCES[dtype] for dtype in dtypes)


def check_canary(
    logprobs: Tensor, expected: Tensor, token_ids: Tensor, *, tolerance: CanaryTolerance, version: int
) -> float:
    """Return the largest difference between the engine's and the trainer's log-probs, in nats.

    Args:
        logprobs: the engine's, f32 [R, L]; those of a row's first token, which has no context, are 0.
        expected: the trainer's, f32 [R, L].
        token_ids: the canary, int64 [R, L].
        tolerance: bounds on the differences.
        version: policy version of the loaded weights.

    Raises:
        CanaryError: the largest or the mean difference exceeds its tolerance, or a log-prob is NaN.
    """
    gap, mean, spread = _measure(logprobs, expected)
    most, most_mean = tolerance.limits(spread)
    if gap <= most and mean <= most_mean:
        return gap
    gaps = (logprobs - expected).abs().nan_to_num(torch.inf)
    worst = gaps.flatten().topk(3).indices.tolist()
    columns = zip(*(column.flatten()[worst].tolist() for column in (token_ids, logprobs, expected)), strict=True)
    listed = ", ".join(f"token {token} (engine {own:.5g}, trainer {other:.5g})" for token, own, other in columns)
    raise CanaryError(
        f"log-probs of the canary at policy version {version} differ from the trainer's by up to {gap:.3g} nats "
        f"(tolerance {most:.3g}) and {mean:.3g} on average (tolerance {most_mean:.3g}), most at "
        f"{listed}; weights were corrupted in transfer, or the engine's forward pass differs from the trainer's"
    )


def calibrated(tolerance: CanaryTolerance, logprobs: Tensor, expected: Tensor) -> CanaryTolerance:
    """Return bounds for this model, from the differences measured in a publication that met `tolerance`.

    They are never wider than `tolerance`.

    Args:
        tolerance: bounds for any model of these types.
        logprobs: the engine's, f32 [R, L].
        expected: the trainer's, f32 [R, L].

    >>> expected = torch.tensor([[0.0, -1.0, -3.0]])
    >>> here = calibrated(TOLERANCES[torch.bfloat16], expected - 0.03, expected)
    >>> round(here.share, 3), here.largest_share
    (0.085, 0.5)
    """
    gap, mean, spread = _measure(logprobs, expected)
    measured = (mean / spread, gap / spread, mean) if spread else (math.inf, math.inf, mean)
    share, largest_share, floor = (
        min(most, max(least, _SLACK * value))
        for most, least, value in zip(
            (tolerance.share, tolerance.largest_share, tolerance.floor), tolerance.least, measured, strict=True
        )
    )
    return tolerance._replace(share=share, largest_share=largest_share, floor=floor)


def _measure(logprobs: Tensor, expected: Tensor) -> tuple[float, float, float]:
    """Return the largest and the mean difference, and the standard deviation of the expected log-probs."""
    gaps = (logprobs - expected).abs().nan_to_num(torch.inf)
    spread = expected[:, 1:].std().nan_to_num(0.0)
    return gaps.max().item(), gaps[:, 1:].mean().item(), spread.item()

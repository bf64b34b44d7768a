"""The canary: after every load an engine scores a fixed prompt, and so does the trainer.

If a weight was lost, mixed up or rounded on its way, the log-probs differ, and the run stops before a token is sampled
with it. The prompt is random tokens, so that every layer contributes. The cost is one forward pass of 24 tokens on each
side.

Two differences are bounded: the largest of any token, and the mean over tokens, whose rounding errors vary less.
Rounding grows with the spread of the log-probs, so the mean is also bounded by a share of their standard deviation. How
large that share is depends on the model. The first publication of a process, which only has to meet the bound for any
model, measures it; later ones may have four times as much, and 0.05 in any case (`calibrated`). In a run of the default
task in bf16 it was 0.005 to 0.009 in all 41 publications; the bound for any model is 0.25.

Measured on 30 random Qwen2 models (2 to 24 layers, hidden size 64 to 256, initializer range 0.02 to 0.2), trainer in
bf16 and engine in fp32: correct weights differ by at most 0.9 nats in one token, 0.27 nats in the mean, and 0.11 of the
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

Four rows of 16 tokens find the same faults to within two models. They take 0.08 s instead of 0.04 s of each publication
with 100 M parameters on a CPU, which takes 0.14 s without (benchmarks/RESULTS.md).

In bf16, therefore, neither a layer that is stale by a usual step nor a lost query or key projection is reliably found
by the bounds for any model.
In fp32 correct weights differ by at most 2e-6 nats. All faults of the table are found there, and weights that are stale
by a step of ±0.0001; steps of ±0.00001 are found in some models only.

A change of 1 % in one parameter alone is found in fp32, whatever the parameter, in models with wide weights
(initializer range 0.25; tests/unit/rollout/test_canary_sensitivity.py). In new models with a range of 0.02 (2 layers,
hidden size 32) it is found in embedding, head, final norm, input norms, value and output projections, but not in query
and key projections, biases and MLPs: attention is nearly uniform there, and MLPs add little. The digests of buckets
find such a change if it happens on the way (`rlpack.rollout.bucket_receiver`).
"""

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
        share: bound on the mean difference as a share of the log-probs' standard deviation; differences within rounding
            in fp32 pass in any case.
    """

    largest: float
    mean: float
    share: float = 0.25


# By the less precise type of the two forward passes; the module's docstring says how they were measured.
TOLERANCES = {torch.float32: CanaryTolerance(1e-3, 1e-4), torch.bfloat16: CanaryTolerance(2.0, 0.5)}
# A model's later differences may be this many times those of its first publication, and this share in any case.
_SLACK, _LEAST_SHARE = 4.0, 0.05


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
    mean_tolerance = max(TOLERANCES[torch.float32].mean, min(tolerance.mean, tolerance.share * spread))
    if gap <= tolerance.largest and mean <= mean_tolerance:
        return gap
    gaps = (logprobs - expected).abs().nan_to_num(torch.inf)
    worst = gaps.flatten().topk(3).indices.tolist()
    columns = zip(*(column.flatten()[worst].tolist() for column in (token_ids, logprobs, expected)), strict=True)
    listed = ", ".join(f"token {token} (engine {own:.5g}, trainer {other:.5g})" for token, own, other in columns)
    raise CanaryError(
        f"log-probs of the canary at policy version {version} differ from the trainer's by up to {gap:.3g} nats "
        f"(tolerance {tolerance.largest:g}) and {mean:.3g} on average (tolerance {mean_tolerance:.3g}), most at "
        f"{listed}; weights were corrupted in transfer, or the engine's forward pass differs from the trainer's"
    )


def calibrated(tolerance: CanaryTolerance, logprobs: Tensor, expected: Tensor) -> CanaryTolerance:
    """Return bounds for the model at hand, by the differences of a publication that was within `tolerance`.

    Args:
        tolerance: bounds for any model of these types.
        logprobs: the engine's, f32 [R, L].
        expected: the trainer's, f32 [R, L].

    >>> expected = torch.tensor([[0.0, -1.0, -3.0]])
    >>> calibrated(CanaryTolerance(2.0, 0.5), expected - 0.03, expected)
    CanaryTolerance(largest=2.0, mean=0.5, share=0.084...)
    """
    _, mean, spread = _measure(logprobs, expected)
    if spread == 0:
        return tolerance
    return tolerance._replace(share=min(tolerance.share, max(_LEAST_SHARE, _SLACK * mean / spread)))


def _measure(logprobs: Tensor, expected: Tensor) -> tuple[float, float, float]:
    """Return the largest and the mean difference, and the standard deviation of the expected log-probs."""
    gaps = (logprobs - expected).abs().nan_to_num(torch.inf)
    spread = expected[:, 1:].std().nan_to_num(0.0)
    return gaps.max().item(), gaps[:, 1:].mean().item(), spread.item()

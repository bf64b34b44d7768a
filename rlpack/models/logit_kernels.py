"""Triton kernels for the log-prob head, which read a chunk's logits once.

One sums them up, one replaces them with their gradients.

PyTorch's own operations read or write them about ten times, which takes a GPU longer than the matrix products. These
kernels compute in fp32 whatever the dtype of the logits. `rlpack.models.logprobs` uses them on GPUs.

Letters: C tokens of a chunk, V vocabulary size, or a rank's part of it.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Logits that a program reads at a time.
_BLOCK = 4096
_NUM_WARPS = 8


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _sum_up(
    logits, columns_of_labels, tops, totals, means, at_labels, stride, num_columns, softcap, scale, missing,
    HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program per token. The sums are relative to the largest logit so far, and shrink when a larger one is found.
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    top = float("-inf")
    total = 0.0
    mean = 0.0
    for first in range(0, num_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < num_columns
        x = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_SOFTCAP:
            x = softcap * _tanh(x / softcap)
        x = tl.where(inside, x * scale, float("-inf"))
        next_top = tl.maximum(top, tl.max(x, 0))
        weights = tl.exp(x - next_top)
        shrink = tl.exp(top - next_top)
        if HAS_ENTROPY:
            shift = tl.where(total > 0.0, total * (top - next_top), 0.0)
            mean = shrink * (mean + shift) + tl.sum(tl.where(inside, weights * (x - next_top), 0.0), 0)
        total = total * shrink + tl.sum(weights, 0)
        top = next_top
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(means + row, mean)
    column = tl.load(columns_of_labels + row)
    is_here = (column >= 0) & (column < num_columns)
    found = tl.load(start + column, mask=is_here, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        found = softcap * _tanh(found / softcap)
    tl.store(at_labels + row, tl.where(is_here, found * scale, missing))


@triton.jit
def _to_gradients(
    logits, columns_of_labels, normalizers, means, by_logprobs, by_entropies, stride, num_columns, softcap, scale,
    HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # With p = softmax(x): d logprob / dx = onehot - p and d entropy / dx = -p * (x - sum(p * x)).
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = logits + row * stride + columns
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    slope = scale
    if HAS_SOFTCAP:
        bounded = _tanh(x / softcap)
        x = softcap * bounded
        slope = scale * (1.0 - bounded * bounded)
    x = x * scale
    by_logprob = tl.load(by_logprobs + row)
    factor = by_logprob
    if HAS_ENTROPY:
        factor = by_logprob + tl.load(by_entropies + row) * (x - tl.load(means + row))
    gradient = -tl.exp(x - tl.load(normalizers + row)) * factor
    gradient += tl.where(columns == tl.load(columns_of_labels + row), by_logprob, 0.0)
    tl.store(places, (gradient * slope).to(logits.dtype.element_ty), mask=inside)


def sum_up(
    logits: Tensor, columns: Tensor, *, softcap: float | None, temperature: float, entropy: bool, missing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what log-probs and entropies need to know of each token's logits.

    With x the logits after soft cap and temperature, and m the largest of a token's:

    Args:
        logits: [C, V], contiguous, fp32, bf16 or fp16, before soft cap and temperature.
        columns: int64 [C], each label's column.
        softcap: bound on the logits, or None.
        temperature: divides the logits after the soft cap.
        entropy: if false, the third result is zeros.
        missing: the fourth result for a label whose column is outside of the logits.

    Returns:
        m, Σ exp(x − m), Σ exp(x − m)·(x − m) and the labels' x, each fp32 [C].
    """
    tops, totals, means, at_labels = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(4))
    if len(logits):
        _sum_up[(len(logits),)](  # pyright: ignore[reportIndexIssue]
            *(logits, columns.contiguous(), tops, totals, means, at_labels, logits.stride(0), logits.shape[1]),
            *(1.0 if softcap is None else softcap, 1.0 / temperature, missing),
            HAS_SOFTCAP=softcap is not None,
            HAS_ENTROPY=entropy,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return tops, totals, means, at_labels


def replace_by_gradients(
    logits: Tensor,
    columns: Tensor,
    normalizers: Tensor,
    means: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor,
    *,
    softcap: float | None,
    temperature: float,
    entropy: bool,
) -> None:
    """Replace logits, in place, with the gradients of a loss with respect to them.

    Args:
        logits: [C, V], contiguous, fp32, bf16 or fp16, before soft cap and temperature.
        columns: int64 [C], each label's column; one outside of the logits belongs to no column.
        normalizers: fp32 [C], log Σ exp(x) of the logits x after soft cap and temperature, over all ranks' parts.
        means: fp32 [C], the mean of x under softmax(x); not read without entropies.
        by_logprob: fp32 [C], gradients with respect to log-probs.
        by_entropy: fp32 [C], gradients with respect to entropies; not read without them.
        softcap: bound on the logits, or None.
        temperature: divides the logits after the soft cap.
        entropy: whether entropies have gradients.
    """
    if logits.numel():
        _to_gradients[(len(logits), triton.cdiv(logits.shape[1], _BLOCK))](  # pyright: ignore[reportIndexIssue]
            *(logits, columns.contiguous(), normalizers, means, by_logprob.contiguous(), by_entropy.contiguous()),
            *(logits.stride(0), logits.shape[1], 1.0 if softcap is None else softcap, 1.0 / temperature),
            HAS_SOFTCAP=softcap is not None,
            HAS_ENTROPY=entropy,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )

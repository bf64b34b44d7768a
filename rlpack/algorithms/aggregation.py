"""Aggregate token losses into one number: per-row weights with denominators of the whole optimizer step.

`loss = Σ_t weight_row(t) · loss_t` over the tokens in the mask, summed over all microbatches and ranks. Nothing is
averaged in between, so value and gradient don't depend on how rows are batched.

Invariants (tests/unit/algorithms/test_aggregation.py):

1. A row without tokens in the mask has weight exactly 0.
2. The weights of `token_mean` and of `seq_mean_token_mean` each sum to 1 over the tokens in the mask of an optimizer
   step, if there are any.
3. A row's weight depends only on its own token count and the denominators.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError
from rlpack.batch.ragged import Ragged

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"]


@dataclass(frozen=True)
class Denominators:
    """The denominators of one optimizer step, over all its microbatches and ranks.

    Attributes:
        tokens: tokens in the mask.
        sequences: rows with at least one token in the mask.
        constant: divisor of a row's sum in `seq_mean_token_sum_norm`, in tokens.
    """

    tokens: float
    sequences: float
    constant: float | None = None


def count_denominators(counts: Tensor, *, constant: float | None = None) -> Denominators:
    """Return the denominators of one optimizer step.

    >>> count_denominators(torch.tensor([2, 0, 1]))
    Denominators(tokens=3.0, sequences=2.0, constant=None)

    Args:
        counts: tokens in the mask of each row of the step, int64 [B].
        constant: divisor of `seq_mean_token_sum_norm`.
    """
    return Denominators(float(counts.sum()), float((counts > 0).sum()), constant)


def row_weights(counts: Tensor, *, aggregation: Aggregation, denominators: Denominators) -> Tensor:
    """Return the loss weight of each row's tokens, f32 [B].

    - `token_mean`: 1 / tokens. Long responses weigh more (DAPO, Yu et al. 2025, arXiv:2503.14476).
    - `seq_mean_token_mean`: 1 / (the row's tokens · sequences). Responses weigh the same (GRPO, arXiv:2402.03300).
    - `seq_mean_token_sum`: 1 / sequences. The mean over responses of their token sums (REINFORCE, RLOO).
    - `seq_mean_token_sum_norm`: 1 / (constant · sequences). No length bias (Dr. GRPO, arXiv:2503.20783).
    - `token_sum`: 1. The gradient grows with the mini-batch, in sequences and in tokens.

    >>> row_weights(torch.tensor([2, 1, 0]), aggregation="seq_mean_token_mean", denominators=Denominators(3, 2))
    tensor([0.2500, 0.5000, 0.0000])

    Args:
        counts: tokens in the mask of each row, int64 [B].
        aggregation: one of the five above.
        denominators: counts over the whole optimizer step, from `count_denominators`.

    Raises:
        AlgorithmError: the aggregation is unknown, or `seq_mean_token_sum_norm` has no positive constant.
    """
    if aggregation == "token_mean":
        weights = torch.full(counts.shape, _inverse(denominators.tokens), dtype=torch.float64)
    elif aggregation == "seq_mean_token_mean":
        weights = _inverse(denominators.sequences) / counts.clamp(min=1).double()
    elif aggregation == "seq_mean_token_sum":
        weights = torch.full(counts.shape, _inverse(denominators.sequences), dtype=torch.float64)
    elif aggregation == "seq_mean_token_sum_norm":
        if denominators.constant is None or not denominators.constant > 0:
            raise AlgorithmError(
                f"seq_mean_token_sum_norm divides by {denominators.constant}; set "
                "algorithm.aggregation_constant above 0"
            )
        per_token = _inverse(denominators.constant * denominators.sequences)
        weights = torch.full(counts.shape, per_token, dtype=torch.float64)
    elif aggregation == "token_sum":
        weights = torch.ones(counts.shape, dtype=torch.float64)
    else:
        raise AlgorithmError(
            f"aggregation is {aggregation!r}; set algorithm.aggregation to token_mean, seq_mean_token_mean, "
            "seq_mean_token_sum, seq_mean_token_sum_norm or token_sum"
        )
    return torch.where(counts > 0, weights, 0.0).float()


def row_sums(values: Tensor, mask: Ragged) -> Tensor:
    """Return the sum of each row's values in the mask, f64 [B].

    >>> row_sums(torch.tensor([1.0, 2.0, 4.0]), Ragged.from_rows([[True, False], [True]], torch.bool))
    tensor([1., 4.], dtype=torch.float64)

    Args:
        values: one per token, [T].
        mask: tokens to add up, bool, B rows.
    """
    masked = torch.where(mask.values, values, 0).double()
    return masked.new_zeros(mask.num_rows).index_add(0, mask.segment_ids, masked)


def _inverse(count: float) -> float:
    """Return 1 / count, and 0 for a count of 0."""
    return 1.0 / count if count > 0 else 0.0

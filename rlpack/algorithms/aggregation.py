"""Turn token losses into one number: a weight for each row's tokens, with denominators of the whole optimizer step.

`loss = Σ_t weight_row(t) · loss_t` over the tokens that count, a sum over all microbatches and ranks. Nothing is
averaged on the way, so value and gradient don't depend on how rows are batched. Invariants:

1. a row without a token that counts has weight exactly 0, and so has every row of a step without any;
2. over all counted tokens of an optimizer step, `token_mean` and `seq_mean_token_mean` weights sum to 1 (unless no
   token counts);
3. a row's weight depends on its own count and the denominators only.

tests/unit/algorithms/test_aggregation.py asserts all three.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError
from rlpack.batch.ragged import Ragged

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


@dataclass(frozen=True)
class Denominators:
    """What the losses of one optimizer step are divided by, over all its microbatches and ranks.

    Attributes:
        tokens: tokens inside the mask.
        sequences: rows with at least one token inside the mask.
        constant: what `seq_mean_token_sum_norm` divides a row's sum by, in tokens.
    """

    tokens: float
    sequences: float
    constant: float | None = None


def count_denominators(counts: Tensor, *, constant: float | None = None) -> Denominators:
    """Return the denominators of one whole optimizer step.

    >>> count_denominators(torch.tensor([2, 0, 1]))
    Denominators(tokens=3.0, sequences=2.0, constant=None)

    Args:
        counts: tokens of each of its rows that count, int64 [B].
        constant: what `seq_mean_token_sum_norm` divides by.
    """
    return Denominators(float(counts.sum()), float((counts > 0).sum()), constant)


def row_weights(counts: Tensor, *, aggregation: Aggregation, denominators: Denominators) -> Tensor:
    """Return the weight in the loss of each token of a row, f32 [B].

    - `token_mean`: 1 / tokens. Long answers weigh more (DAPO, Yu et al. 2025, arXiv:2503.14476).
    - `seq_mean_token_mean`: 1 / (the row's tokens · sequences). Every answer weighs the same (GRPO, arXiv:2402.03300).
    - `seq_mean_token_sum`: 1 / sequences. The mean over answers of the sums of their tokens (REINFORCE, RLOO).
    - `seq_mean_token_sum_norm`: 1 / (constant · sequences). Without a bias by length (Dr. GRPO, arXiv:2503.20783).

    >>> row_weights(torch.tensor([2, 1, 0]), aggregation="seq_mean_token_mean", denominators=Denominators(3, 2))
    tensor([0.2500, 0.5000, 0.0000])

    Args:
        counts: tokens of each row that count, int64 [B].
        aggregation: one of the four.
        denominators: of the optimizer step that these rows belong to.

    Raises:
        AlgorithmError: the aggregation is unknown, or `seq_mean_token_sum_norm` lacks its constant.
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
    else:
        raise AlgorithmError(
            f"aggregation is {aggregation!r}; algorithm.aggregation is token_mean, seq_mean_token_mean, "
            "seq_mean_token_sum or seq_mean_token_sum_norm"
        )
    return torch.where(counts > 0, weights, 0.0).float()


def row_sums(values: Tensor, mask: Ragged) -> Tensor:
    """Return the sum of each row's values that are inside the mask, f64 [B].

    >>> row_sums(torch.tensor([1.0, 2.0, 4.0]), Ragged.from_rows([[True, False], [True]], torch.bool))
    tensor([1., 4.], dtype=torch.float64)

    Args:
        values: one a token, [T].
        mask: tokens that count, bool, B rows.
    """
    inside = torch.where(mask.values, values, 0).double()
    return inside.new_zeros(mask.num_rows).index_add(0, mask.segment_ids, inside)


def _inverse(count: float) -> float:
    """Return 1 / count, and 0 for a step without anything to count."""
    return 1.0 / count if count > 0 else 0.0

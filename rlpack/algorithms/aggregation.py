"""Turn token losses into one number: a weight for each token, with denominators of the whole optimizer step.

`loss = Σ_t weight_t · loss_t`, a sum over all microbatches and ranks. Nothing is averaged on the way, so value and
gradient don't depend on how rows are batched. Invariants:

1. weights outside the mask are exactly 0, and a batch without any masked-in token has all weights 0;
2. over all rows of an optimizer step, `token_mean` and `sequence_mean` weights sum to 1 (unless all are masked);
3. a token's weight depends on its own row and the denominators only.

tests/unit/algorithms/test_aggregation.py asserts all three.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError
from rlpack.data.ragged import Ragged

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]


@dataclass(frozen=True)
class Denominators:
    """What the losses of one optimizer step are divided by, over all its microbatches and ranks.

    Attributes:
        tokens: tokens inside the mask.
        sequences: rows with at least one token inside the mask.
        constant: what `sequence_sum` divides a row's sum by, in tokens.
    """

    tokens: float
    sequences: float
    constant: float | None = None


def count_denominators(mask: Ragged, *, constant: float | None = None) -> Denominators:
    """Return the denominators of the rows of `mask` (bool): those of one whole optimizer step.

    >>> mask = Ragged.from_rows([[False, True, True], [False], []], torch.bool)
    >>> count_denominators(mask)
    Denominators(tokens=2.0, sequences=1.0, constant=None)
    """
    counts = _tokens_of_rows(mask.values, mask.lengths)
    return Denominators(float(counts.sum()), float((counts > 0).sum()), constant)


def token_weights(mask: Tensor, lengths: Tensor, *, aggregation: Aggregation, denominators: Denominators) -> Tensor:
    """Return each token's weight in the loss, f32 [T].

    - `token_mean`: 1 / tokens. Long answers weigh more (DAPO, Yu et al. 2025, arXiv:2503.14476).
    - `sequence_mean`: 1 / (the row's own tokens · sequences). Every answer weighs the same (GRPO, arXiv:2402.03300).
    - `sequence_sum`: 1 / (constant · sequences). Without a bias by length (Dr. GRPO, arXiv:2503.20783).

    >>> mask = torch.tensor([False, True, True, False, True])
    >>> token_weights(mask, torch.tensor([3, 2]), aggregation="sequence_mean", denominators=Denominators(3, 2))
    tensor([0.0000, 0.2500, 0.2500, 0.0000, 0.5000])

    Args:
        mask: tokens that count, bool [T]; whole rows, end to end.
        lengths: tokens of each row, int64 [B], summing to T.
        aggregation: one of the three.
        denominators: of the optimizer step that these rows belong to.

    Raises:
        AlgorithmError: the aggregation is unknown, `sequence_sum` lacks its constant, or the mask is not bool.
    """
    if mask.dtype != torch.bool:
        raise AlgorithmError(f"the mask is {mask.dtype}; it has to be bool")
    if aggregation == "token_mean":
        return mask.float() * _inverse(denominators.tokens)
    if aggregation == "sequence_mean":
        counts = _tokens_of_rows(mask, lengths)
        of_row = (_inverse(denominators.sequences) / counts.clamp(min=1).double()).float()
        return mask.float() * torch.repeat_interleave(of_row, lengths, output_size=mask.shape[0])
    if aggregation == "sequence_sum":
        if denominators.constant is None or not denominators.constant > 0:
            raise AlgorithmError(
                f"sequence_sum divides by {denominators.constant}; set algorithm.sequence_sum_constant above 0"
            )
        return mask.float() * _inverse(denominators.constant * denominators.sequences)
    raise AlgorithmError(
        f"aggregation is {aggregation!r}; algorithm.aggregation is token_mean, sequence_mean or sequence_sum"
    )


def _inverse(count: float) -> float:
    """Return 1 / count, and 0 for a step without anything to count."""
    return 1.0 / count if count > 0 else 0.0


def _tokens_of_rows(mask: Tensor, lengths: Tensor) -> Tensor:
    """Return how many tokens of each row are inside the mask, int64 [B]."""
    # Differences of a running sum: exact in integers, the same on every device, and rows may be empty.
    running = torch.cat([lengths.new_zeros(1), mask.long().cumsum(0)])
    ends = lengths.cumsum(0)
    return running[ends] - running[ends - lengths]

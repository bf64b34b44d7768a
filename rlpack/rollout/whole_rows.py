"""Compare the last logits of generated rows with forward passes over whole rows, as rows get longer or weights change.

The trial that chooses a decoder uses short rows of random tokens. A cache that is wrong only beyond a length that no
known setting names, or only with trained weights, is detected here, in the first batch that has such rows.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.models.own_attention import forward_arguments
from rlpack.rollout.errors import EngineError

# Rows per comparison. It fails only if at least half of them differ: in a row of many tokens two experts, or two keys,
# may be equally good, so that rounding selects one.
_ROWS = 4
# Allowed difference, relative to the largest logit; wider than the trial's, which has random tokens and short rows.
_TOLERANCE = 1e-2
# Rows are compared again when they are longer by this factor, or when the number of weight updates has doubled.
_GROWTH = 1.1
# For longer rows only the last logits are computed, to save memory.
_SHORT = 64


class WholeRowComparison:
    """Decides which rows to compare, and compares them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Compare with forward passes of `model`."""
        self._model = model
        self._length, self._version = 0, 0

    def due(self, lengths: np.ndarray, policy_version: int) -> np.ndarray:
        """Return the indices of the rows to compare, int64 [n]: the longest ones, or none.

        Args:
            lengths: tokens of each row, int64 [R].
            policy_version: policy version of the weights.
        """
        longest = np.argsort(-lengths, kind="stable")[:_ROWS]
        if not len(longest):
            return longest
        shortest = int(lengths[longest[-1]])
        if shortest <= self._length * _GROWTH and policy_version < 2 * self._version + 1:
            return longest[:0]
        self._length, self._version = max(self._length, shortest), policy_version
        return longest

    @torch.inference_mode()
    def compare(self, rows: list[Tensor], logits: Tensor) -> None:
        """Raise unless the logits of more than half of the rows equal those of a forward pass without a cache.

        Args:
            rows: tokens, int64 [L] each.
            logits: after each row, [n, V].

        Raises:
            EngineError: they differ; the message gives the range of lengths.
        """
        gaps = [
            relative_gap(scores, last_logits(self._model, row.to(self._model.device), 1)[0]).item()
            for row, scores in zip(rows, logits, strict=True)
        ]
        different = [len(row) for row, gap in zip(rows, gaps, strict=True) if not gap <= _TOLERANCE]
        if different and 2 * len(different) >= len(rows):
            raise EngineError(
                f"{type(self._model).__name__} generates with a wrong cache: logits after rows of {min(different)} to "
                f"{max(different)} tokens differ from those of whole rows by {max(gaps):.1e} of the largest, so its "
                "attention changes at some length in a way that its cache doesn't support; keep rows shorter "
                "(data.max_prompt_tokens + rollout.max_new_tokens), or use another model"
            )


def last_logits(model: PreTrainedModel, row: Tensor, count: int) -> Tensor:
    """Return the logits [count, V] after the last tokens of a row [L], from one forward pass without a cache."""
    kept = forward_arguments(model, logits_to_keep=count) if len(row) > _SHORT else {}
    return model(input_ids=row[None], use_cache=False, **kept).logits[0, -count:]


def relative_gap(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference of logits [V], relative to the largest expected one; a scalar."""
    logits, expected = logits.float(), expected.float()
    return (logits - expected).abs().max() / expected.abs().max()

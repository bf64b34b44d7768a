"""Compare the last logits of generated rows with those of whole rows, whenever rows are longer than any before.

The trial that chooses a decoder has short rows of random tokens. A cache that is wrong only beyond a length that no
known setting names, or only with trained weights, shows here, in the first batch with such rows.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.models.own_attention import forward_arguments
from rlpack.rollout.errors import EngineError

# Rows that are compared at a time. Half of them have to differ: among many tokens two experts, or two keys, may be
# equally good, and rounding selects one.
_ROWS = 4
# Allowed difference, relative to the largest logit; the trial's is for untrained tokens and short rows.
_TOLERANCE = 1e-2
# Rows are compared again when they are longer by this factor, and after as many weight updates as there were before.
_GROWTH = 1.1
# Of longer rows only the last logits are computed, which may take much memory.
_SHORT = 64


class WholeRowComparison:
    """Decides which rows to compare, and compares them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Compare with forward passes of `model`."""
        self._model = model
        self._length, self._version = 0, 0

    def due(self, lengths: np.ndarray, policy_version: int) -> np.ndarray:
        """Return which rows to compare, int64 [n]: the longest, or none.

        Args:
            lengths: tokens of each row, int64 [R].
            policy_version: of the weights.
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
        """Raise unless the logits of most rows equal those of a forward pass without a cache.

        Args:
            rows: tokens, int64 [L] each.
            logits: after each row, [n, V].

        Raises:
            EngineError: they differ; the message says from which length on.
        """
        gaps = [
            relative_gap(scores, last_logits(self._model, row.to(self._model.device), 1)[0]).item()
            for row, scores in zip(rows, logits, strict=True)
        ]
        different = [len(row) for row, gap in zip(rows, gaps, strict=True) if not gap <= _TOLERANCE]
        if different and 2 * len(different) >= len(rows):
            raise EngineError(
                f"{type(self._model).__name__} generates other tokens than it is trained on: logits after rows of "
                f"{min(different)} to {max(different)} tokens differ by {max(gaps):.1e} of the largest between its "
                "cache and whole rows, so its attention changes at some length in a way that its cache lacks; keep "
                "rows shorter (data.max_prompt_tokens + rollout.max_new_tokens), or use another model"
            )


def last_logits(model: PreTrainedModel, row: Tensor, count: int) -> Tensor:
    """Return the logits [count, V] after the last tokens of a row [L], from one forward pass without a cache."""
    kept = forward_arguments(model, logits_to_keep=count) if len(row) > _SHORT else {}
    return model(input_ids=row[None], use_cache=False, **kept).logits[0, -count:]


def relative_gap(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference of logits [V], relative to the largest expected one; a scalar."""
    logits, expected = logits.float(), expected.float()
    return (logits - expected).abs().max() / expected.abs().max()

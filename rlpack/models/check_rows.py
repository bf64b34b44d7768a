"""The rows that the checks of a model run: random, and longer than the model's windows where that is affordable."""

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.models.rope import POSITION_LIMITS

# Eager attention over longer rows takes too much memory; the masks of longer windows are still compared.
_MAX_LENGTH, MAX_MASK_LENGTH = 512, 8192
# Uneven, and none a multiple of another.
_LENGTHS = (23, 37, 11)
# Config keys whose values bound how far a token sees, and how many tokens it sees.
_WINDOW_KEY = re.compile(r"window|chunk|local_attention|local_size")
_SELECTION_KEY = re.compile(r"index_topk")


def draw_rows(model: PreTrainedModel, vocab_size: int, *, seed: int, longest: int | None = None) -> list[Tensor]:
    """Return three rows of random tokens, int64 [L], two of them longer than the model's windows if affordable.

    Args:
        model: whose windows and positions count.
        vocab_size: tokens are drawn below it.
        seed: of the tokens.
        longest: tokens of the longest row of the run; None if not known.
    """
    generator = torch.Generator().manual_seed(seed)
    limit = max(4, min(longest_row(model), longest or MAX_MASK_LENGTH))
    most = _MAX_LENGTH if longest is None else min(_MAX_LENGTH, max(longest, max(_LENGTHS)))
    window = max((size for size in windows(model) + _sizes(model, _SELECTION_KEY) if size + 12 <= most), default=0)
    lengths = (max(_LENGTHS[0], window + 5), max(_LENGTHS[1], window + 12), _LENGTHS[2])
    return [torch.randint(vocab_size, (min(length, limit),), generator=generator) for length in lengths]


def windows(model: PreTrainedModel) -> list[int]:
    """Return the sizes of windows and chunks in the model's config."""
    return _sizes(model, _WINDOW_KEY)


def _sizes(model: PreTrainedModel, pattern: re.Pattern[str]) -> list[int]:
    """Return the positive integers in the model's config whose key has the pattern."""
    sizes: list[int] = []

    def collect(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, entry in value.items():
                collect(str(key), entry)
        elif isinstance(value, list):
            for entry in value:
                collect(name, entry)
        elif type(value) is int and value > 0 and pattern.search(name) and "pattern" not in name:
            sizes.append(value)

    collect("", model.config.get_text_config().to_dict())
    return sizes


def longest_row(model: PreTrainedModel) -> int:
    """Return the number of positions that the model has."""
    settings = model.config.get_text_config().to_dict()
    sizes = [settings[name] for name in POSITION_LIMITS if type(settings.get(name)) is int]
    return max(4, min(sizes, default=MAX_MASK_LENGTH))

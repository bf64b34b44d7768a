"""The row lengths from which a model's attention changes, and the longest row that a model has positions for.

From such a length on, a window hides earlier tokens, sparse attention starts to select, queries are scaled, or
distances are clipped. Shorter rows can't show whether a layout or a cache handles that correctly.
"""

import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from rlpack.models.rope import POSITION_LIMITS

# Maximum length of rows whose masks are compared, and of any row of a model without a number of positions.
MAX_MASK_LENGTH = 8192
# Settings whose values bound how far a token sees.
_WINDOW = re.compile(r"window|chunk|local_attention|local_size")
# Settings whose values bound how many tokens a token sees.
_SELECTION = re.compile(r"index_topk$|indexer_budget|token_budget")
# Settings for the number of blocks that are selected, and for the tokens of a block: their product counts.
_SELECTED, _UNIT = re.compile(r"top_?k(_blocks)?$"), re.compile(r"block_size$|compress")
# Settings from whose values on positions or distances are treated differently, or tokens are compressed into blocks.
_POSITION = re.compile(r"floor|rel_extent|max_distance|original_max_position|block_size|compress")


def windows(model: PreTrainedModel) -> list[int]:
    """Return the sizes of windows and chunks in the model's config."""
    return [size for name, size in _integers(model) if _WINDOW.search(name)]


def selections(model: PreTrainedModel) -> list[int]:
    """Return how many tokens sparse attention selects; only longer rows are affected."""
    entries = [(name, size) for name, size in _integers(model) if name.startswith("index")]
    units = [size for name, size in _integers(model) if _UNIT.search(name)]
    sizes = [size for name, size in entries if _SELECTION.search(name)]
    return sizes + [size * unit for name, size in entries if _SELECTED.search(name) for unit in units]


def length_thresholds(model: PreTrainedModel) -> list[int]:
    """Return the row lengths, ascending, from which attention may change according to known settings."""
    others = [size for name, size in _integers(model) if _POSITION.search(name)]
    return sorted({*windows(model), *selections(model), *others})


def longest_row(model: PreTrainedModel) -> int:
    """Return the number of positions that the model has, or `MAX_MASK_LENGTH` if it has no such number."""
    return max(4, position_limit(model) or MAX_MASK_LENGTH)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the number of positions in the model's config, None without such a key."""
    settings = model.config.get_text_config().to_dict()
    return min((settings[name] for name in POSITION_LIMITS if type(settings.get(name)) is int), default=None)


def _integers(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield the positive integers in the model's config by key; keys of dicts in it are joined by dots."""

    def collect(name: str, value: Any) -> Iterator[tuple[str, int]]:
        if isinstance(value, dict):
            for key, entry in value.items():
                yield from collect(f"{name}.{key}" if name else str(key), entry)
        elif isinstance(value, list | tuple):
            for entry in value:
                yield from collect(name, entry)
        elif type(value) is int and value > 0 and "pattern" not in name:
            yield name, value

    yield from collect("", model.config.get_text_config().to_dict())

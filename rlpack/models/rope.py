"""Limits on the length of rows: rotary frequencies that depend on a microbatch's longest row, and learned positions.

transformers recomputes the frequencies of the types `dynamic` and `longrope` in each forward pass, from the largest
position in it. Beyond a length that the model's config sets, the same row then gets other log-probs in other
microbatches. Rows up to that length always get the same frequencies.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlpack.models.errors import ModelError

_LENGTH_DEPENDENT = ("dynamic", "longrope")
# Config keys of the number of positions.
POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len")
# Names of tables of learned positions.
_POSITIONS = re.compile(r"(^|\.)(wpe|\w*pos_emb\w*|\w*position\w*)$")


def check_row_length(config: PreTrainedConfig, longest: int, keys: str) -> None:
    """Raise if rows can be long enough to change the frequencies of rows that share their microbatch.

    Args:
        config: the model's.
        longest: tokens of the longest row.
        keys: the configuration keys that bound it, for the error.

    Raises:
        ModelError: rows can be too long; the message names the limit and what to change.
    """
    for kind, limit in frequency_limits(config):
        if longest > limit:
            raise ModelError(
                f"the model ({config.model_type}) has rope_type={kind}, whose frequencies change for rows over {limit} "
                f"tokens, so log-probs would depend on the other rows of a microbatch; rows have up to {longest} "
                f"({keys}): lower their sum to {limit}, or use a model with another rope_type"
            )


def check_positions(model: PreTrainedModel, longest: int, keys: str) -> None:
    """Raise if rows can be longer than the model's table of learned positions.

    Args:
        model: with or without weights.
        longest: tokens of the longest row.
        keys: the configuration keys that bound it, for the error.

    Raises:
        ModelError: rows can be too long; the message names the size of the table and what to change.
    """
    settings = model.config.get_text_config().to_dict()
    sizes = [settings[name] for name in POSITION_LIMITS if type(settings.get(name)) is int]
    tables = [
        name for name, module in model.named_modules() if isinstance(module, nn.Embedding) and _POSITIONS.search(name)
    ]
    if tables and sizes and longest > min(sizes):
        raise ModelError(
            f"{type(model).__name__} ({model.config.model_type}) has {min(sizes)} learned positions ({tables[0]}), but "
            f"rows have up to {longest} tokens ({keys}): lower their sum to {min(sizes)}, or use another model"
        )


def length_limit(config: PreTrainedConfig) -> tuple[str, int] | None:
    """Return the longest row, in tokens, that a model was made for, and the config key that says so.

    Types of RoPE that stretch positions by a factor are taken into account. Longer rows can be computed unless the
    positions are a learned table, but the model has not been trained on them.

    Returns:
        None if the config has no number of positions.
    """
    settings = config.get_text_config().to_dict()
    sizes = {name: settings[name] for name in POSITION_LIMITS if type(settings.get(name)) is int and settings[name] > 0}
    if not sizes:
        return None
    name = min(sizes, key=lambda key: sizes[key])
    limits = [float(sizes[name])]
    for parameters in _rope_parameters(settings.get("rope_parameters") or settings.get("rope_scaling") or {}):
        kind, factor = parameters.get("rope_type", parameters.get("type")), float(parameters.get("factor") or 1.0)
        # The factor of llama3 isn't that of the number of positions. Gemma 3's positions are those after scaling.
        if kind == "llama3" or (kind == "linear" and "gemma3" in str(settings.get("model_type"))):
            continue
        # The positions of other types are those after stretching, unless a user added the factor to a model's config.
        start = sizes[name] if kind in ("linear", "dynamic") else parameters.get("original_max_position_embeddings")
        limits.append((start or 0) * factor)
    return name, int(max(limits))


def frequency_limits(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """Yield (rope type, longest row with constant frequencies) of each length-dependent rope of the model."""
    text = config.get_text_config()
    settings = text.to_dict()
    for parameters in _rope_parameters(settings.get("rope_parameters") or settings.get("rope_scaling") or {}):
        kind = str(parameters.get("rope_type", parameters.get("type", "default")))
        if kind in _LENGTH_DEPENDENT:
            limit = parameters.get("original_max_position_embeddings")
            if limit is None:
                limit = settings.get("original_max_position_embeddings") or settings.get("max_position_embeddings")
            if kind == "dynamic":
                # The first length for which frequencies are recomputed.
                limit = settings.get("max_position_embeddings") or limit
            if limit is not None:
                yield kind, int(limit)


def _rope_parameters(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each rope: some models have one for each type of layer."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested if nested else [parameters]

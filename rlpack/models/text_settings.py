"""Settings of language models under transformers' common names, whatever an architecture calls them."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a language model, under transformers' common names, too: GPT-2 calls its heads n_head.

    The number of layers is included where a config derives it from other settings, as Nemotron-H does.
    """
    text: Any = config.get_text_config()
    settings = text.to_dict()
    if "num_hidden_layers" in dir(text):
        settings["num_hidden_layers"] = text.num_hidden_layers
    return settings | {name: settings[own] for name, own in text.attribute_map.items() if own in settings}


def shape_of(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Return hidden size and number of layers of a language model; None if its config lacks one of them."""
    settings = settings_of(config)
    hidden_size, layers = settings.get("hidden_size"), settings.get("num_hidden_layers")
    return (hidden_size, layers) if isinstance(hidden_size, int) and isinstance(layers, int) else None


def num_experts(settings: Mapping[str, Any]) -> int:
    """Return how many experts a layer routes tokens to, by what `settings_of` returned; 0 for dense layers."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for key in keys if (count := settings.get(key))), 0)

"""Settings of language models under transformers' common names, whatever an architecture calls them."""

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig

# Names of the number of experts, and of those that a token is routed to.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_num_primary_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "moe_topk", "top_k_experts")


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a language model, under transformers' common names, too: GPT-2 calls its heads n_head.

    The number of layers is included where a config derives it from other settings, as Nemotron-H does.
    """
    text: Any = config.get_text_config()
    settings = text.to_dict()
    if "num_hidden_layers" in dir(text):
        settings["num_hidden_layers"] = text.num_hidden_layers
    return settings | {name: settings[own] for name, own in text.attribute_map.items() if own in settings}


def settings_of_layer(settings: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return the settings of a layer, by what `settings_of` returned.

    Gemma 4's layers differ in `head_dim`. Its config pads their numbers with zeros: "05".

    >>> settings_of_layer({"head_dim": 256, "per_layer_config": {"05": {"head_dim": 512}}}, 5)["head_dim"]
    512
    """
    of_layers = settings.get("per_layer_config") or {}
    return {**settings, **next((own for name, own in of_layers.items() if int(name) == layer), {})}


def shape_of(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Return hidden size and number of layers of a language model; None if its config lacks one of them."""
    settings = settings_of(config)
    hidden_size, layers = settings.get("hidden_size"), settings.get("num_hidden_layers")
    return (hidden_size, layers) if isinstance(hidden_size, int) and isinstance(layers, int) else None


def num_experts(settings: Mapping[str, Any]) -> int:
    """Return how many experts a layer routes tokens to, by what `settings_of` returned; 0 for dense layers."""
    return _first_of(settings, _NUM_EXPERTS, 0)


def experts_per_token(settings: Mapping[str, Any], layer: int) -> int:
    """Return how many experts a layer's router chooses per token, by what `settings_of` returned; 1 if not known.

    Some configs (HunYuan's) list a number per layer.
    """
    count = _first_of(settings, _EXPERTS_PER_TOKEN, 1)
    return count[layer] if isinstance(count, list | tuple) else count


def _first_of(settings: Mapping[str, Any], keys: Iterable[str], default: int) -> Any:
    """Return the first setting that isn't 0 or None; DBRX's are in a section."""
    settings = {**(settings.get("ffn_config") or {}), **settings}
    return next((value for key in keys if (value := settings.get(key))), default)

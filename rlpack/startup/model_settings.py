"""Check the settings of a new model, and the model type of a loaded one, against the sources of transformers.

Only what is certainly wrong is refused here; `rlpack.recipes.preflight` builds the model.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpack.config.roles import started_roles
from rlpack.config.schema import Config
from rlpack.models.errors import (
    ModelError,
    not_causal_error,
    remote_code_error,
    unknown_setting_error,
    unknown_type_error,
)
from rlpack.safe_files import read_json
from rlpack.startup.annotations import is_wrong
from rlpack.startup.transformers_sources import (
    ConfigSource,
    config_source,
    has_activation,
    is_not_causal,
    is_unknown_type,
    model_types,
)

_OWN = "rlpack."
# Settings of which no model can have fewer than one, and those that can't be negative.
_COUNTS = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_heads", "n_embd", "n_head"),
    *("num_hidden_layers", "n_layer", "head_dim"),
)
_LAYERS, _MOST_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 10_000
_SIZES = ("intermediate_size", "moe_intermediate_size", "n_inner")
# Settings of latent attention, which doesn't use `num_key_value_heads`.
_LATENT = {"kv_lora_rank", "q_lora_rank"}
# Settings that a new model gets from the tokenizer.
_OF_TOKENIZER = ("vocab_size", "eos_token_id", "pad_token_id")
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")


def check_model_settings(config: Config) -> None:
    """Raise if transformers can't build a new model, or doesn't have the type of a loaded one.

    Raises:
        ModelError: names the setting, or the key of the folder.
    """
    if may_register_types(config):
        return
    if config.model.path is None:
        if problem := _too_many_layers(config.model.config):
            raise _unbuildable(config.model.config.get("model_type"), problem)
        _check_new(config.model.config)
    roles = started_roles(config)
    sections = {"model": config.model.path}
    sections |= {"critic": config.critic.path} if "critic" in roles else {}
    sections |= {"reward_model": config.reward_model.path} if "reward_model" in roles else {}
    for section, path in sections.items():
        if path is not None and not (section == "model" and config.model.trust_remote_code):
            _check_folder(f"{section}.path", path)


def may_register_types(config: Config) -> bool:
    """Return whether a run loads users' modules, in which models may be added to transformers."""
    targets = [config.recipe.target, *(config.roles[role].target for role in started_roles(config))]
    return not all(target.startswith(_OWN) for target in targets) or ":" in config.algorithm.loss


def _check_new(settings: Mapping[str, Any]) -> None:
    """Raise on a model type or a setting that doesn't exist, and on values that no model is built with."""
    kind = settings.get("model_type")
    if is_unknown_type(kind):
        raise unknown_type_error(kind, model_types())
    if is_not_causal(str(kind)):
        raise not_causal_error(str(kind))
    source = config_source(str(kind))
    if source is None:
        return
    for key, value in settings.items():
        _check_setting(str(kind), source, key, value)
    heads, groups = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups and not _has_own_heads(source.fields):
        raise _unbuildable(kind, f"num_attention_heads ({heads}) is not divisible by num_key_value_heads ({groups})")


def _check_setting(kind: str, source: ConfigSource, key: str, value: Any) -> None:
    """Raise on a setting that doesn't exist, or on a value that no model is built with."""
    if not source.may_have(key):
        raise unknown_setting_error(kind, key, source.settings())
    if key in _OF_TOKENIZER:
        raise ModelError(f"model.config.{key} is {value!r}, but a new model gets it from the tokenizer; remove it")
    annotation = source.fields.get(key)
    if annotation is not None and is_wrong(value, annotation):
        raise ModelError(f"model.config is not a valid {kind} config: {key} is {value!r}; it must be {annotation}")
    is_dense = key == "intermediate_size" and not any("expert" in name for name in source.fields)
    smallest = 1 if key in _COUNTS or is_dense else 0 if key in _SIZES else None
    if smallest is not None and isinstance(value, int) and value < smallest:
        raise _unbuildable(kind, f"{key} is {value}; it must be at least {smallest}")
    if key in _ACTIVATIONS and isinstance(value, str) and has_activation(value) is False:
        raise _unbuildable(kind, f"{key} is {value!r}, which transformers does not know")


def _too_many_layers(settings: Mapping[str, Any]) -> str | None:
    """Return the problem if a model has so many layers that building it takes minutes even without weights, or None."""
    for key in _LAYERS:
        if isinstance(value := settings.get(key), int) and value > _MOST_LAYERS:
            return f"{key} is {value:,}; it can be at most {_MOST_LAYERS:,}"
    return None


def _has_own_heads(fields: Mapping[str, Any]) -> bool:
    """Return whether a config defines heads in another way, so that their numbers need not divide evenly."""
    return bool(fields.keys() & _LATENT) or any(name.endswith("heads_per_layer") for name in fields)


def _unbuildable(kind: object, reason: str) -> ModelError:
    return ModelError(f"model.config does not build a {kind}: {reason}")


def _check_folder(key: str, path: str) -> None:
    """Raise if the config.json of a folder names a model type that transformers doesn't have."""
    try:
        values = read_json(Path(os.path.expanduser(path)) / "config.json")
    except (OSError, ValueError):
        return  # a hub name, or a file that its own check refuses
    if not isinstance(values, dict):
        return
    if problem := _too_many_layers(values):
        raise ModelError(f"{key} is {path!r}, which can't be built: {problem} in its config.json; set another model")
    kind = values.get("model_type")
    if isinstance(kind, str) and key != "reward_model.path" and is_not_causal(kind):
        raise not_causal_error(kind)
    if not isinstance(kind, str) or not is_unknown_type(kind):
        return
    if "AutoConfig" in (values.get("auto_map") or {}):
        raise remote_code_error(key, path)
    raise ModelError(
        f"{key} is {path!r}, which can't be loaded: transformers has no model_type {kind!r}, which its config.json "
        "names; update transformers, or set another model"
    )

"""Check patterns of weight names against the names that the model's source allows."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpack.config.roles import optimizers
from rlpack.config.schema import Config
from rlpack.models.errors import nothing_trained_error
from rlpack.models.patterns import match_patterns
from rlpack.safe_files import read_json
from rlpack.startup.model_settings import may_register_types
from rlpack.startup.weight_names import WeightNames, weight_names

# The language model inside a critic, and the names of its head.
_CRITIC, _HEAD = "model.", ("head.weight", "head.bias")


def check_weight_patterns(config: Config) -> None:
    """Raise on a pattern for frozen weights, weights without decay or adapter layers that certainly matches nothing.

    Raises:
        ModelError: names the key, the pattern and the nearest names; or all weights are frozen.
    """
    if may_register_types(config):
        return
    for section, optimizer in optimizers(config).items():
        patterns = {f"{section}.no_decay": optimizer.no_decay, f"{section}.freeze": optimizer.freeze}
        lora = config.actor.lora
        if section == "actor.optimizer" and lora.rank > 0:  # adapters rename weights
            patterns = {"actor.lora.targets": lora.targets}
        if any(patterns.values()) and (names := _names(config, section)):
            for key, values in patterns.items():
                matching = _check(values, names, key)
                if key.endswith(".freeze") and not names.open and matching == names.names.keys():
                    raise nothing_trained_error(section, values)


def _check(patterns: Sequence[str], weights: WeightNames, key: str) -> set[str]:
    """Return the names that match; raise on a pattern that certainly matches none."""
    names = list(weights.names)
    if key == "actor.lora.targets":  # linear layers inside decoder layers, which are numbered
        linear = [name.removesuffix(".weight") for name, is_linear in weights.names.items() if is_linear]
        names = [name for name in linear if any(part.isdigit() for part in name.split("."))]
    return match_patterns([pattern for pattern in patterns if names and not weights.is_open_to(pattern)], names, key)


def _names(config: Config, section: str) -> WeightNames | None:
    """Return the possible names of the weights of a trained role, None if unknown."""
    path = config.critic.path if section == "critic.optimizer" and config.critic.path else config.model.path
    if path == config.model.path and config.model.trust_remote_code:
        return None
    settings = config.model.config if path is None else _settings(Path(os.path.expanduser(path)))
    names = weight_names(str(settings.get("model_type")), settings)
    if names is None or section != "critic.optimizer":
        return names
    # The critic's language model is the policy's without its head: `transformer.h.0` is `model.h.0`.
    inner = {name.partition(".")[2]: is_linear for name, is_linear in names.names.items()}
    critic = {f"{_CRITIC}{name}": is_linear for name, is_linear in inner.items()} | dict.fromkeys(_HEAD, False)
    return WeightNames(critic, {f"{_CRITIC}{start.partition('.')[2]}" for start in names.open})


def _settings(folder: Path) -> Mapping[str, Any]:
    """Return the config.json of a folder, {} if there is none."""
    try:
        values = read_json(folder / "config.json")
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}

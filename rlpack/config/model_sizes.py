"""Sizes of a model that limit layouts, read from its configuration without building it.

They keep messages about layouts from naming a remedy that the model would refuse. Whether the model itself can be
divided is checked without weights, by `rlpack.recipes.preflight.split_checks`.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpack.config.layout_sizes import layout_sizes
from rlpack.config.roles import role_parallel
from rlpack.config.schema import Config

_NAMES = {
    "heads": ("num_attention_heads",),
    "key_value_heads": ("num_key_value_heads",),
    "layers": ("num_hidden_layers",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "hidden": ("hidden_size",),
    "expert_width": ("moe_intermediate_size", "intermediate_size"),
}


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, each None if its configuration doesn't say.

    Attributes:
        heads: attention heads of a layer.
        key_value_heads: heads of keys and values.
        layers: decoder layers.
        experts: experts that a layer routes tokens to.
        hidden: numbers per token between layers.
        expert_width: numbers per token within an expert; in a dense model, within its MLP.
    """

    heads: int | None = None
    key_value_heads: int | None = None
    layers: int | None = None
    experts: int | None = None
    hidden: int | None = None
    expert_width: int | None = None

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> "ModelSizes":
        """Return the sizes that a transformers configuration gives.

        >>> ModelSizes.of_settings({"num_attention_heads": 8, "text_config": {"num_hidden_layers": 2}}).layers
        2
        """
        text = settings.get("text_config")
        section = text if isinstance(text, Mapping) else settings
        sizes = {name: next((section[key] for key in keys if key in section), None) for name, keys in _NAMES.items()}
        return cls(**{name: size for name, size in sizes.items() if type(size) is int and size > 0})


def model_sizes(config: Config, role: str) -> ModelSizes:
    """Return the sizes of a role's model; all None for a model on the Hub."""
    own = {"critic": config.critic.path, "reward_model": config.reward_model.path}.get(role)
    path = own or config.model.path
    if path is None:
        return ModelSizes.of_settings(config.model.config)
    try:
        settings = json.loads((Path(os.path.expanduser(path)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # loading says why
        return ModelSizes()
    return ModelSizes.of_settings(settings) if isinstance(settings, dict) else ModelSizes()


def model_fits(config: Config, role: str, ranks: int) -> bool:
    """Return whether the sizes of a role's model can be divided by its layout over `ranks` ranks."""
    parallel, model = role_parallel(config, role), model_sizes(config, role)
    layout = layout_sizes(config, role, ranks)
    cp, tp, ep, stages = layout["cp"], layout["tp"], layout["ep"], layout["pp"] * parallel.vpp
    if model.layers is not None and model.layers < stages:
        return False
    # FSDP shards other axes than the first evenly only, which are those that tp and ep leave whole.
    shards = layout["dp_shard"] * cp
    stacked_width = 2 * model.expert_width if model.experts and model.expert_width else None  # of gate and up
    divided = [
        (model.heads, tp * (cp if parallel.cp_method == "ulysses" else 1)),
        (model.key_value_heads, tp),
        (model.experts, tp * ep),
        (model.hidden, shards if tp > 1 else 1),
        (model.hidden, shards // ep if ep > 1 else 1),
        (stacked_width, shards // ep if ep > 1 or tp > 1 else 1),
    ]
    return all(size is None or size % divisor == 0 for size, divisor in divided)

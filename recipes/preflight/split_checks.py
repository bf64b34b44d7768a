"""Check that the ranks of a role can share a model's rows and weights, before any process starts."""

from math import gcd
from typing import Any, cast

from transformers import PreTrainedModel

from rlpack.config.layout_sizes import layout_sizes, most_stages, nearest_ep, nearest_size
from rlpack.config.roles import pool_of, role_parallel
from rlpack.config.schema import Config
from rlpack.models.expert_parallel import expert_modules, uneven_experts
from rlpack.models.packed import language_model
from rlpack.models.stage_wiring import LAYERS, wiring_problem
from rlpack.models.tensor_parallel import split_problem, uneven_weight
from rlpack.models.text_settings import num_experts, settings_of


def split_sizes_problem(config: Config, role: str, model: PreTrainedModel) -> str | None:
    """Return why a role's ranks can't share a model's tokens, weights, experts or layers, and what to set, or None."""
    parallel, settings = role_parallel(config, role), settings_of(model.config)
    cp, tp, key = parallel.cp, parallel.tp, f"{role}.parallel"
    heads = settings.get("num_attention_heads")
    if parallel.pp > 1 and (problem := _stages_problem(config, role, model)):
        return problem
    if tp > 1 and (problem := _weights_problem(config, role, model)):
        return problem
    if parallel.ep > 1 and (problem := _experts_problem(config, role, model)):
        return problem
    if cp == 1 or parallel.cp_method == "all_gather" or not isinstance(heads, int) or heads % (tp * cp) == 0:
        return None
    fitting = nearest_size(config, role, "cp", heads // tp)
    share = "" if tp == 1 else f" on each of the {tp} ranks of {key}.tp"
    return (
        f"has {heads // tp} attention heads{share}, which is not divisible by {key}.cp ({cp}); set "
        f"{key}.cp={fitting}, or {key}.cp_method=all_gather"
    )


def _stages_problem(config: Config, role: str, model: PreTrainedModel) -> str | None:
    """Return why a model can't be cut into the stages of `pp`."""
    parallel, key, base = role_parallel(config, role), f"{role}.parallel.pp", language_model(model)
    pp, vpp = parallel.pp, parallel.vpp
    if problem := wiring_problem(model if role in {"actor", "reference"} else base):
        return f"can't be cut into the {pp} pipeline stages of {key}: {problem}; set {key}=1"
    num_layers = sum(1 for _ in base.get_submodule(LAYERS).children())
    if num_layers >= pp * vpp:
        return None
    shown = f"has {num_layers} layer{'s' * (num_layers > 1)}, fewer than the {pp * vpp} stages of {key}"
    if vpp == 1:
        return f"{shown}; set {key}={most_stages(config, role, num_layers)}"
    virtual = f"{role}.parallel.vpp"
    if num_layers >= pp:
        return f"{shown} ({pp}) × {virtual} ({vpp}); set {virtual}={num_layers // pp}"
    fitting = most_stages(config, role, num_layers)
    return f"{shown} ({pp}) × {virtual} ({vpp}); set {virtual}=1 {key}={fitting}"


def _weights_problem(config: Config, role: str, model: PreTrainedModel) -> str | None:
    """Return why the ranks of `tp` can't share a model's weights."""
    tp, key, settings = role_parallel(config, role).tp, f"{role}.parallel", settings_of(model.config)
    if problem := split_problem(language_model(model)):
        return f"can't be split over the {tp} ranks of {key}.tp: {problem}; set {key}.tp=1"
    heads = settings["num_attention_heads"]
    counts = {"attention heads": heads, "key and value heads": settings.get("num_key_value_heads") or heads}
    counts |= {"experts": experts} if (experts := num_experts(settings)) else {}
    if any(count % tp for count in counts.values()):
        fitting = nearest_size(config, role, "tp", *counts.values())
        named = ", ".join(f"{count} {name}" for name, count in counts.items())
        return f"has {named}; each has to be divisible by {key}.tp ({tp}); set {key}.tp={fitting}"
    sizes = layout_sizes(config, role, config.placement.pools[pool_of(config, role)].ranks)
    shards = sizes["dp_shard"] * sizes["cp"]
    if uneven := uneven_weight(language_model(model), shards, experts=sizes["ep"] == 1):
        return (
            f"has {uneven[0]} with rows of {uneven[1]} elements, which with {key}.tp={tp} have to be divisible by the "
            f"{shards} ranks (dp_shard · cp) that share them; change their number by {key}.dp_replicate, or set "
            f"{key}.tp=1"
        )
    return None


def _experts_problem(config: Config, role: str, model: PreTrainedModel) -> str | None:
    """Return why the ranks of `ep` can't divide a model's experts."""
    sizes = layout_sizes(config, role, config.placement.pools[pool_of(config, role)].ranks)
    ep, tp, key = sizes["ep"], sizes["tp"], f"{role}.parallel"
    counts = [cast(Any, module).num_experts for _, module in expert_modules(language_model(model))]
    if not counts:
        return f"has no stacked experts that the {ep} ranks of {key}.ep could divide; set {key}.ep=1"
    count = gcd(*counts)  # layers usually have equally many
    if count % (ep * tp):
        parts = f"{key}.ep ({ep})" if tp == 1 else f"{key}.ep ({ep}) × {key}.tp ({tp})"
        fitting = nearest_ep(config, role, count)
        return f"has {count} experts, which is not divisible by {parts}; set {key}.ep={fitting}"
    shards = sizes["dp_shard"] * sizes["cp"] // ep
    if uneven := uneven_experts(language_model(model), shards):
        return (
            f"has {uneven[0]} with a second axis of {uneven[1]}, which with {key}.ep={ep} has to be divisible by the "
            f"{shards} ranks (dp_shard · cp / ep) that share it; change their number by {key}.dp_replicate, or set "
            f"{key}.ep=1"
        )
    return None

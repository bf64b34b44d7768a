"""Check that the ranks of a role can share a model's rows and weights, before any process starts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from rlpack.config.layout_remedies import Change, alternatives, nearest, pool_ranks, remedy
from rlpack.config.layout_sizes import layout_sizes
from rlpack.config.roles import role_parallel
from rlpack.config.schema import Config
from rlpack.models.expert_parallel import expert_modules, uneven_experts
from rlpack.models.packed import language_model
from rlpack.models.stage_wiring import LAYERS, wiring_problem
from rlpack.models.tensor_parallel import empty_part, split_problem, uneven_weight
from rlpack.models.text_settings import num_experts, settings_of

# Results of `_checked_once`: a search tries hundreds of layouts with one model.
_CHECKED: WeakKeyDictionary[nn.Module, dict[Callable[[Any], str | None], str | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Misfit:
    """Why a role's ranks can't share a model's tokens, weights, experts or layers.

    Attributes:
        reason: the given sizes and those that are allowed.
        changes: for each possible fix, changes of sizes that may work, best first.
    """

    reason: str
    changes: Sequence[Iterable[Change]]


def split_sizes_problem(config: Config, role: str, model: PreTrainedModel) -> str | None:
    """Return why a role's ranks can't share a model's tokens, weights, experts or layers, and what to set, or None."""
    found = misfit(config, role, model)
    if found is None:
        return None

    def accepts(changed: Config) -> bool:
        return misfit(changed, role, model) is None

    every: Change = dict.fromkeys(("cp", "tp", "pp"), 1)
    ways = alternatives(*(remedy(config, role, changes, accepts) for changes in found.changes))
    ways = ways or remedy(config, role, [every], accepts)
    return f"{found.reason}; set {ways or f'other sizes of {role}.parallel, or another number of ranks'}"


def _checked_once(check: Callable[[Any], str | None], model: nn.Module) -> str | None:
    """Return the result of a check of a model that doesn't depend on the layout; it is kept as long as the model."""
    results = _CHECKED.setdefault(model, {})
    if check not in results:
        results[check] = check(model)
    return results[check]


def misfit(config: Config, role: str, model: PreTrainedModel) -> Misfit | None:
    """Return why a role's ranks can't share a model; None if they can."""
    parallel, settings = role_parallel(config, role), settings_of(model.config)
    cp, tp, key = parallel.cp, parallel.tp, f"{role}.parallel"
    heads = settings.get("num_attention_heads")
    if parallel.pp > 1 and (found := _uneven_stages(config, role, model)):
        return found
    if tp > 1 and (found := _uneven_weights(config, role, model)):
        return found
    if parallel.ep > 1 and (found := _uneven_experts(config, role, model)):
        return found
    if cp == 1 or parallel.cp_method == "all_gather" or not isinstance(heads, int) or heads % (tp * cp) == 0:
        return None
    share = "" if tp == 1 else f" on each of the {tp} ranks of {key}.tp"
    return Misfit(
        f"has {heads // tp} attention heads{share}, which is not divisible by {key}.cp ({cp})",
        (_sizes("cp", nearest(cp, range(1, heads // tp + 1))), [{"cp_method": "all_gather"}]),
    )


def _uneven_stages(config: Config, role: str, model: PreTrainedModel) -> Misfit | None:
    """Return why a model can't be cut into the stages of `pp`."""
    parallel, key, base = role_parallel(config, role), f"{role}.parallel.pp", language_model(model)
    pp, vpp = parallel.pp, parallel.vpp
    if problem := _checked_once(wiring_problem, model if role in {"actor", "reference"} else base):
        return Misfit(f"can't be cut into the {pp} pipeline stages of {key}: {problem}", [_sizes("pp", [1])])
    num_layers = sum(1 for _ in base.get_submodule(LAYERS).children())
    if num_layers >= pp * vpp:
        return None
    shown = f"has {num_layers} layer{'s' * (num_layers > 1)}, fewer than the {pp * vpp} stages of {key}"
    if vpp == 1:
        return Misfit(shown, [_sizes("pp", range(num_layers, 0, -1))])
    shown = f"{shown} ({pp}) × {role}.parallel.vpp ({vpp})"
    if num_layers >= pp:
        return Misfit(shown, [_sizes("vpp", [num_layers // pp])])
    return Misfit(shown, [[{"vpp": 1, "pp": stages} for stages in range(num_layers, 0, -1)]])


def _uneven_weights(config: Config, role: str, model: PreTrainedModel) -> Misfit | None:
    """Return why the ranks of `tp` can't share a model's weights."""
    tp, key, settings = role_parallel(config, role).tp, f"{role}.parallel", settings_of(model.config)
    if problem := _checked_once(split_problem, language_model(model)):
        return Misfit(f"can't be split over the {tp} ranks of {key}.tp: {problem}", [_sizes("tp", [1])])
    heads = settings["num_attention_heads"]
    counts = {"attention heads": heads, "key and value heads": settings.get("num_key_value_heads") or heads}
    counts |= {"experts": experts} if (experts := num_experts(settings)) else {}
    if any(count % tp for count in counts.values()):
        named = ", ".join(f"{count} {name}" for name, count in counts.items())
        fitting = nearest(tp, range(1, min(counts.values()) + 1))
        return Misfit(f"has {named}; each has to be divisible by {key}.tp ({tp})", [_sizes("tp", fitting)])
    ranks = pool_ranks(config, role)
    if empty := empty_part(language_model(model), tp):
        return Misfit(
            f"has {empty[0]} with an axis of {empty[1]}, which leaves nothing for the last of the {tp} ranks of "
            f"{key}.tp",
            [_sizes("tp", nearest(tp, range(1, ranks + 1)))],
        )
    sizes = layout_sizes(config, role, ranks)
    shards = sizes["dp_shard"] * sizes["cp"]
    if uneven := uneven_weight(language_model(model), shards, experts=sizes["ep"] == 1):
        return Misfit(
            f"has {uneven[0]} with rows of {uneven[1]} elements, which with {key}.tp={tp} have to be divisible by the "
            f"{shards} ranks (dp_shard · cp) that share them",
            (_sizes("dp_replicate", nearest(sizes["dp_replicate"], range(1, ranks + 1))), _sizes("tp", [1])),
        )
    return None


def _uneven_experts(config: Config, role: str, model: PreTrainedModel) -> Misfit | None:
    """Return why the ranks of `ep` can't divide a model's experts."""
    ranks = pool_ranks(config, role)
    sizes, key = layout_sizes(config, role, ranks), f"{role}.parallel"
    ep, tp = sizes["ep"], sizes["tp"]
    counts = [cast(Any, module).num_experts for _, module in expert_modules(language_model(model))]
    if not counts:
        reason = f"has no stacked experts that the {ep} ranks of {key}.ep could divide"
        return Misfit(reason, [_sizes("ep", [1])])
    count = gcd(*counts)  # layers usually have equally many
    if count % (ep * tp):
        parts = f"{key}.ep ({ep})" if tp == 1 else f"{key}.ep ({ep}) × {key}.tp ({tp})"
        fitting = nearest(ep, range(1, sizes["dp_shard"] * sizes["cp"] + 1))
        return Misfit(f"has {count} experts, which is not divisible by {parts}", [_sizes("ep", fitting)])
    shards = sizes["dp_shard"] * sizes["cp"] // ep
    if uneven := uneven_experts(language_model(model), shards):
        return Misfit(
            f"has {uneven[0]} with a second axis of {uneven[1]}, which with {key}.ep={ep} has to be divisible by the "
            f"{shards} ranks (dp_shard · cp / ep) that share it",
            (_sizes("dp_replicate", nearest(sizes["dp_replicate"], range(1, ranks + 1))), _sizes("ep", [1])),
        )
    return None


def _sizes(name: str, values: Iterable[int]) -> list[Change]:
    return [{name: value} for value in values]

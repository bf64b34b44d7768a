"""The table of cases: layouts × model families × batching modes × roles. A new layout is a new row of `LAYOUTS`.

`make test` runs a part in which each layout but the combined ones meets every family, mode and role; `make
test-layouts` runs the product, and further layouts.
"""

import itertools
import os
from dataclasses import dataclass, replace
from typing import Any

from rlpack.config.layout_sizes import layout_sizes
from rlpack.config.schema import Algorithm, Config, Model, Rollout
from rlpack.config.sections.parallelism import Parallel
from rlpack.config.sections.value_models import Critic, RewardModel
from rlpack.distributed.layout import ParallelLayout
from rlpack.packing import Batching
from tests.builders import MODEL, tiny_algorithm, tiny_config
from tests.distributed.definition import scored

# Ranks, and the keys of `actor.parallel`.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp4": (4, {}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "replicas2": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "cp2": (2, {"cp": 2}),
    "cp4": (4, {"cp": 4}),
    "dp2cp2": (4, {"cp": 2}),
    "replicas2cp2": (4, {"dp_replicate": 2, "cp": 2}),
    "tp2": (2, {"tp": 2, "sp": False}),
    "tp2sp": (2, {"tp": 2}),
    "dp2tp2": (4, {"tp": 2}),
    "replicas2tp2": (4, {"dp_replicate": 2, "tp": 2, "sp": False}),
    "cp2tp2": (4, {"cp": 2, "tp": 2}),
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "dp2ep2": (4, {"ep": 2}),
    "replicas2ep2": (4, {"dp_replicate": 2, "ep": 2}),
    "cp2ep2": (2, {"cp": 2, "ep": 2}),
    "ep2tp2": (4, {"ep": 2, "tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2dp2": (4, {"pp": 2}),
    "pp2replicas2": (4, {"pp": 2, "dp_replicate": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2cp2": (4, {"pp": 2, "cp": 2}),
    "pp2tp2": (4, {"pp": 2, "tp": 2}),
    "pp2ep2": (4, {"pp": 2, "ep": 2}),
    "gather2": (2, {"cp": 2, "cp_method": "all_gather"}),
    "gather4": (4, {"cp": 4, "cp_method": "all_gather"}),
    "dp2gather2": (4, {"cp": 2, "cp_method": "all_gather"}),
    "replicas2gather2": (4, {"dp_replicate": 2, "cp": 2, "cp_method": "all_gather"}),
    "gather2tp2": (4, {"cp": 2, "cp_method": "all_gather", "tp": 2, "sp": False}),
    "gather2tp2sp": (4, {"cp": 2, "cp_method": "all_gather", "tp": 2}),
    "gather2ep2": (2, {"cp": 2, "cp_method": "all_gather", "ep": 2}),
    "pp2gather2": (4, {"pp": 2, "cp": 2, "cp_method": "all_gather"}),
    "pp2vpp2": (2, {"pp": 2, "vpp": 2}),
}
# Those that only `make test-layouts` runs.
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2vpp2dp2": (4, {"pp": 2, "vpp": 2}),
    "pp2vpp2tp2": (4, {"pp": 2, "vpp": 2, "tp": 2}),
    "pp2vpp2cp2": (4, {"pp": 2, "vpp": 2, "cp": 2}),
    "pp2vpp2ep2": (4, {"pp": 2, "vpp": 2, "ep": 2}),
    "pp3vpp2": (3, {"pp": 3, "vpp": 2}),
}
RUNS_ALL = os.environ.get("RLPACK_LAYOUTS") == "all"
if RUNS_ALL:
    LAYOUTS |= MORE_LAYOUTS
# Layouts whose parts others of the table have, too: unless RLPACK_LAYOUTS=all, their gradients aren't compared.
COMBINED = {
    *("replicas2cp2", "replicas2tp2", "replicas2ep2", "pp2replicas2", "replicas2gather2"),
    *("gather4", "dp2gather2", "gather2tp2", "gather2tp2sp", "gather2ep2", "pp2gather2"),
    *("replicas2", "ep4", "dp2ep2", "dp4", "dp2cp2", "dp2tp2", "pp2dp2", "pp2tp2"),
}
# Soft caps and windows so small, and weights so large, that a slip shows.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4, "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
# Two soft caps, and norms before and after each block; a window in every layer; and attention over latents, sigmoid
# scores, a choice within groups of experts, a shared expert and a dense layer.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "query_pre_attn_scalar": 6,
        "sliding_window": 4,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", "head_dim": 8, "sliding_window": 4},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}
FAMILIES |= MORE_FAMILIES
# Layouts that divide experts run these families; the others run all but Mixtral.
WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3")
# Without a request for everything, these layouts run these families, too; the actor alone.
_MORE: dict[str, tuple[str, ...]] = {
    "cp2": ("gemma2", "mistral", "deepseek_v3"),
    "gather2": ("gemma2",),
    "tp2sp": ("gemma2", "mistral", "deepseek_v3", "mixtral"),
    **dict.fromkeys(("ep2", "pp2"), ("deepseek_v3",)),
}
# Families with more layers, unevenly divided among four or six stages, and of different kinds.
_KINDS = ["sliding_attention", "full_attention"]
DEEP = {f"{name}_deep": family | {"num_hidden_layers": 5} for name, family in FAMILIES.items()}
DEEP["gemma3_deep"] |= {"layer_types": [*_KINDS, *_KINDS, "sliding_attention"]}
DEEP |= {f"{name[:-5]}_deeper": family | {"num_hidden_layers": 7} for name, family in DEEP.items()}
DEEP["gemma3_deeper"] |= {"layer_types": [*_KINDS, *_KINDS, *_KINDS, "sliding_attention"]}
# A loss over whole sequences, one over tokens with statistics of the step, and the default one.
LOSSES: dict[str, dict[str, Any]] = {
    "llama": {"loss": "gspo", "clip_low": 0.03, "clip_high": 0.03},
    "gemma3": {"loss": "kl_cov", "loss_arguments": {"share": 0.2, "coef": 0.7}},
}
MODES = {
    "packed": Batching(mode="packed", max_tokens=32),
    "dynamic": Batching(mode="dynamic", max_tokens=48),
    "fixed": Batching(mode="fixed", micro_batch_size=3, max_tokens=None),
    "shared": Batching(mode="packed", max_tokens=32, share_prompts=True),
}
ROLES = ("actor", "critic", "reward_model", "sft")
# How the models of these roles recompute activations.
CHECKPOINTING = {"actor": "selective", "sft": "full"}

# Tokens of prompt and response; the third response is empty, and the sixth row is quarantined. Rows with prompts of one
# length have the same prompt.
SIZES = [(5, 9), (5, 1), (4, 0), (2, 21), (4, 6), (5, 8), (2, 4)]
QUARANTINED = 5
RATE, TEMPERATURE = 0.02, 0.8
CRITIC = Critic(value_clip=0.1)


@dataclass(frozen=True)
class Case:
    """A role with a model of a family, batched in a mode."""

    family: str
    mode: str
    role: str


def families_of(layout: str) -> list[str]:
    """Return the families whose models have what a layout divides: experts, or enough layers."""
    sizes = LAYOUTS[layout][1]
    families = list(WITH_EXPERTS) if "ep" in sizes else [name for name in FAMILIES if name != "mixtral"]
    if not RUNS_ALL:
        families = [name for name in families if name not in MORE_FAMILIES]
    num_stages = sizes.get("pp", 1) * sizes.get("vpp", 1)
    if num_stages <= MODEL["num_hidden_layers"]:
        return families
    return [f"{name}_{'deep' if num_stages <= 5 else 'deeper'}" for name in families]


def modes_of(layout: str) -> list[str]:
    """Return the modes that run on a layout."""
    shares = LAYOUTS[layout][1].get("cp_method") != "all_gather"
    return [mode for mode in MODES if shares or mode != "shared"]


def cases_of(layout: str) -> list[Case]:
    """Return what runs on a layout: everything on request, else each family, mode and role at least once."""
    families, modes = families_of(layout), modes_of(layout)
    product = [Case(*names) for names in itertools.product(families, modes, ROLES)]
    if RUNS_ALL:
        return product
    turn = list(LAYOUTS).index(layout)
    cases = [
        Case(families[(turn + place) % len(families)], modes[(turn + place) % len(modes)], role)
        for place, role in enumerate(ROLES)
    ]
    return cases + [
        Case(family, modes[(turn + place) % len(modes)], "actor") for place, family in enumerate(_MORE.get(layout, ()))
    ]


def config_of(
    family: str, *, layout: str | None = None, classifier: str | None = None, checkpointing: str = "none"
) -> Config:
    """Return a run on a family's model, on one rank or with the keys of a layout."""
    shape = {key: value for key, value in MODEL.items() if key != "model_type"}
    config = tiny_config(
        recipe="ppo",
        model=Model(config=shape | (FAMILIES | DEEP)[family]),
        algorithm=algorithm(family),
        rollout=Rollout(temperature=TEMPERATURE),
        critic=CRITIC.model_copy(update={"optimizer": CRITIC.optimizer.model_copy(update={"max_grad_norm": 1e9})}),
        reward_model=RewardModel(path=classifier, weight=2.0),
    )
    if layout is None:
        return config
    changes = {"parallel": Parallel(**LAYOUTS[layout][1]), "gradient_checkpointing": checkpointing}
    actor = config.actor.model_copy(update=changes)
    return config.model_copy(update={"actor": actor})


def in_mode(config: Config, mode: str) -> Config:
    """Return the run with all roles batched in a mode, in at least two microbatches."""
    return config.model_copy(update={"batching": replace(MODES[mode], min_microbatches=2)})


def layout_of(layout: str, role: str = "actor") -> ParallelLayout:
    """Return the layout that the configuration gives a role."""
    ranks, _ = LAYOUTS[layout]
    return ParallelLayout(**layout_sizes(config_of("llama", layout=layout), role, ranks))


def algorithm(family: str) -> Algorithm:
    """Return the algorithm of a family's actor, with a KL term and an entropy bonus."""
    return tiny_algorithm(aggregation="token_mean", entropy_coef=0.05, **LOSSES.get(family.partition("_deep")[0], {}))


def batch_of(family: str) -> Any:
    """Return a scored rollout batch of a family's model."""
    return scored(SIZES, QUARANTINED, TEMPERATURE, config_of(family))

"""Each rank computes its part of a new model, and the parts are the weights of the model built whole."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.family_configs import tiny_config as family_config
from rlpack.config.schema import Actor, Config, Critic, Model
from rlpack.config.sections.optimization import Lora
from rlpack.config.sections.parallelism import Parallel
from rlpack.data.tokenization import eos_id, pad_id
from rlpack.distributed.layout import ParallelLayout
from rlpack.models.adapters import add_adapters
from rlpack.models.loading import build_causal_lm
from rlpack.models.open_model import open_new_causal_lm
from rlpack.models.parallel import shard_model
from rlpack.models.parts import local_part
from rlpack.models.policy import Policy
from rlpack.worker import RankContext
from rlpack.workers import build
from rlpack.workers.build import build_critic, build_policy
from tests.builders import tiny_config, tiny_tokenizer
from tests.distributed.models.test_sharded_loading import differences
from tests.distributed.processes import on_ranks
from tests.memory_rise import MIB, MemoryRise

# Tied, with rotary buffers of two kinds; with stacked experts.
FAMILIES = ("gemma3_text", "qwen3_moe")
LAYOUTS = (
    (FAMILIES, {"dp_shard": 3}),  # 3 divides few sizes
    pytest.param(("llama",), {"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.long),
    (FAMILIES[:1], {"dp_shard": 2, "tp": 2}),
    pytest.param(FAMILIES[1:], {"dp_shard": 2, "tp": 2}, marks=pytest.mark.long),
    (FAMILIES[:1], {"dp_shard": 2, "pp": 2}),
    pytest.param(("llama",), {"cp": 2}, marks=pytest.mark.long),
    (FAMILIES[1:], {"dp_shard": 2, "ep": 2}),
)
LARGE = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}


def new_model(family: str) -> Model:
    """Return the section of a new model, without the settings that it gets from the tokenizer."""
    settings = {"model_type": family} | family_config(family).to_diff_dict()
    refused = ("vocab_size", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "dtype")
    return Model(config={name: value for name, value in settings.items() if name not in refused})


def role_config(family: str, sizes: dict[str, Any], **actor: Any) -> Config:
    parts = {"actor": Actor(parallel=Parallel(**sizes), **actor), "critic": Critic()}
    return tiny_config("ppo", model=new_model(family), **parts)


def whole_model(config: Config) -> torch.nn.Module:
    tokenizer = tiny_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": eos_id(tokenizer), "pad_token_id": pad_id(tokenizer)}
    return build_causal_lm(config.model, seed=config.seed, **ids)


def built_roles(mesh: DeviceMesh, rank: int, families: tuple[str, ...], sizes: dict[str, Any]) -> list[str]:
    """Build actor and critic in parts, with all checks; return the weights in which one differs from a whole one."""
    context, tokenizer = RankContext(rank=rank, layout=ParallelLayout(**sizes)), tiny_tokenizer()
    wrong = []
    with patch.object(build, "WHOLE_BYTES", 0), patch.object(build, "build_model", side_effect=AssertionError):
        for family in families:
            truth: Any = whole_model(role_config(family, sizes))
            for precision in ("fp32", "bf16"):
                config = role_config(family, sizes, precision=precision)
                wrong += differences(build_policy(config, "actor", tokenizer, context), truth)
            wrong += differences(build_critic(config, tokenizer, context), truth.model)
    return wrong


@pytest.mark.parametrize(("families", "sizes"), LAYOUTS)
def test_every_role_of_a_new_model_is_built_in_parts_and_passes_its_checks(
    tmp_path: Path, families: tuple[str, ...], sizes: dict[str, Any]
):
    ranks = ParallelLayout(**sizes).world_size
    assert on_ranks(tmp_path, ranks, built_roles, families, sizes) == [[]] * ranks


def built_adapters(mesh: DeviceMesh, rank: int, sizes: dict[str, Any]) -> list[str]:
    """Build a policy with adapters; return the weights in which it differs from a whole one."""
    context = RankContext(rank=rank, layout=ParallelLayout(**sizes))
    config = role_config("llama", sizes, lora=Lora(rank=3))
    with patch.object(build, "WHOLE_BYTES", 0):
        policy = build_policy(config, "actor", tiny_tokenizer(), context)
    truth: Any = whole_model(config)
    add_adapters(truth, config.actor.lora, seed=config.seed)
    found: Any = dict(policy.model.named_parameters())
    return [name for name, weight in truth.named_parameters() if not torch.equal(found[name].full_tensor(), weight)]


@pytest.mark.parametrize("sizes", [pytest.param({"dp_shard": 2}, marks=pytest.mark.long), {"tp": 2}])
def test_adapters_of_parts_start_as_those_of_a_whole_model(tmp_path: Path, sizes: dict[str, Any]):
    assert on_ranks(tmp_path, 2, built_adapters, sizes) == [[], []]


def building_memory(mesh: DeviceMesh, rank: int) -> tuple[int, int, int]:
    """Return how far memory rises while a rank builds its part, the size of the part, and the largest weight."""
    memory = MemoryRise()
    torch.set_num_threads(1)
    warm_up = open_new_causal_lm(Model(config=LARGE | {"num_hidden_layers": 1}), vocab_size=100)
    warm_up.materialize(warm_up.model, "cpu")
    memory.start()
    opened = open_new_causal_lm(Model(config=LARGE), vocab_size=20_000)
    policy = Policy(opened.model)
    shard_model(policy, mesh)
    opened.materialize(policy, "cpu")
    part = sum(local_part(weight).nbytes for weight in policy.parameters())
    return memory.num_bytes, part, max(weight.nbytes for weight in policy.parameters())


def test_a_rank_holds_its_part_and_one_weight(tmp_path: Path):
    for rise, part, largest in on_ranks(tmp_path, 4, building_memory):
        assert 4 * part > part + largest + 96 * MIB  # a whole model would exceed the limit
        assert rise < part + largest + 48 * MIB

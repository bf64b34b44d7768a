"""Each rank reads its part of a model's files, and the parts are transformers' own weights."""

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.family_configs import tiny_config as family_config
from rlpack.config.schema import Actor, Config, Critic, Model
from rlpack.config.sections.optimization import Lora
from rlpack.config.sections.parallelism import Parallel
from rlpack.config.sections.value_models import RewardModel
from rlpack.distributed.layout import ParallelLayout
from rlpack.models.adapters import add_adapters
from rlpack.models.expert_parallel import ExpertSplit, split_experts
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.open_model import open_causal_lm
from rlpack.models.packed import PackedModel
from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from rlpack.models.tensor_parallel import FAMILIES as TENSOR_PARALLEL
from rlpack.models.tensor_parallel import split_weights
from rlpack.models.weight_files import WeightFiles
from rlpack.models.weight_split import WeightSplit
from rlpack.models.weight_stream import head_state_dict, load_folder
from rlpack.worker import RankContext
from rlpack.workers.build import build_critic, build_policy, build_reward_model
from tests.builders import tiny_config, tiny_tokenizer
from tests.distributed.layouts.cases import RUNS_ALL
from tests.distributed.models.test_weight_stream import large_policy
from tests.distributed.processes import on_ranks
from tests.memory_rise import MIB, MemoryRise
from tests.unit.models.tiny import tiny_model
from tests.whole_weights import full_state_dict

FAMILIES = ("qwen2", "qwen3", "llama", "gemma3_text", "qwen3_moe", "mixtral", "gpt_neox", "deepseek_v3", "phi3")
EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3")
READ = WeightFiles.read
# Of the models whose roles are built; tied, with rotary buffers of two kinds, and with stacked experts.
BUILT = ("gemma3_text", "qwen3_moe")


def save(folder: Path, family: str, **settings: Any) -> Path:
    config = family_config(family)
    for name, value in settings.items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / family, max_shard_size="9KB")
    return folder / family


def differences(model: PackedModel, truth: torch.nn.Module) -> list[str]:
    """Return the weights and buffers in which a sharded model differs from another one; a collective."""
    found = full_state_dict(model) | dict(model.model.named_buffers())
    expected = dict(truth.named_parameters()) | dict(truth.named_buffers())
    missing = expected.keys() - found.keys()
    # A pipeline stage has only its own buffers that files don't have.
    assert missing <= (set() if model.stage is None else {name for name, _ in truth.named_non_persistent_buffers()})
    return [name for name, tensor in found.items() if not torch.equal(expected[name], tensor)]


def loaded_parts(mesh: DeviceMesh, rank: int, folder: str, replicas: int) -> dict[str, list[str]]:
    """Return in which weights each family differs from transformers' own loading."""
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, mesh.size() // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    wrong = {}
    for family in FAMILIES:
        path = f"{folder}/{family}"
        stored = open_causal_lm(Model(path=path), attention_name="eager")
        policy = Policy(stored.model)
        shard_model(policy, mesh)
        stored.materialize(policy, "cpu")
        truth = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        wrong[family] = differences(policy, truth)
        tied = policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight
        assert tied == truth.config.tie_word_embeddings
    return wrong


def test_parts_of_every_rank_are_the_weights_that_transformers_loads(tmp_path: Path):
    for family in FAMILIES:
        save(tmp_path, family)
    for wrong in on_ranks(tmp_path, 3, loaded_parts, str(tmp_path), 1):  # 3 divides few sizes
        assert wrong == {family: [] for family in FAMILIES}


def test_replicas_of_parts_are_the_weights_that_transformers_loads(tmp_path: Path):
    for family in FAMILIES:
        save(tmp_path, family)
    for wrong in on_ranks(tmp_path, 4, loaded_parts, str(tmp_path), 2):
        assert wrong == {family: [] for family in FAMILIES}


def loaded_blocks(_: DeviceMesh, rank: int, folder: str) -> dict[str, list[str]]:
    """Return in which weights each family differs from transformers' own loading if ranks share layers, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    wrong = {}
    for family in sorted(TENSOR_PARALLEL & set(FAMILIES)):
        stored = open_causal_lm(Model(path=f"{folder}/{family}"), attention_name="eager")
        policy = Policy(stored.model)
        split_weights(policy, WeightSplit(mesh["tp"]))
        policy.weight_split = WeightSplit(mesh["tp"])
        shard_model(policy, mesh["dp_shard"], small_bytes=0)
        stored.materialize(policy, "cpu")
        truth = AutoModelForCausalLM.from_pretrained(f"{folder}/{family}", dtype=torch.float32)
        wrong[family] = differences(policy, truth)
    return wrong


def test_blocks_of_every_rank_are_the_weights_that_transformers_loads(tmp_path: Path):
    for family in FAMILIES:
        save(tmp_path, family)
    for wrong in on_ranks(tmp_path, 4, loaded_blocks, str(tmp_path)):
        assert wrong == {family: [] for family in TENSOR_PARALLEL & set(FAMILIES)}


def recorded(files: WeightFiles, names: list[str], name: str, dtype: torch.dtype) -> torch.Tensor:
    """Read a tensor, and add its name to the others."""
    names.append(name)
    return READ(files, name, dtype)


def loaded_experts(_: DeviceMesh, rank: int, folder: str, tp: int) -> dict[str, list[str]]:
    """Return in which weights each family differs from transformers' own loading if ranks divide experts."""
    layout = ParallelLayout(dp_shard=4 // tp, tp=tp, ep=2)
    dense, mesh = layout.weight_mesh("cpu"), layout.expert_mesh("cpu")
    wrong = {}
    for family in EXPERTS if tp == 1 else EXPERTS[:2]:
        stored = open_causal_lm(Model(path=f"{folder}/{family}"), attention_name="eager")
        policy = Policy(stored.model)
        policy.expert_split = ExpertSplit(mesh)
        split_experts(policy, policy.expert_split)
        if tp > 1:
            policy.weight_split = WeightSplit(dense["tp"])
            split_weights(policy, policy.weight_split)
        shard_model(policy, dense["dp_shard"], expert_mesh=mesh["dp_shard"], small_bytes=0)
        read: list[str] = []
        with patch.object(WeightFiles, "read", functools.partialmethod(recorded, read)):
            stored.materialize(policy, "cpu")
        numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
        assert len(numbers) == 4 // (2 * tp)  # a rank reads its own experts alone
        truth = AutoModelForCausalLM.from_pretrained(f"{folder}/{family}", dtype=torch.float32)
        wrong[family] = differences(policy, truth)
    return wrong


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_of_every_rank_are_the_weights_that_transformers_loads(tmp_path: Path, tp: int):
    for family in EXPERTS:
        save(tmp_path, family)
    for wrong in on_ranks(tmp_path, 4, loaded_experts, str(tmp_path), tp):
        assert wrong == {family: [] for family in (EXPERTS if tp == 1 else EXPERTS[:2])}


def role_config(path: str, **actor: Any) -> Config:
    sections = {"actor": Actor(**actor), "critic": Critic(), "reward_model": RewardModel(path=f"{path}-scores")}
    return tiny_config("ppo", model=Model(path=path), **sections)


def built_roles(
    mesh: DeviceMesh, rank: int, folder: str, families: tuple[str, ...], sizes: dict[str, int]
) -> list[str]:
    """Build every role with all checks; return the weights in which one differs from transformers' own loading."""
    context = RankContext(rank=rank, layout=ParallelLayout(**sizes))
    tokenizer, parallel = tiny_tokenizer(), Parallel(**sizes)
    wrong = []
    for family in families:
        path = f"{folder}/{family}"
        truth = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for precision, checkpointing, offload in (
            ("fp32", "none", "none"),
            ("fp32", "selective", "optimizer"),
            ("bf16", "full", "parameters"),
        ):
            compute = {"precision": precision, "gradient_checkpointing": checkpointing, "offload": offload}
            config = role_config(path, parallel=parallel, **compute)
            policy = build_policy(config, "actor", tokenizer, context)
            assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
            assert policy.output_map == Policy(truth).output_map or not policy.has_outputs
            wrong += differences(policy, truth)
        config = role_config(path, parallel=parallel)
        wrong += differences(build_critic(config, tokenizer, context), truth.model)
        scores = AutoModelForSequenceClassification.from_pretrained(f"{path}-scores", dtype=torch.float32)
        reward_model = build_reward_model(config, tokenizer, context)
        wrong += differences(reward_model, scores.model)
        assert torch.equal(head_state_dict(reward_model)["head.weight"], scores.score.weight)
    return wrong


@pytest.mark.parametrize(
    ("families", "sizes"),
    [
        (BUILT if RUNS_ALL else BUILT[:1], {"tp": 2}),
        (BUILT if RUNS_ALL else BUILT[1:], {"pp": 2}),
        *[(BUILT, {"dp_shard": 2}), (BUILT[1:], {"dp_shard": 2, "ep": 2})] * RUNS_ALL,
    ],
)
def test_every_role_of_a_stored_model_is_built_in_parts_and_passes_its_checks(
    tmp_path: Path, families: tuple[str, ...], sizes: dict[str, int]
):
    for family in families:
        path = save(tmp_path, family, vocab_size=len(tiny_tokenizer()))
        scores = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
        scores.save_pretrained(f"{path}-scores")
    assert on_ranks(tmp_path, 2, built_roles, str(tmp_path), families, sizes) == [[], []]


def built_adapters(mesh: DeviceMesh, rank: int, path: str, sizes: dict[str, int]) -> list[str]:
    """Build a policy with adapters; return the weights in which it differs from a whole one."""
    context = RankContext(rank=rank, layout=ParallelLayout(**sizes))
    tokenizer, config = tiny_tokenizer(), role_config(path, lora=Lora(rank=3), parallel=Parallel(**sizes))
    policy = build_policy(config, "actor", tokenizer, context)
    truth = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    add_adapters(truth, config.actor.lora, seed=config.seed)
    found = {name: weight.full_tensor() for name, weight in policy.model.named_parameters()}
    trained = {name for name, weight in policy.model.named_parameters() if weight.requires_grad}
    own = {name: weight for name, weight in truth.named_parameters() if name in found or policy.stage is None}
    assert trained == {name for name, weight in own.items() if weight.requires_grad}
    return [name for name, weight in own.items() if not torch.equal(found[name], weight)]


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_shard": 2, "tp": 2},
        {"dp_shard": 2, "pp": 2},
        *(pytest.param(sizes, marks=pytest.mark.long) for sizes in ({"dp_shard": 2}, {"tp": 2})),
    ],
)
def test_adapters_of_parts_start_as_those_of_a_whole_model(tmp_path: Path, sizes: dict[str, int]):
    path, ranks = save(tmp_path, "llama", vocab_size=len(tiny_tokenizer())), ParallelLayout(**sizes).world_size
    assert on_ranks(tmp_path, ranks, built_adapters, str(path), sizes) == [[]] * ranks


def loading_memory(mesh: DeviceMesh, rank: int, folder: str) -> tuple[int, int, bool]:
    """Return how far memory rises while a rank loads its part, the size of the part, and whether a reload is equal."""
    memory = MemoryRise()
    warm_up = open_causal_lm(Model(path=folder), attention_name="eager")
    policy = Policy(warm_up.model)
    memory.start()
    shard_model(policy, mesh)
    warm_up.materialize(policy, "cpu")
    rise = memory.num_bytes
    part = sum(weight.to_local().nbytes for weight in policy.parameters())
    expected = [weight.to_local().clone() for weight in policy.parameters()]
    with torch.no_grad():
        for weight in policy.parameters():
            weight.zero_()
    load_folder(policy, Path(folder))
    pairs = zip(policy.parameters(), expected, strict=True)
    return rise, part, all(torch.equal(weight.to_local(), value) for weight, value in pairs)


def test_memory_of_a_loading_rank_is_bounded_by_its_part(tmp_path: Path):
    large_policy().model.save_pretrained(tmp_path / "model", max_shard_size="90MB")
    for rise, part, reloaded in on_ranks(tmp_path, 2, loading_memory, str(tmp_path / "model")):
        assert 100 * MIB < part < 110 * MIB
        assert rise < 1.1 * part + 16 * MIB
        assert reloaded


def building_memory(mesh: DeviceMesh, rank: int, path: str) -> dict[str, tuple[int, int]]:
    """Return how far memory rises while a rank builds each role, and the size of its part."""
    memory, tokenizer, found = MemoryRise(), tiny_tokenizer(), {}
    context = RankContext(rank=rank, layout=ParallelLayout(dp_shard=2))
    config = role_config(path, isolation_check=False)
    builds: dict[str, Callable[[], PackedModel]] = {
        "warm-up": lambda: build_policy(config, "actor", tokenizer, context),
        "actor": lambda: build_policy(config, "actor", tokenizer, context),
        "reference": lambda: build_policy(config, "reference", tokenizer, context),
        "critic": lambda: build_critic(config, tokenizer, context),
        "reward_model": lambda: build_reward_model(config, tokenizer, context),
    }
    for role, build in builds.items():
        gc.collect()
        memory.start()
        model = build()
        parts = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters())
        found[role] = memory.num_bytes, sum(part.nbytes for part in parts)
        del model
    return found


def test_memory_of_a_rank_that_builds_any_role_is_bounded_by_its_part(tmp_path: Path):
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 14}
    model = tiny_model("qwen2", dtype=torch.float32, vocab_size=len(tiny_tokenizer()), **shape)
    model.save_pretrained(tmp_path / "model", max_shard_size="90MB")
    scores = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    scores.save_pretrained(tmp_path / "model-scores", max_shard_size="90MB")
    for found in on_ranks(tmp_path, 2, building_memory, str(tmp_path / "model")):
        del found["warm-up"]
        for role, (rise, part) in found.items():
            assert 100 * MIB < part < 110 * MIB, role
            assert rise < 1.3 * part + 32 * MIB, (role, rise / MIB)


def test_a_critic_of_parts_predicts_zero(tmp_path: Path):
    stored = open_causal_lm(Model(path=str(save(tmp_path, "llama"))), attention_name="eager")
    critic = ScalarHeadModel(stored.model.model)
    stored.materialize(critic, "cpu")
    assert not critic.head.weight.any()
    assert not critic.head.weight.is_meta

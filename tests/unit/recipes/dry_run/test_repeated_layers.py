"""Estimates from two shorter models against a simulation of all layers."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rlpack.config.schema import Actor, Batching, Config, Model
from rlpack.config.sections.optimization import Lora
from rlpack.config.sections.parallelism import Parallel
from rlpack.config.sections.value_models import Critic
from rlpack.models.memory_simulation import ModelMemory, SimulatedMicrobatch
from rlpack.models.parallel import shard_model
from rlpack.models.pipeline_parallel import PassOn
from rlpack.models.repeated_layers import Repetition, find_repetition
from rlpack.recipes.dry_run import role_memory
from rlpack.workers import build
from tests.builders import tiny_config, tiny_tokenizer
from tests.unit.recipes.dry_run.test_estimate_run import gpus

ROW = SimulatedMicrobatch(slots=96, longest=40)
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Every family here has layers enough that some are left out.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 18, "tie_word_embeddings": False},
    "llama, for stages": {"model_type": "llama", "num_hidden_layers": 36, "tie_word_embeddings": True},
    "qwen2, tied": {"model_type": "qwen2", "num_hidden_layers": 18, "tie_word_embeddings": True},
    "gemma3, one of six without a window": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 60,
        "head_dim": 8,
        "sliding_window": 8,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "num_hidden_layers": 18, "head_dim": 8, **EXPERTS},
    "qwen3_moe, experts in every other layer": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 24,
        "decoder_sparse_step": 2,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
    },
    "deepseek_v3, three dense": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 26,
        "first_k_dense_replace": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one rank": (1, {}),
    "dp4": (4, {}),
    "dp2tp2": (4, {"tp": 2}),
    "dp2cp2": (4, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
    "dp16": (16, {}),
    "pp2": (2, {"pp": 2}),
}


def memories(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    role: str = "actor",
    row: SimulatedMicrobatch = ROW,
    **options: Any,
) -> tuple[ModelMemory, ModelMemory, list[int]]:
    """Return a role's memory from shorter models and from all layers, and the layers of each model that is simulated.

    Layers are sharded one by one, as those of a large model.
    """
    monkeypatch.setattr(build, "shard_model", partial(shard_model, small_bytes=0))
    monkeypatch.setattr(role_memory, "SMALL_BYTES", 0)
    simulated: list[int] = []
    divide = role_memory.divide_weights

    def counting(model: Any, *arguments: Any) -> Any:
        divided = divide(model, *arguments)
        simulated.append(len(role_memory.own_layers(divided)))
        return divided

    monkeypatch.setattr(role_memory, "divide_weights", counting)
    found = []
    for find in (find_repetition, lambda layers: None):
        monkeypatch.setattr(role_memory, "find_repetition", find)
        found.append(
            role_memory.role_memory(config, role, tiny_tokenizer(), row, **({"several": False} | options)),
        )
    return *found, simulated


def configured(family: str, layout: str = "dp4", **settings: Any) -> Config:
    num_ranks, sizes = LAYOUTS[layout]
    actor = Actor(isolation_check=False, parallel=Parallel(**sizes), **settings)
    return tiny_config(
        "ppo",
        model=Model(config=SHAPE | FAMILIES[family]),
        actor=actor,
        critic=Critic(),
        placement=gpus(num_ranks, address="auto"),
        batching=Batching(max_tokens=96),
    )


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "dp4"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("deepseek_v3, three dense", "dp4"),
                ("llama", "one rank"),
                ("llama", "dp2tp2"),
                ("llama", "dp2cp2"),
                ("qwen2, tied", "dp2tp2"),
                ("gemma3, one of six without a window", "dp4"),
                ("qwen3_moe", "ep2"),
            )
        ),
    ],
)
def test_the_estimate_is_that_of_all_layers(monkeypatch: pytest.MonkeyPatch, family: str, layout: str):
    short, whole, simulated = memories(monkeypatch, configured(family, layout))
    assert short == whole
    *few, every = simulated
    assert every == FAMILIES[family]["num_hidden_layers"]
    assert len(few) == 2
    assert sum(few) <= 0.75 * every


def test_two_kinds_of_layers_in_turn_keep_an_ordinary_one_of_each(monkeypatch: pytest.MonkeyPatch):
    """The peak is in the backward pass of the first layer with experts whose neighbors are as those in the middle."""
    settings: dict[str, Any] = {"gradient_checkpointing": "full", "precision": "bf16"}
    config = configured("qwen3_moe, experts in every other layer", "dp16", **settings)
    short, whole, simulated = memories(monkeypatch, config, row=SimulatedMicrobatch(slots=512, longest=128))
    assert short == whole
    assert simulated == [8, 10, 24]


@pytest.mark.parametrize(
    ("kind", "offload"),
    [
        ("full", "none"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("selective", "none"), ("selective", "optimizer"), ("full", "parameters"))
        ),
    ],
)
def test_recomputation_and_offloading_change_nothing(monkeypatch: pytest.MonkeyPatch, kind: str, offload: str):
    config = configured("llama", gradient_checkpointing=kind, offload=offload, precision="bf16")
    short, whole, simulated = memories(monkeypatch, config, several=True)
    assert short == whole
    assert len(simulated) == 3


@pytest.mark.long
def test_stages_of_a_pipeline_leave_out_layers_of_their_own(monkeypatch: pytest.MonkeyPatch):
    short, whole, simulated = memories(monkeypatch, configured("llama, for stages", "pp2"), several=True)
    assert short == whole
    assert simulated == [6, 7, 6, 7, 18, 18]


@pytest.mark.long
@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_adapters_and_passes_of_another_size_are_those_of_all_layers(monkeypatch: pytest.MonkeyPatch, role: str):
    config, forward = configured("llama", lora=Lora(rank=2)), SimulatedMicrobatch(slots=480, longest=40)
    short, whole, simulated = memories(monkeypatch, config, role, forward=forward)
    assert short == whole
    assert simulated == ([6, 7, 18] if role == "reference" else [6, 7, 6, 7, 18, 18])


def test_a_model_that_becomes_small_with_fewer_layers_is_simulated_as_a_whole(monkeypatch: pytest.MonkeyPatch):
    """Small models are sharded as one unit, so shorter models tell nothing about a large one."""
    whole = configured("llama")
    sizes = {"hidden_size": 512, "intermediate_size": 2560, "num_hidden_layers": 18}
    config = whole.model_copy(update={"model": Model(config=SHAPE | FAMILIES["llama"] | sizes)})
    simulated: list[int] = []
    run = role_memory.simulate_update

    def counting(model: Any, *arguments: Any, **options: Any) -> Any:
        simulated.append(len(role_memory.own_layers(model)))
        return run(model, *arguments, **options)

    monkeypatch.setattr(role_memory, "simulate_update", counting)
    role_memory.role_memory(config, "actor", tiny_tokenizer(), ROW, several=False)
    assert simulated == [6, 7, 18]


def stack(*widths: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)) for width in widths]


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([8] * 20, Repetition(3, 1, 14)),
        ([9, 9, *[8] * 30, 7], Repetition(5, 1, 24)),
        ([8, 8, 9] * 12, Repetition(5, 3, 8)),
        ([1, *[8, 9] * 20], Repetition(5, 2, 16)),
        ([8] * 9, None),  # two shorter ones would have nearly as many
        (list(range(1, 30)), None),
        ([], None),
    ],
)
def test_layers_that_repeat_are_found(widths: list[int], expected: Repetition | None):
    layers = stack(*widths)
    assert find_repetition(layers) == expected
    if expected is not None:
        out = expected.left_out(layers, 0), expected.left_out(layers, 1)
        assert [len(each) for each in out] == [expected.times * expected.period, (expected.times - 1) * expected.period]


def test_layers_of_equal_weights_but_other_settings_differ():
    layers = stack(*[8] * 40)
    for index, layer in enumerate(layers):
        layer.layer_idx, layer.window = index, 16 if index % 4 else None
    assert find_repetition(layers) == Repetition(6, 4, 7)


def test_placeholders_have_the_attributes_by_which_models_choose_what_a_layer_gets():
    layer = nn.Linear(2, 2)
    layer.attention_type, layer.mixer = "sliding_attention", nn.Identity()
    placeholder = PassOn(layer)
    assert placeholder.attention_type == "sliding_attention"
    assert not [*placeholder.parameters(), *placeholder.children()]
    states = torch.ones(1, 3, 2)
    assert placeholder(states, position_ids=None) is states

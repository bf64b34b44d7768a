"""Simulated memory against closed forms; against measured peaks: tests/distributed/models/test_memory_estimate.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from rlpack.config.schema import Model
from rlpack.config.sections.optimization import Optimizer
from rlpack.config.sections.parallelism import ContextMethod
from rlpack.distributed.layout import ParallelLayout
from rlpack.models import attention
from rlpack.models.context_parallel import RowSplit
from rlpack.models.fake_ranks import call_on_fake_rank
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.kernel_device import kernels_of
from rlpack.models.live_bytes import LiveBytes
from rlpack.models.loading import build_meta_model
from rlpack.models.memory_simulation import (
    ModelMemory,
    SimulatedMicrobatch,
    optimizer_bytes,
    simulate_forward,
    simulate_update,
    step_bytes,
)
from rlpack.models.optimizers import build_optimizer
from rlpack.models.packed import PackedModel, language_model
from rlpack.models.parallel import shard_model
from rlpack.models.parts import local_part
from rlpack.models.policy import Policy
from rlpack.models.tensor_parallel import split_weights
from rlpack.models.weight_split import WeightSplit
from tests.unit.models.tiny import KINDS

VOCABULARY, HIDDEN, INNER, LAYERS = 64, 32, 48, 2
# Embedding and output layer; query and output, key and value (half the heads), gate, up and down; norms.
MATRICES = 2 * VOCABULARY * HIDDEN + LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * INNER)
NORMS = HIDDEN * (2 * LAYERS + 1)
NUMBERS = MATRICES + NORMS
SETTINGS = Optimizer()
ROW = SimulatedMicrobatch(slots=96, longest=40)


def meta_lm(model_type: str = "llama", **changes: Any) -> PreTrainedModel:
    shape = {"model_type": model_type, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    attention.register()
    model = build_meta_model(Model(config=shape | changes), vocab_size=VOCABULARY, pad_token_id=0)
    model.config._attn_implementation = attention.NAME
    return model


def divide(
    model: PackedModel, layout: ParallelLayout, *, method: ContextMethod = "ulysses", **options: Any
) -> PackedModel:
    mesh = layout.weight_mesh("cpu")
    if layout.tp > 1:
        model.weight_split = WeightSplit(mesh["tp"])
        split_weights(model, model.weight_split)
        model.split = RowSplit.of_group(None, layout.tp)
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")]
    shard_model(model, mesh, **({"small_bytes": 0} | options))
    if layout.cp > 1:
        model.split = RowSplit.of_group(layout.device_mesh("cpu")["cp"].get_group(), layout.tp, method)
    return model


def update(
    layout: ParallelLayout,
    *,
    several: bool = False,
    kind: str = "none",
    layers: int = LAYERS,
    row: SimulatedMicrobatch = ROW,
    **options: Any,
) -> ModelMemory:
    def simulate() -> ModelMemory:
        policy = Policy(meta_lm(num_hidden_layers=layers))
        policy.checkpoint_activations(kind)  # pyright: ignore[reportArgumentType]
        model = divide(policy, layout, **options)
        simulated = simulate_update(model, row, SETTINGS, several=several, entropy=True, device="cpu")
        return simulated.memory(SETTINGS, model.offload)

    return call_on_fake_rank(0, layout.world_size, simulate)


def weights_and_buffers(memory: ModelMemory) -> int:
    return memory.weights - 2 * 4 * (HIDDEN // 4 // 2)  # the rotary frequencies, twice


def test_one_rank_keeps_weights_gradients_and_two_moments_in_fp32():
    memory = update(ParallelLayout())
    assert weights_and_buffers(memory) == 4 * NUMBERS
    assert (memory.gradients, memory.optimizer) == (4 * NUMBERS, 8 * NUMBERS)
    # AdamW on many weights at once holds the roots of all second moments.
    assert memory.step == memory.kept + 4 * NUMBERS


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        (ParallelLayout(dp_shard=4), 4),
        (ParallelLayout(dp_replicate=2, dp_shard=2), 2),
        (ParallelLayout(dp_shard=2, cp=2), 4),
        (ParallelLayout(dp_shard=2, tp=2), 4),
    ],
    ids=str,
)
def test_ranks_keep_their_shares(layout: ParallelLayout, share: int):
    memory = update(layout)
    # Norms are whole on the ranks of tensor parallelism.
    numbers = MATRICES // share + NORMS // (share if layout.tp == 1 else share // layout.tp)
    assert weights_and_buffers(memory) == memory.gradients == 4 * numbers
    assert memory.optimizer == 8 * numbers


def test_a_second_microbatch_meets_whole_gradients_which_are_summed_over_ranks_at_the_end():
    layout = ParallelLayout(dp_shard=4)
    one, two = update(layout), update(layout, several=True)
    assert two.gradients == one.gradients == NUMBERS
    assert two.most["gradients"] >= 4 * NUMBERS > one.most["gradients"]
    assert two.peak > one.peak


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_second_microbatch_meets_whole_gradients_of_a_part_of_tensor_parallelism(precision: str):
    layout = ParallelLayout(dp_shard=2, tp=2)
    one, two = (update(layout, several=several, precision=precision) for several in (False, True))
    # Gradients are summed in fp32: half of each matrix, which FSDP keeps whole until the last microbatch.
    assert two.most["gradients"] >= 4 * MATRICES // 2 > one.most["gradients"]


def test_weights_that_are_not_freed_after_forward_are_gathered_together():
    layout = ParallelLayout(dp_shard=4)
    freed, kept = update(layout), update(layout, reshard_after_forward=False)
    assert kept.most["gathered"] >= 4 * NUMBERS
    assert freed.most["gathered"] < kept.most["gathered"]


def test_recomputation_keeps_the_inputs_of_layers():
    kept = {kind: update(ParallelLayout(), kind=kind).most["activations"] for kind in ("none", "selective", "full")}
    assert kept["full"] < kept["selective"] < kept["none"]
    deeper = update(ParallelLayout(), kind="full", layers=LAYERS + 3).most["activations"]
    assert deeper - kept["full"] == 3 * 4 * ROW.slots * HIDDEN


def test_ranks_that_share_tokens_have_their_part_of_the_activations():
    alone = update(ParallelLayout()).most["activations"]
    for layout in (ParallelLayout(cp=2), ParallelLayout(tp=2)):
        assert 0.4 < update(layout).most["activations"] / alone < 0.75, layout


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputation_keeps_no_gathered_keys(kind: str):
    alone = update(ParallelLayout(), kind=kind).most["activations"]
    shared = update(ParallelLayout(cp=2), kind=kind, method="all_gather").most["activations"]
    assert 0.4 < shared / alone < 0.75


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3", "qwen2_sliding", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2)], ids=["alone", "tp2"])
def test_families_run(kind: str, layout: ParallelLayout):
    model_type, changes = KINDS.get(kind, (kind, {}))
    if kind in ("mixtral", "qwen3_moe"):
        changes = {"num_experts_per_tok": 2, "num_local_experts": 4}

    def simulate() -> tuple[int, ModelMemory]:
        policy = Policy(meta_lm(model_type, **changes))
        policy.checkpoint_activations("selective")
        weights = sum(local_part(weight).nbytes for weight in policy.parameters())
        model = divide(policy, layout)
        simulated = simulate_update(model, ROW, SETTINGS, several=False, entropy=True, device="cpu")
        return weights, simulated.memory(SETTINGS, model.offload)

    weights, memory = call_on_fake_rank(0, layout.world_size, simulate)
    assert weights / layout.tp <= memory.weights <= 1.1 * weights / layout.tp + 4 * NORMS
    assert memory.peak > memory.kept


def test_a_value_model_has_no_logits_and_a_frozen_one_no_gradients():
    def simulate() -> ModelMemory:
        critic = ScalarHeadModel(language_model(meta_lm()))
        critic.head.to("meta")
        return simulate_forward(divide(critic, ParallelLayout(dp_shard=2)), ROW, device="cpu").memory(None, "none")

    memory = call_on_fake_rank(0, 2, simulate)
    assert (memory.gradients, memory.optimizer, memory.step) == (0, 0, 0)
    assert memory.peak == sum(memory.at_peak.values())
    assert memory.most["output_layer"] < 4 * ROW.slots * 8


def test_gpus_attend_by_a_kernel_for_packed_rows():
    seen = []

    class Names(LiveBytes):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return super().__torch_dispatch__(func, types, args, kwargs)

    with kernels_of("cuda"), FakeTensorMode(), Names():
        query, key, value = (torch.empty(1, heads, 96, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
        output, _ = attention.attention(nn.Module(), query, key, value, None, packed=ROW.inputs().packed)
    assert output.shape == (1, 96, 4, 64)
    assert any(name.startswith("torch_attn::_varlen_attn") for name in seen)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_optimizer_state_has_the_size_of_the_optimizers(name: str, request: pytest.FixtureRequest):
    if name == "adamw_8bit":
        request.getfixturevalue("eight_bit")
    settings = Optimizer(name=name)  # pyright: ignore[reportArgumentType]
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 3))
    optimizer = build_optimizer(model, settings)
    expected = sum(optimizer_bytes(weight, settings) for weight in model.parameters())
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    parts = [getattr(moment, name) for moment in moments for name in ("codes", "scale") if name in dir(moment)]
    plain = [moment for moment in moments if "codes" not in dir(moment)]
    assert sum(tensor.nbytes for tensor in (*parts, *plain)) == expected


def test_an_offloaded_step_has_one_bucket_on_the_device_and_one_on_the_host_nothing():
    sizes = 400 * 2**22, 2**22  # 1.6 GiB of weights
    assert step_bytes(*sizes, SETTINGS, "none") == 400 * 2**22
    assert step_bytes(*sizes, SETTINGS, "optimizer") == 3 * 2**27
    assert step_bytes(*sizes, SETTINGS, "parameters") == 0


def test_live_bytes_follow_storages():
    with LiveBytes() as live:
        whole = torch.zeros(1000)
        view = whole[:10]
        del whole
        assert live.now["weights"] == 4000
        with live.using("activations"):
            other = view.clone()
        del view
        assert (live.now["weights"], live.now["activations"], live.peak.most["weights"]) == (0, 40, 4000)
        assert live.peak.total == 4040
        other.untyped_storage().resize_(80)
        assert live.now["gathered"] == 80


def test_weights_and_sums_of_gradients_are_not_transient():
    with LiveBytes() as live:
        weight = torch.zeros(1000)
        leaf, kept = torch.zeros(1, requires_grad=True), []

        def reduce(gradient: torch.Tensor) -> None:  # as FSDP2 takes a weight's gradient out of a unit's sum
            total = torch.zeros(500)
            kept.append(torch.as_strided(total, (50, 10), (10, 1), 0))
            kept.append(torch.zeros(300))

        leaf.register_hook(reduce)
        with live.using("output_layer"):
            leaf.sum().backward()
    few = 100  # the leaf, its gradient and their like
    assert 4 * 500 <= live.peak.transient < 4 * 500 + few
    assert 4 * (1000 + 500 + 300) <= live.peak.total < 4 * (1000 + 500 + 300) + few
    assert [len(weight), len(kept)] == [1000, 2]


def test_with_offloaded_parameters_another_layer_costs_a_gpu_only_its_input():
    few, many = (update(ParallelLayout(), kind="full", layers=layers) for layers in (2, 6))
    assert many.transient - few.transient == 4 * 4 * HIDDEN * ROW.slots
    assert many.peak - few.peak > 4 * 4 * (2 * HIDDEN**2 + HIDDEN**2 + 3 * HIDDEN * INNER)


def test_rows_that_share_a_prompt_keep_its_keys_and_values_for_each_of_them():
    shared = replace(ROW, prompt=32, group=4)
    packed = shared.inputs().packed
    assert packed is not None
    assert packed.lengths == (40, 8, 8, 8, 32)
    assert packed.keys is not None
    assert packed.keys.segments.lengths == (40, 40, 40, 40, 32)
    more = LAYERS * 2 * (192 - 96) * HIDDEN // 2 * 4  # keys and values of half the heads, in fp32
    found = [update(ParallelLayout(), row=row).at_peak["activations"] for row in (ROW, shared)]
    assert more <= found[1] - found[0] <= 1.5 * more  # with masks of queries and keys

"""Leaks and errors that three short rows don't show: with many rows, many slots, in the backward pass."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from rlpack.config.schema import Data, Rollout
from rlpack.config.sections.optimization import Lora
from rlpack.config.sections.role_batching import RoleBatching
from rlpack.config.sections.value_models import Critic
from rlpack.models import attention as attention_module
from rlpack.models.adapters import add_adapters
from rlpack.models.check_rows import RowLimits, draw_rows, full_microbatches
from rlpack.models.checks import check_model
from rlpack.models.errors import IsolationError, ModelError
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.policy import Policy
from rlpack.packing import Batching
from tests.builders import tiny_config
from tests.unit.models.tiny import VOCABULARY, tiny_model

BUDGET = RowLimits(slots=2048)


def altered(change: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Policy:
    """Return a policy whose packed attention is right, but for a change to its output [1, T, H, D]."""

    def attend(*states: Tensor, **options: object) -> tuple[Tensor, None]:
        out, _ = attention_module.attention(*states, **options)
        packed = options.get("packed")
        return (out if packed is None else change(out, packed.lengths)), None

    AttentionInterface.register("altered", attend)
    return Policy(tiny_model(implementation="altered", dtype=torch.float32))


def added(out: Tensor, slots: slice, amount: Tensor) -> Tensor:
    out = out.clone()
    out[:, slots] += amount
    return out


def crosstalk(source: int, target: int) -> Callable[[Tensor, tuple[int, ...]], Tensor]:
    def change(out: Tensor, lengths: tuple[int, ...]) -> Tensor:
        if target >= len(lengths):
            return out
        first, second = sum(lengths[:source]), sum(lengths[:target])
        leak = 1e-2 * out[:, first : first + lengths[source]].mean(1, keepdim=True)
        return added(out, slice(second, second + lengths[target]), leak)

    return change


@pytest.mark.parametrize(("source", "target"), [(5, 6), (6, 7), (255, 256), (0, 299)])
def test_a_leak_between_two_of_many_rows_is_detected(source: int, target: int):
    policy = altered(crosstalk(source, target))
    with pytest.raises(IsolationError, match=rf"packed row {target} changed by .* in a microbatch of \d+ rows"):
        check_model(policy, "cpu", VOCABULARY, limits=BUDGET)


def test_a_leak_at_an_even_distance_shows_in_the_outputs():
    with pytest.raises(ModelError, match=r"row 64 differs by .* in a microbatch of \d+ rows with 2048 tokens"):
        check_model(altered(crosstalk(0, 64)), "cpu", VOCABULARY, limits=BUDGET)


def test_a_leak_beyond_a_number_of_slots_is_detected_where_a_run_has_them():
    def change(out: Tensor, lengths: tuple[int, ...]) -> Tensor:
        return added(out, slice(700, None), 1e-2 * out[:, :1])

    with pytest.raises(IsolationError, match="neighbors were replaced"):
        check_model(altered(change), "cpu", VOCABULARY, limits=BUDGET)
    check_model(altered(change), "cpu", VOCABULARY, limits=RowLimits(slots=700))


def test_a_table_of_segments_that_is_too_short_is_an_error_of_the_model():
    def change(out: Tensor, lengths: tuple[int, ...]) -> Tensor:
        table = torch.zeros(256)
        return out + torch.cat([table[index].expand(length) for index, length in enumerate(lengths)])[:, None, None]

    with pytest.raises(ModelError, match=r"packed as the actor: IndexError"):
        check_model(altered(change), "cpu", VOCABULARY, limits=BUDGET)
    check_model(altered(change), "cpu", VOCABULARY, limits=RowLimits(slots=300))


def test_a_leak_between_padded_rows_is_detected_unless_the_run_has_fewer():
    policy = Policy(tiny_model(implementation="sdpa", dtype=torch.float32))

    def leak(module: torch.nn.Module, inputs: object, out: Tensor) -> Tensor:
        return torch.cat([out[:7], out[7:8] + 1e-2 * out[6:7, :1], out[8:]]) if out.shape[0] > 7 else out

    policy.model.get_submodule("model.layers.0.mlp").register_forward_hook(leak)
    with pytest.raises(IsolationError, match="padded row 7 changed"):
        check_model(policy, "cpu", VOCABULARY, packed=False, limits=BUDGET)
    check_model(policy, "cpu", VOCABULARY, packed=False, limits=RowLimits(slots=2048, rows=7), trained=False)


class _MixedBackward(torch.autograd.Function):
    """The identity, with a backward pass that mixes the gradients of all tokens."""

    @staticmethod
    def forward(ctx: object, states: Tensor) -> Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient + 0.05 * gradient.mean((0, 1), keepdim=True)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_backward_pass_that_mixes_rows_is_detected_where_a_role_is_trained(packed: bool, role: str):
    lm = tiny_model(implementation="rlpack" if packed else "sdpa", dtype=torch.float32)
    lm.get_submodule("model.layers.0.mlp").register_forward_hook(lambda module, _, out: _MixedBackward.apply(out))
    model = Policy(lm) if role == "actor" else ScalarHeadModel(lm.base_model)
    with pytest.raises(ModelError, match=r"the gradient of model\.\S+ over \d+ (packed|padded) rows differs"):
        check_model(model, "cpu", VOCABULARY, role=role, packed=packed)
    check_model(model, "cpu", VOCABULARY, role=role, packed=packed, trained=False)


def test_a_wrong_gradient_of_a_single_weight_is_detected_and_named():
    policy = Policy(tiny_model(dtype=torch.float32))
    runs = {"packed": False}
    policy.model.base_model.register_forward_pre_hook(
        lambda module, args, options: runs.update(packed="packed" in options), with_kwargs=True
    )
    name = "model.layers.1.self_attn.q_proj.bias"
    policy.model.get_parameter(name).register_hook(lambda grad: 1.05 * grad if runs["packed"] else grad)
    with pytest.raises(ModelError, match=rf"the gradient of model\.{name} over .* differs by [345]\.\d+e-02"):
        check_model(policy, "cpu", VOCABULARY)


def test_a_layer_that_differs_when_it_is_recomputed_is_refused_with_activation_checkpointing_alone():
    policy = Policy(tiny_model(dtype=torch.float32))
    mlp = policy.model.get_submodule("model.layers.0.mlp")
    # The graph task of a backward pass has a number; outside of one it is -1.
    mlp.register_forward_pre_hook(lambda _, args: args[0] * (1.0 if torch._C._current_graph_task_id() < 0 else 1.1))
    check_model(policy, "cpu", VOCABULARY)
    policy.checkpoint_activations()
    with pytest.raises(
        ModelError, match=r"with activation checkpointing, and not .*; set actor\.gradient_checkpointing"
    ):
        check_model(policy, "cpu", VOCABULARY)


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_right_models_pass_with_activation_checkpointing_and_keep_no_gradient(
    kind: str, packed: bool, checkpointing: Literal["full", "selective"]
):
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "moe" in kind else {}
    changes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    policy = Policy(tiny_model(kind, implementation="rlpack" if packed else "eager", dtype=torch.float32, **changes))
    policy.checkpoint_activations(checkpointing)
    policy.train()
    check_model(policy, "cpu", VOCABULARY, packed=packed)
    assert policy.training
    assert all(weight.grad is None for weight in policy.parameters())


def test_adapters_are_checked_without_their_dropout_and_frozen_weights_are_not():
    lm: PreTrainedModel = tiny_model(dtype=torch.float32)
    add_adapters(lm, Lora(rank=2, dropout=0.5), seed=0)
    check_model(Policy(lm), "cpu", VOCABULARY)
    lm.requires_grad_(False)
    check_model(Policy(lm), "cpu", VOCABULARY)


CHUNKED = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "head_dim": 8,
           "attn_temperature_tuning": False, "max_position_embeddings": 2**17}  # fmt: skip


def test_rows_longer_than_a_chunk_are_refused_packed_by_the_key_that_limits_them():
    built = {
        name: tiny_model("llama4_text", implementation=name, dtype=torch.float32, attention_chunk_size=8192, **CHUNKED)
        for name in ("rlpack", "sdpa")
    }
    lengths = {"data": Data(max_prompt_tokens=193), "rollout": Rollout(max_new_tokens=8000)}
    limits = RowLimits.of_role(tiny_config(batching=Batching(max_tokens=9000), **lengths), "actor")
    short = RowLimits(longest=8192, slots=128)
    check_model(Policy(built["rlpack"]), "cpu", VOCABULARY, limits=short, trained=False)
    with pytest.raises(
        ModelError,
        match=r"masks rows over 8192 tokens .*: token 8192 doesn't see token 0 in transformers and sees it packed; "
        r"keep rows shorter \(data\.max_prompt_tokens \+ rollout\.max_new_tokens\), or set batching\.mode=dynamic",
    ):
        check_model(Policy(built["rlpack"]), "cpu", VOCABULARY, limits=limits)
    check_model(
        Policy(built["sdpa"]), "cpu", VOCABULARY, packed=False, limits=replace(short, longest=8193), trained=False
    )


def test_long_windows_are_compared_without_long_rows():
    long = {"sliding_window": 9000, "max_position_embeddings": 2**15}
    check_model(Policy(tiny_model("mistral", dtype=torch.float32, **long)), "cpu", VOCABULARY, trained=False)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    policy = Policy(tiny_model("phimoe", dtype=torch.float32, **experts, **long))
    with pytest.raises(ModelError, match="masks rows over 9000 tokens differently from packed attention: token"):
        check_model(policy, "cpu", VOCABULARY)


def test_limits_of_a_role_are_those_of_its_microbatches():
    lengths = {"data": Data(max_prompt_tokens=30), "rollout": Rollout(max_new_tokens=20)}
    keys = "data.max_prompt_tokens + rollout.max_new_tokens"
    for batching, expected in (
        (Batching(max_tokens=64), RowLimits(50, 64, None, keys)),
        (Batching(max_tokens=40), RowLimits(40, 40, None, "batching.max_tokens")),
        (Batching(max_tokens=40, overlong="own_microbatch"), RowLimits(50, 40, None, keys)),
        (Batching(mode="fixed", micro_batch_size=6, max_tokens=None), RowLimits(50, None, 6, keys)),
    ):
        assert RowLimits.of_role(tiny_config(batching=batching, **lengths), "actor") == expected
    critic = Critic(batching=RoleBatching(max_tokens=40))
    limits = RowLimits.of_role(tiny_config(recipe="ppo", critic=critic, **lengths), "critic")
    assert limits == RowLimits(40, 40, None, "critic.batching.max_tokens")


def test_full_microbatches_hold_what_a_run_can_hold():
    model = tiny_model(max_position_embeddings=512)
    (packed,) = full_microbatches(model, RowLimits(longest=100, slots=4096), packed=True)
    assert sum(packed) == 4096
    assert max(packed) == 100
    assert sum(length <= 4 for length in packed) >= 300
    for rows in (None, 6):
        short, long = full_microbatches(model, RowLimits(longest=100, slots=4096, rows=rows), packed=False)
        assert (len(short), len(long)) == ((300, 40) if rows is None else (6, 6))
        assert (max(short), max(long)) == (4, 100)
    for limits, longest in ((RowLimits(slots=4096), 512), (RowLimits(slots=40), 20)):
        assert max(full_microbatches(model, limits, packed=True)[0]) == longest


def test_checked_rows_go_past_the_lengths_from_which_attention_changes():
    sparse = {"index_block_size": 64, "index_topk_blocks": 2, "rotary_dim": 4, "head_dim": 8, "num_local_experts": 4}
    scaled = {"floor_scale": 100, "attention_chunk_size": 20, "intermediate_size_mlp": 48, "num_local_experts": 4}
    longrope = {"rope_type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4, "rope_theta": 1e4}
    for kind, settings, threshold, limit in (
        ("minimax_m3_vl_text", sparse, 128, 200),
        ("llama4_text", scaled | {"pad_token_id": 0}, 100, 200),
        ("mistral", {"sliding_window": 90}, 90, 200),
        ("phi3", {"rope_parameters": longrope | {"original_max_position_embeddings": 60}, "pad_token_id": 0}, 36, 60),
    ):
        model = tiny_model(kind, **settings, max_position_embeddings=512)
        lengths = [row.shape[0] for row in draw_rows(model, VOCABULARY, seed=0, longest=None)]
        assert threshold < max(lengths) <= limit, kind

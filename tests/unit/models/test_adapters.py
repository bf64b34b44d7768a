"""LoRA against its definition: the same model with W + (alpha / rank)·B·A as weights."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlpack.config.sections.optimization import Lora
from rlpack.models.adapters import adapter_layers, add_adapters, dropout_seed, find_adapters
from rlpack.models.check_adapters import check_adapters
from rlpack.models.errors import ModelError
from rlpack.models.inputs import pack_rows
from rlpack.models.policy import Policy
from tests.unit.models.tiny import KINDS, VOCABULARY, pad_rows, reference_scores, tiny_model, tiny_rows
from tests.whole_weights import full_state_dict

ROWS = tiny_rows([9, 1, 13, 6])
LORA = Lora(rank=3, alpha=6.0)


def adapted(kind: str = "qwen2", settings: Lora = LORA, *, wild: bool = True) -> Policy:
    """Return a policy with adapters; `wild` makes their matrices B random."""
    model = tiny_model(kind)
    add_adapters(model, settings, seed=5)
    model.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if wild and "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) / 8)
    return Policy(model, chunk=5)


def of_kind(policy: Policy, part: str) -> dict[str, Tensor]:
    """Return the matrices A or B by their layers' names in the base model."""
    return {
        name.replace(f".{part}.default", ""): weight
        for name, weight in policy.model.named_parameters()
        if f".{part}." in name
    }


def by_definition(kind: str, policy: Policy):
    """Return the base model with the adapters merged into its weights."""
    model = tiny_model(kind, implementation="eager" if kind == "gemma2" else "sdpa")
    weights = dict(model.named_parameters())
    down, up = of_kind(policy, "lora_A"), of_kind(policy, "lora_B")
    with torch.no_grad():
        for name in down:
            weights[name] += LORA.alpha / LORA.rank * up[name] @ down[name]
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapted_model_packed_or_padded_scores_like_the_merged_model(kind: str):
    policy = adapted(kind)
    model = by_definition(kind, policy)
    expected = torch.cat([reference_scores(model, row)[0] for row in ROWS])
    plain = torch.cat([reference_scores(tiny_model(kind), row)[0] for row in ROWS])
    assert (expected - plain).abs().max() > 0.1
    for inputs in (pack_rows(ROWS), pad_rows(ROWS, width=15)):
        assert torch.allclose(policy(inputs).logprobs, expected, rtol=0, atol=5e-6 if "gemma" in kind else 1e-12)
    merged = full_state_dict(policy)
    assert list(merged) == [name for name, _ in model.named_parameters()]
    for name, weight in model.named_parameters():
        assert torch.allclose(merged[name], weight, rtol=0, atol=1e-14), name


def test_only_adapters_get_gradients_and_they_are_those_of_the_product():
    policy = adapted()
    model = by_definition("qwen2", policy)
    for lm in (policy, Policy(model)):
        scores = lm(pack_rows(ROWS))
        (scores.logprobs.sum() + scores.entropy.square().sum()).backward()
    through = {name: weight.grad for name, weight in model.named_parameters()}
    down, up, scale = of_kind(policy, "lora_A"), of_kind(policy, "lora_B"), LORA.alpha / LORA.rank
    assert len(down) == 14
    for name in down:
        expected_down, expected_up = scale * up[name].T @ through[name], scale * through[name] @ down[name].T
        assert (down[name].grad - expected_down).norm() < 1e-10 * expected_down.norm(), name
        assert (up[name].grad - expected_up).norm() < 1e-10 * expected_up.norm(), name
    others = [name for name, weight in policy.model.named_parameters() if weight.grad is None]
    assert not any("lora_" in name for name in others)
    assert len(others) == len(list(model.named_parameters()))


def test_new_adapters_change_no_score_and_depend_on_the_seed_only():
    policy, plain = adapted(wild=False), Policy(tiny_model(), chunk=5)
    assert torch.equal(policy(pack_rows(ROWS)).logprobs, plain(pack_rows(ROWS)).logprobs)
    assert all(torch.equal(weight, full_state_dict(plain)[name]) for name, weight in full_state_dict(policy).items())
    before = torch.random.get_rng_state()
    again = adapted(wild=False)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, weight in of_kind(policy, "lora_A").items():
        assert weight.abs().max() > 0
        assert torch.equal(weight, of_kind(again, "lora_A")[name])


def test_targets_match_decoder_layers_and_never_the_head():
    model = tiny_model("llama")
    assert len(adapter_layers(model, LORA)) == 14
    chosen = adapter_layers(model, Lora(rank=1, targets=("*.[qv]_proj", "model.layers.1.mlp.*")))
    assert chosen == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    policy = adapted("llama", Lora(rank=1, targets=("*.[qv]_proj", "model.layers.1.mlp.*")))
    assert sorted(of_kind(policy, "lora_A")) == sorted(f"{name}.weight" for name in chosen)


@pytest.mark.parametrize(("target", "near"), [("lm_head", ""), ("q_porj", r"self_attn\.q_proj")])
def test_a_target_without_a_layer_is_an_error_that_lists_the_nearest(target: str, near: str):
    with pytest.raises(ModelError, match=rf"actor\.lora\.targets contains '{target}', .*{near}"):
        adapter_layers(tiny_model(), Lora(rank=1, targets=(target,)))


def test_empty_targets_are_an_error():
    with pytest.raises(ModelError, match=r"actor\.lora\.targets is \[\], so no layer would get an adapter"):
        adapter_layers(tiny_model(), Lora(rank=1, targets=()))


def test_a_model_whose_decoder_has_no_linear_layer_is_refused():
    model = tiny_model()
    model._no_split_modules = set()
    with pytest.raises(ModelError, match=r"no linear layers .*set actor\.lora\.rank=0"):
        adapter_layers(model, LORA)


def test_dropout_is_active_in_training_only_and_follows_from_its_seed():
    settings = LORA.model_copy(update={"dropout": 0.5})
    policy, plain = adapted("qwen2", settings), adapted("qwen2")
    inputs = pack_rows(ROWS)
    assert torch.equal(policy.eval()(inputs).logprobs, plain.eval()(inputs).logprobs)
    policy.train()

    def scores(*numbers: int) -> Tensor:
        with dropout_seed(settings, torch.device("cpu"), *numbers):
            return policy(inputs).logprobs.detach()

    before = torch.random.get_rng_state()
    first, second, again = scores(3, 1), scores(3, 2), scores(3, 1)
    assert torch.equal(first, again)
    assert (first - second).abs().max() > 1e-3
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(copy.deepcopy(policy).eval()(inputs).logprobs, plain(inputs).logprobs)


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {**EXPERTS, **LATENT, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
DEEPSEEK |= {"head_dim": 4}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}


@pytest.mark.parametrize(
    ("kind", "changes", "mlps"),
    [
        ("deepseek_v3", DEEPSEEK, {"layers.0.mlp", "layers.1.mlp.shared_experts"}),
        ("qwen3_moe", QWEN_MOE, {"layers.0.mlp"}),
    ],
)
def test_dense_and_shared_mlps_get_adapters_and_routed_experts_do_not(
    kind: str, changes: dict[str, Any], mlps: set[str]
):
    policy = policy_with_adapters(kind, **changes)
    adapted = {name.removesuffix(".base_layer.weight") for name in find_adapters(policy.model)}
    expected = {f"model.{mlp}.{name}_proj" for mlp in mlps for name in ("gate", "up", "down")}
    assert {name for name in adapted if ".mlp." in name} == expected
    assert any(name.endswith("self_attn.o_proj") for name in adapted)
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert trained == {f"model.{name}.lora_{matrix}.default.weight" for name in adapted for matrix in "AB"}
    check_adapters(policy, "cpu", VOCABULARY, packed=False)


JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
JAMBA |= {"num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False, "mamba_dt_rank": 4, "pad_token_id": 0}


def policy_with_adapters(kind: str, targets: tuple[str, ...] = ("*",), **changes: object) -> Policy:
    model = tiny_model(kind, implementation="sdpa", dtype=torch.float32, **changes)
    add_adapters(model, Lora(rank=2, targets=targets, dropout=0.5), seed=0)
    return Policy(model)


def effect(policy: Policy, layer: str) -> float:
    """Return by how much the model's own logits change with the adapter of a layer."""
    rows = tiny_rows([9])[0][None]
    with torch.no_grad():
        before = policy.model(rows, use_cache=False).logits
        dict(policy.model.named_parameters())[f"{layer}.lora_B.default.weight"].fill_(1.0)
        return (policy.model(rows, use_cache=False).logits - before).abs().max().item()


def test_adapters_of_layers_whose_weights_are_read_are_refused_by_name():
    targets = ("*_proj",)
    policy = policy_with_adapters("jamba", targets, **JAMBA)
    assert effect(copy.deepcopy(policy), "model.layers.0.mamba.dt_proj") == 0
    assert effect(copy.deepcopy(policy), "model.layers.0.mamba.x_proj") > 0
    with pytest.raises(ModelError, match=r"layers\.0\.mamba\.dt_proj without .*actor\.lora\.targets=\[") as info:
        check_adapters(policy, "cpu", VOCABULARY, packed=False)
    advised = tuple(re.findall(r'"([^"]+)"', str(info.value)))
    assert {"*.x_proj", "*.q_proj"} < set(advised)
    check_adapters(policy_with_adapters("jamba", advised, **JAMBA), "cpu", VOCABULARY, packed=False)


def test_a_layer_that_is_called_only_in_evaluation_mode_is_refused():
    policy = policy_with_adapters("llama")
    layer = policy.model.get_submodule("model.layers.1.mlp.up_proj")
    called = layer.forward
    layer.forward = lambda x: F.linear(x, layer.weight) if policy.training else called(x)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj without"):
        check_adapters(policy, "cpu", VOCABULARY, packed=False)


def test_right_adapters_pass_and_leave_the_model_as_it_was():
    for kind in ("qwen2", "gemma3"):
        policy = adapted(kind, Lora(rank=3, dropout=0.5))
        before = {name: (weight.clone(), weight.requires_grad) for name, weight in policy.named_parameters()}
        policy.train()
        check_adapters(policy, "cpu", VOCABULARY, packed=True)
        assert policy.training
        for name, weight in policy.named_parameters():
            assert torch.equal(weight, before[name][0])
            assert weight.requires_grad == before[name][1]
            assert weight.grad is None


def test_routers_and_grouped_layers_that_derive_from_linear_get_no_adapter():
    settings = {"num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8, "pad_token_id": 0}
    policy = policy_with_adapters("llama4_text", **settings)
    assert not any("router" in name for name in find_adapters(policy.model))
    check_adapters(policy, "cpu", VOCABULARY, packed=False)


def test_layers_that_share_a_weight_are_refused():
    model = tiny_model("llama", implementation="sdpa", dtype=torch.float32)
    first, second = (model.get_submodule(f"model.layers.{index}.mlp") for index in range(2))
    second.up_proj.weight = first.up_proj.weight
    add_adapters(model, Lora(rank=2), seed=0)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj .*in other layers"):
        check_adapters(Policy(model), "cpu", VOCABULARY, packed=False)

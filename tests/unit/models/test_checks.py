from dataclasses import replace

import pytest
import torch
from transformers import AttentionInterface, AutoModelForSequenceClassification

from rlpack.config.schema import Actor, Data, Placement, Pool, Rollout
from rlpack.config.sections.parallelism import Parallel
from rlpack.models import attention as attention_module
from rlpack.models.check_masks import check_masks
from rlpack.models.check_rows import RowLimits
from rlpack.models.checks import check_isolation, check_model, check_scores
from rlpack.models.errors import IsolationError, ModelError
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.output_map import OutputMap
from rlpack.models.policy import Policy
from rlpack.packing import Batching
from tests.builders import tiny_config
from tests.unit.models.tiny import KINDS, VOCABULARY, offload_embedding, tiny_model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supported_models_pass(kind: str, dtype: torch.dtype):
    # bfloat16's tolerance is for a model at a usual initialization.
    policy = Policy(tiny_model(kind, dtype=dtype, initializer_range=0.02))
    policy.train()
    check_isolation(policy, "cpu", VOCABULARY)
    check_isolation(policy, "cpu", VOCABULARY, packed=False)
    assert policy.training


def _borderless(*states: object, **options: object) -> object:
    """Attend over the whole packed row."""
    options.pop("packed", None)
    return attention_module.attention(*states, **options)


@pytest.mark.parametrize("initializer_range", [0.02, 0.25])
def test_a_model_whose_attention_ignores_segments_is_refused(initializer_range: float):
    AttentionInterface.register("borderless", _borderless)
    model = tiny_model(implementation="borderless", dtype=torch.float32, initializer_range=initializer_range)
    with pytest.raises(IsolationError, match=r"Qwen2ForCausalLM: .*batching\.mode=dynamic"):
        check_isolation(Policy(model), "cpu", VOCABULARY)


def test_a_leak_into_another_sequence_is_detected_at_any_size(monkeypatch):
    whole = attention_module._attend

    def leaking(query, key, value, rules):
        return whole(query, key, value, rules) + leak[0]

    leak = [torch.tensor(0.0)]
    original = torch.Tensor.split

    def split(self, sizes, dim=0):
        if self.dim() == 4:
            leak[0] = 1e-4 * self.mean()
        return original(self, sizes, dim)

    monkeypatch.setattr(attention_module, "_attend", leaking)
    monkeypatch.setattr(torch.Tensor, "split", split)
    with pytest.raises(IsolationError, match="packed row 0 changed by"):
        check_isolation(Policy(tiny_model(dtype=torch.float32)), "cpu", VOCABULARY)


def test_positions_that_do_not_restart_are_detected(monkeypatch):
    policy = Policy(tiny_model(dtype=torch.float32))
    base = policy.model.base_model
    # Rotary attention is relative, so a shift of all positions changes nothing: stretch them with the slot instead.
    base.register_forward_pre_hook(
        lambda module, args, kwargs: (
            args,
            kwargs | {"position_ids": torch.arange(kwargs["input_ids"].shape[1])[None] ** 2 // 16},
        ),
        with_kwargs=True,
    )
    with pytest.raises(ModelError, match=r"row 0 differs by .* between packed and alone"):
        check_model(policy, "cpu", VOCABULARY)


def test_a_head_with_further_operations_is_detected():
    policy = Policy(tiny_model("gemma2", dtype=torch.float32))
    policy.output_map = OutputMap()
    with pytest.raises(ModelError, match="own output layer has further operations"):
        check_model(policy, "cpu", VOCABULARY)


def test_a_model_with_unsupported_attention_is_refused_with_the_reason():
    policy = Policy(tiny_model(dtype=torch.float32))
    policy.model.get_submodule("model.layers.0.self_attn").is_causal = False
    with pytest.raises(ModelError, match="can't be run packed as the actor: Qwen2Attention is not causal"):
        check_model(policy, "cpu", VOCABULARY)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_supported_models_agree_with_transformers(kind: str, packed: bool):
    own = "eager" if kind == "gemma2" else "sdpa"
    model = tiny_model(kind, implementation="rlpack" if packed else own, dtype=torch.float32)
    check_model(Policy(model), "cpu", VOCABULARY, packed=packed)
    check_model(ScalarHeadModel(model.base_model), "cpu", VOCABULARY, role="critic", packed=packed)
    assert model.config._attn_implementation == ("rlpack" if packed else own)


def test_a_window_that_only_the_mask_has_is_refused_packed_and_right_padded():
    changes = {"sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2}
    built = {
        name: tiny_model("phimoe", implementation=name, dtype=torch.float32, **changes) for name in ("rlpack", "sdpa")
    }
    with pytest.raises(ModelError, match="between packed and alone"):
        check_model(Policy(built["rlpack"]), "cpu", VOCABULARY)
    check_model(Policy(built["sdpa"]), "cpu", VOCABULARY, packed=False)


def test_a_window_too_long_to_attend_is_refused_by_its_mask():
    changes = {"sliding_window": 600, "max_position_embeddings": 1024, "initializer_range": 0.02}
    model = tiny_model("phimoe", dtype=torch.float32, num_local_experts=4, num_experts_per_tok=2, **changes)
    with pytest.raises(ModelError, match=r"masks a row of 608 tokens differently .* first at token 600"):
        check_model(Policy(model), "cpu", VOCABULARY)


@pytest.mark.parametrize("hidden_size", [32, 512])
@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_routed_experts_are_not_taken_for_a_leak(kind: str, hidden_size: int):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "initializer_range": 0.02}
    for seed in range(3):
        policy = Policy(tiny_model(kind, dtype=torch.float32, hidden_size=hidden_size, seed=seed, **experts))
        check_model(policy, "cpu", VOCABULARY)
        check_isolation(policy, "cpu", VOCABULARY)


def test_a_leak_between_rows_of_experts_is_detected():
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    AttentionInterface.register("borderless", _borderless)
    policy = Policy(tiny_model("qwen3_moe", implementation="borderless", dtype=torch.float32, **experts))
    with pytest.raises(IsolationError, match=r"see each other; set batching\.mode=dynamic or fixed"):
        check_model(policy, "cpu", VOCABULARY)


@pytest.mark.parametrize(
    ("role", "mode", "sizes", "advice"),
    [
        ("critic", "packed", {}, "critic.batching.mode=dynamic or fixed"),
        ("critic", "packed", {"tp": 2}, "critic.parallel.tp=1 critic.batching.mode=dynamic or fixed"),
        ("actor", "packed", {"cp": 2}, "actor.parallel.cp=1 batching.mode=dynamic or fixed"),
        ("actor", "dynamic", {"cp": 2, "tp": 2}, "actor.parallel.cp=1 actor.parallel.tp=1"),
    ],
)
def test_errors_of_packed_rows_name_what_packs_them(role: str, mode: str, sizes: dict[str, int], advice: str):
    config = tiny_config(
        recipe="ppo",
        batching=Batching(mode=mode),
        actor=Actor(parallel=Parallel(**sizes)),
        placement=Placement(pools={"main": Pool(ranks=4)}),
    )
    limits = RowLimits.of_role(config, role)
    AttentionInterface.register("borderless", _borderless)
    leaking = Policy(tiny_model(implementation="borderless", dtype=torch.float32))
    with pytest.raises(IsolationError) as error:
        check_model(leaking, "cpu", VOCABULARY, role=role, limits=limits)
    assert f"see each other; set {advice}, or use another model" in str(error.value)
    with pytest.raises(IsolationError) as error:
        check_isolation(leaking, "cpu", VOCABULARY, role=role, padding=limits.padding)
    assert f"see each other; set {advice}, or use another model" in str(error.value)
    changes = {"sliding_window": 600, "max_position_embeddings": 1024, "initializer_range": 0.02}
    windowed = tiny_model("phimoe", dtype=torch.float32, num_local_experts=4, num_experts_per_tok=2, **changes)
    with pytest.raises(ModelError) as error:
        check_masks(Policy(windowed), VOCABULARY, "cpu", replace(limits, longest=700), role=role)
    assert f", or set {advice}" in str(error.value)
    assert ("mode=" in str(error.value)) == (mode == "packed")


def test_no_remedy_is_named_that_the_rules_refuse():
    config = tiny_config(
        batching=Batching(mode="dynamic", max_tokens=1024),
        data=Data(max_prompt_tokens=500),
        rollout=Rollout(max_new_tokens=1500),  # only two ranks that share tokens have room for a row
        actor=Actor(parallel=Parallel(cp=2)),
        placement=Placement(pools={"main": Pool(ranks=2)}),
    )
    AttentionInterface.register("borderless", _borderless)
    leaking = Policy(tiny_model(implementation="borderless", dtype=torch.float32))
    with pytest.raises(IsolationError, match="see each other; use another model"):
        check_isolation(leaking, "cpu", VOCABULARY, padding=RowLimits.of_role(config, "actor").padding)


def test_a_model_that_sees_later_tokens_is_refused_padded():
    policy = Policy(tiny_model(implementation="sdpa", dtype=torch.float32))
    base = policy.model.base_model

    def everything(module, args, kwargs):
        width = kwargs["input_ids"].shape[1]
        return args, kwargs | {"attention_mask": torch.zeros(1, 1, width, width)}

    base.register_forward_pre_hook(everything, with_kwargs=True)
    with pytest.raises(ModelError, match="the model is not causal"):
        check_model(policy, "cpu", VOCABULARY, packed=False)


def test_a_failure_inside_a_model_names_it_and_no_layout_that_fails_too():
    policy = Policy(tiny_model(dtype=torch.float32))
    del policy.model.base_model.norm
    words = r"Qwen2ForCausalLM can't be run packed as the critic: AttributeError: .*norm'?; use another model$"
    with pytest.raises(ModelError, match=words):
        check_model(policy, "cpu", VOCABULARY, role="critic")


def test_a_failure_of_packed_rows_alone_names_the_layouts_that_may_work():
    policy = Policy(tiny_model(dtype=torch.float32))

    def refuse_packed_rows(module, args, kwargs):
        if module.config._attn_implementation == "rlpack":
            raise RuntimeError("no kernel")

    policy.model.base_model.register_forward_pre_hook(refuse_packed_rows, with_kwargs=True)
    with pytest.raises(
        ModelError, match=r"RuntimeError: no kernel; set critic\.batching\.mode=dynamic or fixed, or use"
    ):
        check_model(policy, "cpu", VOCABULARY, role="critic")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_classifier_is_compared_on_the_device_of_its_offloaded_weights_mesh(device: str):
    config = tiny_model().config
    config.num_labels, config.pad_token_id = 1, 0
    classifier = AutoModelForSequenceClassification.from_config(config, attn_implementation="rlpack")
    devices = offload_embedding(classifier, device)
    with pytest.raises(ModelError, match="LookupError"):
        check_scores(classifier, ScalarHeadModel(classifier.base_model, classifier.score), VOCABULARY, packed=True)
    assert devices == [device]

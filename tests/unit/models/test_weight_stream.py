"""Weights leave a model and reach another one in buckets; the truth is the state dict of the plain model."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.family_configs import tiny_config
from rlpack.config.sections.optimization import Lora
from rlpack.models.adapters import add_adapters
from rlpack.models.errors import ModelError
from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream, check_weights, copy_weights
from tests.unit.models.tiny import tiny_model
from tests.whole_weights import load_full_state_dict

FP32 = torch.float32


def odd_policy(tied: bool = False) -> Policy:
    """Return a policy with odd shapes, a scalar, a large tensor and a whole-number buffer."""
    model = tiny_model("qwen2", dtype=FP32, vocab_size=51, intermediate_size=37, tie_word_embeddings=tied)
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(3.0)))
    model.register_buffer("steps", torch.tensor([2**40 + 1, 5]))
    model.register_buffer("cache", torch.ones(7), persistent=False)
    return Policy(model)


def truth(policy: Policy) -> dict[str, torch.Tensor]:
    """Return each storage of the state dict once, under its first name."""
    first: dict[int, str] = {}
    state = policy.model.state_dict()
    for name, tensor in state.items():
        first.setdefault(tensor.data_ptr(), name)
    return {name: state[name] for name in first.values()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 5000, 2**30])
def test_every_weight_comes_once_in_buckets_of_bounded_size(tied: bool, bucket_bytes: int):
    policy = odd_policy(tied)
    expected = truth(policy)
    stream = WeightStream(policy, FP32, bucket_bytes=bucket_bytes)
    buckets = list(stream)
    for bucket, specs in zip(buckets, stream.layout.buckets, strict=True):
        assert [(name, tuple(weight.shape), weight.dtype) for name, weight in bucket.items()] == list(specs)
        size = sum(weight.numel() * weight.element_size() for weight in bucket.values())
        assert size == sum(spec.num_bytes for spec in specs)
        assert size <= bucket_bytes or len(bucket) == 1
    names = [name for bucket in buckets for name in bucket]
    assert sorted(names) == sorted(expected)
    assert all(weight.equal(expected[name]) for bucket in buckets for name, weight in bucket.items())
    # Neighboring buckets would not fit into one: none is smaller than it needs to be.
    sizes = [sum(spec.num_bytes for spec in specs) for specs in stream.layout.buckets]
    firsts = [specs[0].num_bytes for specs in stream.layout.buckets]
    assert all(size + first > bucket_bytes for size, first in zip(sizes, firsts[1:], strict=False))


def test_floating_point_parameters_are_cast_and_buffers_are_not():
    policy = odd_policy()
    # A bias that chooses experts; in bf16 the two would be equal.
    policy.model.register_buffer("e_score_correction_bias", torch.tensor([4.0, 4.001]))
    weights = {name: weight for bucket in WeightStream(policy, torch.bfloat16) for name, weight in bucket.items()}
    assert weights.pop("steps").tolist() == [2**40 + 1, 5]
    assert weights.pop("e_score_correction_bias").equal(torch.tensor([4.0, 4.001]))
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert weights["model.norm.weight"].equal(policy.model.get_parameter("model.norm.weight").bfloat16())


@pytest.mark.parametrize(
    ("family", "kept"),
    [("ernie4_5_moe", "moe_statics.e_score_correction_bias"), ("afmoe", "mlp.expert_bias")],
)
def test_parameters_that_transformers_keeps_in_fp32_are_not_cast(family: str, kept: str):
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    buckets = WeightStream(Policy(model), torch.bfloat16).layout.buckets
    dtypes = {spec.name: spec.dtype for bucket in buckets for spec in bucket}
    assert {dtype for name, dtype in dtypes.items() if name.endswith(kept)} == {torch.float32}
    assert {dtypes[name] for name in dtypes if name.endswith(("q_proj.weight", "down_proj.weight"))} == {torch.bfloat16}


def test_a_bucket_is_a_copy_that_training_does_not_change():
    policy = odd_policy()
    (bucket,) = WeightStream(policy, FP32)
    before = {name: weight.clone() for name, weight in bucket.items()}
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(1)
    assert all(weight.equal(before[name]) for name, weight in bucket.items())


def test_adapters_are_merged_under_the_plain_models_names():
    plain = odd_policy()
    policy = Policy(copy.deepcopy(plain.model))
    add_adapters(policy.model, Lora(rank=2, alpha=6.0, targets=("*q_proj",)), seed=1)
    pairs: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora" in name:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
                pairs.setdefault(name.partition(".lora")[0], []).append(weight.detach())
    assert len(pairs) == 2
    expected = truth(plain)
    for layer, (down, up) in pairs.items():
        expected[f"{layer}.weight"] = expected[f"{layer}.weight"] + 3.0 * (up @ down)
    weights = {name: weight for bucket in WeightStream(policy, bucket_bytes=4000) for name, weight in bucket.items()}
    assert weights.keys() == expected.keys()
    assert all(weight.equal(expected[name]) for name, weight in weights.items())


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_loads_bucket_by_bucket_what_another_one_sends(tied: bool):
    source, target = odd_policy(tied), odd_policy(tied)
    with torch.no_grad():
        for weight in [*source.parameters(), source.model.get_buffer("steps")]:
            weight.mul_(2)
    stream = WeightStream(source, bucket_bytes=3000)
    check_weights(target, stream.layout.shapes)
    for bucket in stream:
        copy_weights(target, bucket)
    assert all(weight.equal(target.model.state_dict()[name]) for name, weight in source.model.state_dict().items())


def test_weights_that_do_not_fit_are_refused_and_none_is_copied():
    policy = odd_policy()
    before = {name: weight.clone() for name, weight in truth(policy).items()}
    state = {name: weight + 1 for name, weight in before.items()} | {"scale": torch.zeros(1)}
    with pytest.raises(ModelError, match=r"weight scale has shape \[1\], the model's \[\]"):
        load_full_state_dict(policy, state)
    assert all(weight.equal(before[name]) for name, weight in truth(policy).items())

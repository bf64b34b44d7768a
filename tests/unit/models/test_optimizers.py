import copy
import math

import pytest
import torch
from torch import Tensor, nn

from rlpack.config.sections.optimization import Optimizer
from rlpack.models.errors import ModelError
from rlpack.models.optimizers import build_optimizer, freeze, set_learning_rate, steps_taken
from tests.unit.models.tiny import tiny_model

SETTINGS = Optimizer(learning_rate=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95)


def model() -> nn.Module:
    return tiny_model("qwen2", dtype=torch.float32)  # whose embeddings are its head


def gradients(lm: nn.Module, seed: int) -> dict[str, Tensor]:
    """Set and return a gradient for every trainable weight."""
    generator = torch.Generator().manual_seed(seed)
    for weight in lm.parameters():
        if weight.requires_grad:
            weight.grad = torch.randn(weight.shape, generator=generator)
    return {name: weight.grad.clone() for name, weight in lm.named_parameters() if weight.grad is not None}


def steps(lm: nn.Module, settings: Optimizer, rates: tuple[float, ...]) -> list[dict[str, Tensor]]:
    """Take one step at each rate; return the gradients used."""
    optimizer, used = build_optimizer(lm, settings), []
    for number, rate in enumerate(rates):
        used.append(gradients(lm, number))
        set_learning_rate(optimizer, rate)
        optimizer.step()
    assert steps_taken(optimizer) == len(rates)
    return used


def adamw(weight: Tensor, used: list[Tensor], rates: tuple[float, ...], decay: float) -> Tensor:
    """Return a weight after AdamW's steps, by the paper's algorithm 2, in float64."""
    theta, mean, square = weight.double(), torch.zeros(()), torch.zeros(())
    for number, (gradient, rate) in enumerate(zip(used, rates, strict=True), start=1):
        gradient = gradient.double()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        direction = (mean / (1 - 0.9**number)) / ((square / (1 - 0.95**number)).sqrt() + 1e-8)
        theta = theta - rate * (direction + decay * theta)
    return theta


def decays(name: str, no_decay: tuple[str, ...]) -> bool:
    """Whether a weight of a Qwen 2 is decayed, by its name."""
    return not (name.endswith(".bias") or "norm" in name or name in no_decay)


@pytest.mark.parametrize("no_decay", [(), ("model.embed_tokens.weight",)])
def test_steps_are_adamw_with_decay_on_matrices_except_no_decay(no_decay: tuple[str, ...]):
    lm, rates = model(), (0.01, 0.004)
    before = {name: weight.detach().clone() for name, weight in lm.named_parameters()}
    used = steps(lm, SETTINGS.model_copy(update={"no_decay": no_decay}), rates)
    for name, weight in lm.named_parameters():
        decay = 0.1 if decays(name, no_decay) else 0.0
        expected = adamw(before[name], [gradient[name] for gradient in used], rates, decay)
        other = adamw(before[name], [gradient[name] for gradient in used], rates, 0.1 - decay)
        assert (weight - expected).norm() < 1e-6 * expected.norm(), name
        assert (weight - other).norm() > 1e-5 * expected.norm() or not before[name].any(), name


def test_stacked_biases_of_experts_are_not_decayed():
    lm = tiny_model("gpt_oss", dtype=torch.float32, num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    optimizer = build_optimizer(lm, SETTINGS)
    decay = {weight: group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    experts = {name: weight for name, weight in lm.named_parameters() if ".experts." in name}
    assert {name.rpartition(".")[2]: (weight.ndim, decay[weight]) for name, weight in experts.items()} == {
        "gate_up_proj": (3, 0.1),
        "gate_up_proj_bias": (2, 0.0),
        "down_proj": (3, 0.1),
        "down_proj_bias": (2, 0.0),
    }


@pytest.mark.usefixtures("eight_bit")
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_a_pipeline_stage_may_train_nothing(name: str):
    lm, settings = model().requires_grad_(False), SETTINGS.model_copy(update={"name": name})
    optimizer = build_optimizer(lm, settings)
    set_learning_rate(optimizer, 0.02)
    optimizer.step()
    assert steps_taken(optimizer) == 0
    assert not optimizer.state


@pytest.mark.usefixtures("eight_bit")
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_frozen_weights_never_change_and_have_no_gradient_or_state(name: str):
    lm = model()
    before = {name: weight.detach().clone() for name, weight in lm.named_parameters()}
    settings = SETTINGS.model_copy(update={"name": name, "freeze": ("model.layers.0.*", "lm_head.weight")})
    freeze(lm, settings)
    optimizer = build_optimizer(lm, settings)
    lm(torch.arange(12)[None]).logits.square().sum().backward()
    optimizer.step()
    frozen = {name for name in before if name.startswith("model.layers.0.") or "embed" in name}  # tied to the head
    assert 0 < len(frozen) < len(before)
    for name, weight in lm.named_parameters():
        assert torch.equal(weight, before[name]) == (name in frozen), name
        assert (weight.grad is None) == (name in frozen)
        assert (weight in optimizer.state) == (name not in frozen)


@pytest.mark.parametrize("frozen", [("*",), ("model.*", "lm_head.*")])
def test_freezing_everything_is_an_error(frozen: tuple[str, ...]):
    with pytest.raises(ModelError, match=r"critic\.optimizer\.freeze=.* freezes all weights"):
        freeze(model(), SETTINGS.model_copy(update={"freeze": frozen}), "critic.optimizer")


@pytest.mark.parametrize("key", ["freeze", "no_decay"])
def test_a_pattern_without_a_match_is_an_error_that_lists_the_nearest(key: str):
    with pytest.raises(
        ModelError, match=rf"actor\.optimizer\.{key} contains 'model\.layer\.0.*nearest are model\.layers"
    ):
        freeze(model(), SETTINGS.model_copy(update={key: ("model.layer.0.*",)}))


@pytest.mark.usefixtures("eight_bit")
def test_8_bit_moments_are_bytes_and_give_nearly_the_steps_of_32_bits():
    wide = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    rates = (0.01,) * 5
    exact, rough = wide, copy.deepcopy(wide)
    start = exact[0].weight.detach().clone()
    steps(exact, SETTINGS, rates)
    optimizer = build_optimizer(rough, SETTINGS.model_copy(update={"name": "adamw_8bit"}))
    assert torch.equal(rough[0].weight, start)  # making its state moved nothing
    assert steps_taken(optimizer) == 0
    for number, rate in enumerate(rates):
        gradients(rough, number)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    moved = (exact[0].weight - start).norm()
    assert (rough[0].weight - exact[0].weight).norm() < 0.1 * moved
    assert not torch.equal(rough[0].weight, exact[0].weight)
    moment = optimizer.state[rough[0].weight]["exp_avg"]
    assert moment.codes.dtype == torch.uint8
    assert optimizer.state[rough[0].bias]["exp_avg"].dtype == torch.float32


@pytest.mark.usefixtures("eight_bit")
def test_a_learning_rate_reaches_either_kind_of_optimizer():
    for name in ("adamw", "adamw_8bit"):
        optimizer = build_optimizer(nn.Linear(3, 2), SETTINGS.model_copy(update={"name": name}))
        for rate in (0.25, 0.125):
            set_learning_rate(optimizer, rate)
            assert [math.isclose(float(group["lr"]), rate) for group in optimizer.param_groups] == [True, True]

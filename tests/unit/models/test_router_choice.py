"""Replaced choices of routers have the weights that the routers' own scores give them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.family_configs import tiny_config
from rlpack.models.router_choice import FixedChoice, RouterChoice, router_modules, router_shape


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_replayed_experts_have_their_scores_also_outside_the_chosen_groups(method: str):
    config = tiny_config("deepseek_v2")
    config.topk_method, config.n_group, config.topk_group = method, 4, 2
    config.n_routed_experts = config.num_experts = 8
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shape = router_shape(model)
    assert shape is not None
    _, router = next(router_modules(model))
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, config.hidden_size, generator=generator)
    with torch.no_grad():
        router.get_parameter("weight").normal_(generator=generator)
    experts = torch.rand(40, 8, generator=generator).argsort(1)[:, : shape.top_k]
    with RouterChoice(shape, FixedChoice(torch.arange(40), experts)):
        logits, weights, chosen = router(states)
    assert torch.equal(chosen, experts)
    assert torch.equal(weights, logits.softmax(-1).gather(1, experts) * config.routed_scaling_factor)
    assert torch.autograd.grad(weights.sum(), [router.get_parameter("weight")])[0].abs().sum() > 0

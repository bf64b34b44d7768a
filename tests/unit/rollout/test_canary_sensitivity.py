"""Negative control of the canary: in fp32 a change of 1 % in any one parameter is seen, whatever its kind.

The models have wide weights, as trained ones have; `rlpack.rollout.canary` says what is seen in new ones.
"""

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpack.rollout.canary import TOLERANCES, canary_tokens, check_canary
from rlpack.rollout.errors import CanaryError
from rlpack.rollout.hf import HFEngine
from tests.unit.rollout.builders import VOCABULARY, decoder, plain_logprobs

CHANGE = 1e-2
CANARY = canary_tokens(VOCABULARY)
PROJECTIONS = tuple(f"self_attn.{name}_proj" for name in "qkvo")
MATRICES = ("embed_tokens.weight", *(f"{name}.weight" for name in PROJECTIONS))
MLP = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
BIASES = tuple(f"{name}.bias" for name in PROJECTIONS[:3])
NORMALIZED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")  # in qwen3, whose heads have norms
KINDS = {
    "qwen2": (*MATRICES, *MLP, *NORMS, *BIASES, "lm_head.weight"),
    "qwen2_tied": (*MATRICES, *MLP, *NORMS, *BIASES),  # the embedding is the head
    "qwen3": (*MATRICES, *MLP, *NORMS, "self_attn.q_norm.weight", "self_attn.k_norm.weight", "lm_head.weight"),
}


def scale(weight: Tensor) -> None:
    """Change all entries alike, which keeps all directions."""
    weight.mul_(1 + CHANGE)


def scatter(weight: Tensor) -> None:
    """Change each entry up or down at random."""
    signs = torch.randint(2, weight.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    weight.mul_(1 + CHANGE * signs)


CASES = [
    pytest.param(kind, part, change, id=f"{kind}-{part}-{change.__name__}")
    for kind, parts in KINDS.items()
    for part in parts
    for change in (scale, scatter)
    if not (kind == "qwen3" and change is scale and part in NORMALIZED)
]


@functools.cache
def policy(kind: str) -> PreTrainedModel:
    """Return a model without parameters that are all 0 or all 1, as new biases and norms are."""
    model = copy.deepcopy(decoder(kind))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.25)
    return model


@functools.cache
def trainer_scores(kind: str) -> Tensor:
    """Return the log-probs of the canary by definition, row by row; 0 for the first token."""
    rows = [
        plain_logprobs(policy(kind), row[:1].tolist(), row[1:].tolist()).gather(1, row[1:, None])[:, 0]
        for row in CANARY
    ]
    return torch.nn.functional.pad(torch.stack(rows), (1, 0)).float()


def changed(kind: str, part: str, change: Callable[[Tensor], None]) -> Iterator[PreTrainedModel]:
    """Yield a copy of the model for each parameter of a kind, with a change of this parameter alone."""
    for name, _ in policy(kind).named_parameters():
        if name.endswith(part):
            model = copy.deepcopy(policy(kind))
            with torch.no_grad():
                change(model.get_parameter(name))
            yield model


def canary_gap(model: PreTrainedModel, kind: str) -> float:
    scores = HFEngine(model).logprobs(CANARY)
    return check_canary(scores, trainer_scores(kind), CANARY, tolerance=TOLERANCES[torch.float32], version=1)


@pytest.mark.parametrize("kind", KINDS)
def test_unchanged_weights_pass_and_every_parameter_is_of_a_kind_of_the_table(kind: str):
    assert canary_gap(copy.deepcopy(policy(kind)), kind) < TOLERANCES[torch.float32].largest / 50
    names = [name for name, _ in policy(kind).named_parameters()]
    assert all(sum(name.endswith(part) for part in KINDS[kind]) == 1 for name in names)
    assert all(any(name.endswith(part) for name in names) for part in KINDS[kind])


@pytest.mark.parametrize(("kind", "part", "change"), CASES)
def test_one_percent_of_one_parameter_is_seen(kind: str, part: str, change: Callable[[Tensor], None]):
    for model in changed(kind, part, change):
        with pytest.raises(CanaryError, match="policy version 1 differ from the trainer's"):
            canary_gap(model, kind)


@pytest.mark.parametrize("part", NORMALIZED)
def test_a_scale_that_a_norm_removes_again_is_no_change(part: str):
    for model in changed("qwen3", part, scale):
        assert canary_gap(model, "qwen3") < 1e-4

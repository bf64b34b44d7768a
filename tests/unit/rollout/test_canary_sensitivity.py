"""Negative control of the canary: in fp32 a change of 1 % in any one parameter is seen, in new and in trained models.

What a norm removes again can't be seen, and is listed: `INVISIBLE`. tests/vllm/test_families.py does the same with
vLLM.
"""

import copy
import functools
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from rlpack.models.inputs import equal_rows
from rlpack.models.policy import Policy
from rlpack.rollout.canary import TOLERANCES, CanaryTolerance, calibrated, canary_tokens, check_canary
from rlpack.rollout.decoders import cache_name
from rlpack.rollout.errors import CanaryError
from rlpack.rollout.hf import HFEngine
from tests.vllm.engines import FAMILIES, VOCABULARY, causal_lm

CHANGE = 1e-2
CANARY = canary_tokens(VOCABULARY)
ANY_MODEL = TOLERANCES[torch.float32]
KINDS = [(family, tied) for family in FAMILIES if family != "mixtral" for tied in (True, False)]
# Training takes seconds; `make test-long` trains all.
TRAINED = KINDS if os.environ.get("RLPACK_CANARY") == "all" else [("qwen2", False), ("qwen3_moe", True)]
CASES = [(*kind, "new") for kind in KINDS] + [(*kind, "trained") for kind in TRAINED]
STEPS = {"new": 0, "trained": 100}
# A norm follows: the scale of these matrices doesn't matter, but for the norm's epsilon.
QUERIES_AND_KEYS = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
INVISIBLE = {
    "qwen3": QUERIES_AND_KEYS,
    "qwen3_moe": QUERIES_AND_KEYS,
    "gemma3_text": (
        *QUERIES_AND_KEYS,
        *("self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
    ),
}


@functools.cache
def policy(family: str, tied: bool, state: str) -> Policy:
    """Return a model as transformers initializes it, or one that has learned something since."""
    model = causal_lm(family, tied=tied, seed=3, initializer_range=0.02)
    generator = torch.Generator().manual_seed(0)
    followers = torch.randn(VOCABULARY, VOCABULARY, generator=generator).argsort(-1)[:, :4]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(STEPS[state]):
        tokens = torch.randint(VOCABULARY, (16, 1), generator=generator)
        while tokens.shape[1] < 12:
            choice = torch.randint(4, (16, 1), generator=generator)
            tokens = torch.cat([tokens, followers[tokens[:, -1:], choice]], 1)
        tokens = torch.cat([tokens, tokens], 1)  # copies, for which attention is needed
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    return Policy(model.eval())


@functools.cache
@torch.no_grad()
def expected(family: str, tied: bool, state: str) -> Tensor:
    """Return the trainer's log-probs of the canary."""
    found = policy(family, tied, state)(equal_rows(CANARY), temperature=1.0, entropy=False).logprobs
    return found.float().view(CANARY.shape)


@functools.cache
def tolerance(family: str, tied: bool, state: str) -> CanaryTolerance:
    """Return the bounds that a run has after it has published this model."""
    scores = HFEngine(copy.deepcopy(policy(family, tied, state).model)).logprobs(CANARY)
    check_canary(scores, expected(family, tied, state), CANARY, tolerance=ANY_MODEL, version=1)
    return calibrated(ANY_MODEL, scores, expected(family, tied, state))


@torch.no_grad()
def changes(weight: Tensor) -> Iterator[str]:
    """Change a weight by 1 % in two ways, one after the other, and restore it; a weight that is 0 has no share."""
    before = weight.clone()
    if not before.any():
        return
    signs = torch.randint(2, weight.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for name, factor in (("scale", 1 + CHANGE), ("scatter", 1 + CHANGE * signs)):
        weight.copy_(before * factor)
        yield name
        weight.copy_(before)


@pytest.mark.parametrize(("family", "tied", "state"), CASES)
def test_one_percent_of_one_tensor_is_seen_whatever_its_kind(family: str, tied: bool, state: str):
    case = (family, tied, state)
    engine = HFEngine(copy.deepcopy(policy(*case).model))
    unseen = []
    for name, weight in engine._model.named_parameters():
        for how in changes(weight):
            try:
                check_canary(engine.logprobs(CANARY), expected(*case), CANARY, tolerance=tolerance(*case), version=2)
            except CanaryError:
                continue
            unseen.append((name, how))
    allowed = INVISIBLE.get(family, ())
    assert [one for one in unseen if one[1] == "scatter" or not one[0].endswith(allowed)] == []
    queries = [one for one in unseen if one[0].endswith(QUERIES_AND_KEYS)]
    assert bool(queries) == (family in INVISIBLE), "the table lists what can be seen"
    check_canary(engine.logprobs(CANARY), expected(*case), CANARY, tolerance=tolerance(*case), version=3)


def test_rounding_passes_the_bounds_of_the_first_publication_while_a_model_learns():
    """The bounds are those of the new model; each later state is another model with more rounding."""
    for family, tied in TRAINED:
        here = tolerance(family, tied, "new")
        later = policy(family, tied, "trained")
        scores = HFEngine(copy.deepcopy(later.model)).logprobs(CANARY)
        gap = check_canary(scores, expected(family, tied, "trained"), CANARY, tolerance=here, version=2)
        assert gap < here.limits(expected(family, tied, "trained")[:, 1:].std().item())[0] / 4


@torch.no_grad()
@pytest.mark.parametrize("rounds_at", ["8 rows", "token by token"])
def test_rounding_of_a_deep_new_model_is_far_below_the_least_bounds(rounds_at: str):
    """Correct computations with products of other shapes, for an engine whose first publication had no difference."""
    model = causal_lm("qwen2", tied=False, seed=3, initializer_range=0.02, num_hidden_layers=36).eval()
    trainers = Policy(model)(equal_rows(CANARY), temperature=1.0, entropy=False).logprobs.float().view(CANARY.shape)
    if rounds_at == "8 rows":
        logits = model(input_ids=CANARY.repeat(8, 1), use_cache=False).logits[:1]
    else:
        cache = DynamicCache()
        arguments = {cache_name(model): cache, "use_cache": True}
        parts = [model(input_ids=token, **arguments).logits for token in CANARY.split(1, 1)]
        logits = torch.cat(parts, 1)
    found = logits[:, :-1].log_softmax(-1).gather(2, CANARY[:, 1:, None])[..., 0]
    scores = torch.nn.functional.pad(found, (1, 0))
    if scores.equal(trainers):
        pytest.skip("this CPU computes the same products for one row as for eight")
    narrowest = calibrated(ANY_MODEL, trainers, trainers)
    halved = narrowest._replace(floor=narrowest.floor / 2, share=narrowest.share / 2)
    check_canary(scores, trainers, CANARY, tolerance=halved, version=2)

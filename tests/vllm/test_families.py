"""What vLLM computes is what the trainer computes, for each kind of model: log-probs, and weights after each update."""

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.canary import TOLERANCES, calibrated, check_canary
from rlpack.rollout.errors import CanaryError
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from tests.unit.rollout.test_canary_sensitivity import INVISIBLE, changes
from tests.vllm.engines import (
    CANARY,
    FAMILIES,
    TOLERANCE,
    adapted,
    causal_lm,
    gap,
    largest_gap,
    perturb,
    policy,
    reference,
    send,
    start,
    train_adapters,
)

# Each family once; `make test-vllm-long` runs both kinds of output layer for each.
MODELS = [(family, number % 2 == 0) for number, family in enumerate(FAMILIES)]
if os.environ.get("RLPACK_FAMILIES") == "all":
    MODELS = [(family, tied) for family in FAMILIES for tied in (True, False)]


class Pair(NamedTuple):
    """One model on both sides, with the same weights."""

    engine: VLLMEngine
    policy: Policy


@pytest.fixture(
    scope="module",
    params=[pytest.param(model, id=f"{model[0]}-{'tied' if model[1] else 'untied'}") for model in MODELS],
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    family, tied = request.param
    engine, built = start(family, tied=tied), policy(family, tied=tied)
    try:
        send(engine, built)
        engine.policy_version = 1
        yield Pair(engine, built)
    finally:
        engine.close()


def test_the_log_probs_of_sampled_tokens_are_the_trainers(pair: Pair):
    assert largest_gap(pair.engine, pair.policy) <= TOLERANCE


def test_the_log_probs_with_merged_adapters_are_the_trainers(pair: Pair):
    config = pair.policy.model.config
    built = adapted(config.model_type, tied=config.tie_word_embeddings)
    send(pair.engine, built)
    before = reference(built, CANARY)
    train_adapters(built, seed=5)
    assert (reference(built, CANARY) - before).abs().max() > 100 * TOLERANCE
    send(pair.engine, built)
    assert largest_gap(pair.engine, built) <= TOLERANCE
    send(pair.engine, pair.policy)


def test_after_every_update_of_all_weights_the_canary_is_the_trainers(pair: Pair):
    for seed in range(3):
        before = gap(pair.engine, pair.policy)
        perturb(pair.policy, seed, 0.02)
        assert before <= TOLERANCE < gap(pair.engine, pair.policy)
        send(pair.engine, pair.policy, bucket_bytes=(10_000, 100_000, 10**9)[seed])
        assert gap(pair.engine, pair.policy) <= TOLERANCE


def test_one_percent_of_one_tensor_of_a_new_model_is_seen_once_the_first_publication_was_measured(pair: Pair):
    config = pair.policy.model.config
    family, tied = config.model_type, config.tie_word_embeddings
    built = Policy(causal_lm(family, tied=tied, seed=5, initializer_range=0.02))
    expected = reference(built, CANARY)
    send(pair.engine, built)
    scores, anywhere = pair.engine.logprobs(CANARY), TOLERANCES[torch.float32]
    check_canary(scores, expected, CANARY, tolerance=anywhere, version=1)
    tolerance, unseen = calibrated(anywhere, scores, expected), []
    for name, weight in built.model.named_parameters():
        for how in changes(weight):
            send(pair.engine, built, bucket_bytes=10**9)
            try:
                check_canary(pair.engine.logprobs(CANARY), expected, CANARY, tolerance=tolerance, version=2)
            except CanaryError:
                continue
            unseen.append((name, how))
    allowed = INVISIBLE.get(family, ())
    assert [one for one in unseen if one[1] == "scatter" or not one[0].endswith(allowed)] == []
    send(pair.engine, built)
    check_canary(pair.engine.logprobs(CANARY), expected, CANARY, tolerance=tolerance, version=3)
    send(pair.engine, pair.policy)


def kind_of(name: str) -> str:
    """Return a weight's name without the number of its layer."""
    return ".".join(part for part in name.split(".") if not part.isdecimal())


@torch.no_grad()
def change(built: Policy, kind: str, scale: float = 0.1) -> None:
    """Change all weights of a kind by a share of their size or of 1, in random directions."""
    generator = torch.Generator().manual_seed(7)
    for name, weight in built.model.named_parameters():
        if kind_of(name) == kind:
            size = max(weight.abs().mean().item(), 0.1 if weight.ndim == 1 else 0.0)
            weight.add_(torch.randn(weight.shape, generator=generator) * scale * 3 * size)


def test_a_change_of_each_kind_of_weight_alone_arrives_and_is_seen_if_it_does_not(pair: Pair):
    """The negative control: until the changed kind is sent, the canary differs by far more than its tolerance."""
    kinds = dict.fromkeys(kind_of(name) for name, _ in pair.policy.model.named_parameters())
    assert len(kinds) >= 9
    for kind in kinds:
        change(pair.policy, kind)
        assert gap(pair.engine, pair.policy) > 10 * TOLERANCE, kind
        send(pair.engine, pair.policy)
        assert gap(pair.engine, pair.policy) <= TOLERANCE, kind


def test_a_kind_of_weight_that_arrives_unchanged_is_seen(pair: Pair):
    """The sender takes one kind from an older state, as one that forgot a kind would."""
    kinds = dict.fromkeys(kind_of(name) for name, _ in pair.policy.model.named_parameters())
    stream = WeightStream(pair.policy, torch.float32)
    older = dict(item for bucket in stream for item in bucket.items())
    perturb(pair.policy, 11, 0.05)
    for kind in list(kinds)[:: max(1, len(kinds) // 3)]:
        send_with(pair.engine, pair.policy, lambda name, kind=kind: kind_of(name) == kind, older)
        assert gap(pair.engine, pair.policy) > 10 * TOLERANCE, kind
    send(pair.engine, pair.policy)
    assert gap(pair.engine, pair.policy) <= TOLERANCE


def send_with(
    engine: VLLMEngine, built: Policy, is_older: Callable[[str], bool], older: dict[str, torch.Tensor]
) -> None:
    """Send all weights, some of them from an older state."""
    stream = WeightStream(built, torch.float32)
    engine.check_weights(stream.layout)
    for bucket in stream:
        engine.load_bucket({name: older[name] if is_older(name) else weight for name, weight in bucket.items()})
    engine.finish_update()

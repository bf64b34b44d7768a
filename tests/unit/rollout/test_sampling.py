import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from rlpack.rollout.errors import EngineError, SamplingError
from rlpack.rollout.sampling import filtered_logprobs, sample, uniforms
from rlpack.rollout.types import SamplingParams

# Quarters: float32 distinguishes the probabilities of any two logits.
logit_rows = st.lists(st.integers(-32, 32).map(lambda n: n / 4), min_size=2, max_size=12, unique=True)


def filtered_by_hand(logits, params):
    """Top-k, then the nucleus of the remaining tokens, one token at a time."""
    weights = [math.exp(x / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = order[: params.top_k] if params.top_k else order
    total, mass, nucleus = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if mass / total >= params.top_p:
            break
        nucleus.append(i)
        mass += weights[i]
    return {i: weights[i] / mass for i in nucleus}


@given(logits=logit_rows, top_k=st.integers(0, 14), top_p=st.floats(0.05, 1), temperature=st.sampled_from([0.5, 1, 2]))
@settings(max_examples=150, deadline=None)
def test_filters_keep_and_renormalize_the_tokens_that_a_loop_keeps(logits, top_k, top_p, temperature):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = filtered_by_hand(logits, params)
    probabilities = filtered_logprobs(torch.tensor([logits]), params)[0].exp()
    if top_p < 1:  # a mass within rounding of top_p may go either way
        weights = torch.tensor(sorted(filtered_by_hand(logits, SamplingParams(temperature, 1.0, top_k)).values()))
        if ((weights.flip(0).cumsum(0) - top_p).abs() < 1e-5).any():
            return
    assert probabilities.nonzero().flatten().tolist() == sorted(i for i in expected if probabilities[i] > 0)
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-5)
    for i, probability in expected.items():
        assert probabilities[i].item() == pytest.approx(probability, rel=1e-3, abs=1e-6)


@given(
    logits=st.lists(st.integers(-2, 2).map(float), min_size=2, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.one_of(st.floats(0.05, 1), st.just(1.0)),
)
@settings(max_examples=100, deadline=None)
def test_filters_keep_as_many_tokens_of_each_logit_as_transformers_with_tied_logits(logits, top_k, top_p):
    scores = torch.tensor([logits])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    masses = scores.softmax(-1).sort(descending=True).values.cumsum(-1)
    if top_p < 1 and ((masses - top_p).abs() < 1e-5).any():  # a mass within rounding of top_p may go either way
        return
    expected = TopPLogitsWarper(top_p)(None, scores).log_softmax(-1) if top_p < 1 else scores.log_softmax(-1)
    kept = filtered_logprobs(torch.tensor([logits]), SamplingParams(top_k=top_k, top_p=top_p))
    torch.testing.assert_close(kept.sort().values, expected.sort().values)


def test_worked_example_of_top_k_and_top_p():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    top_k = filtered_logprobs(logits, SamplingParams(top_k=2)).exp()
    torch.testing.assert_close(top_k, torch.tensor([[4 / 7, 3 / 7, 0, 0]]))
    top_p = filtered_logprobs(logits, SamplingParams(top_p=0.75)).exp()
    torch.testing.assert_close(top_p, torch.tensor([[4 / 9, 3 / 9, 2 / 9, 0]]))
    # top-k first: of {0.4, 0.3, 0.2} renormalized the nucleus of 0.5 is {4/9, 3/9}
    both = filtered_logprobs(logits, SamplingParams(top_k=3, top_p=0.5)).exp()
    torch.testing.assert_close(both, torch.tensor([[4 / 7, 3 / 7, 0, 0]]))


def test_frequencies_follow_the_exact_distribution():
    params = SamplingParams(temperature=0.7, top_k=6, top_p=0.95)
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(0))
    draws = 40_000
    numbers = uniforms(np.arange(draws) * 0x5851F42D4C957F2D, position=3)
    tokens, logprobs = sample(logits.expand(draws, -1), params, numbers)
    probabilities = torch.tensor([filtered_by_hand(logits[0].tolist(), params).get(i, 0.0) for i in range(10)])
    counts = torch.bincount(tokens, minlength=10)
    assert (counts[probabilities == 0] == 0).all()
    expected = probabilities * draws
    seen = probabilities > 0
    chi_square = ((counts - expected)[seen] ** 2 / expected[seen]).sum().item()
    assert chi_square < 30  # at most 5 degrees of freedom: passed by chance with probability 1 - 2e-5
    torch.testing.assert_close(logprobs, probabilities[tokens].log())


def test_uniform_numbers_are_uniform_along_a_stream_and_over_streams():
    stream = np.array([uniforms(np.array([42], dtype=np.uint64), t)[0] for t in range(4000)])
    across = uniforms(np.random.default_rng(0).integers(0, 2**63, 4000).astype(np.uint64), 0)
    for numbers in (stream, across):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 50  # 19 degrees of freedom: 1.3e-4
    assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 0.06


def test_uniform_numbers_are_those_of_splitmix64():
    # The generator's published first outputs for seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    numbers = [uniforms(np.array([1234567], dtype=np.uint64), t)[0] for t in range(4)]
    assert numbers == [(output >> 11) * 2.0**-53 for output in published]


def test_signed_seeds_are_read_by_their_bits():
    assert uniforms(np.array([-1]), 0) == uniforms(np.array([2**64 - 1], dtype=np.uint64), 0)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
def test_a_token_of_probability_0_is_never_sampled_even_at_the_ends(number):
    logits = torch.tensor([[-torch.inf, 1.0, 0.3, -torch.inf, -torch.inf]])
    token, logprob = sample(logits, SamplingParams(), np.array([number]))
    assert token.item() in (1, 2)
    assert logprob.isfinite().all()


def test_large_vocabularies_are_sampled_in_chunks_with_the_same_result(monkeypatch):
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(2))
    numbers = uniforms(np.arange(7), 0)
    whole = sample(logits, SamplingParams(), numbers)
    monkeypatch.setattr("rlpack.rollout.sampling._MAX_ENTRIES", 25)
    chunked = sample(logits, SamplingParams(), numbers)
    assert whole[0].equal(chunked[0])
    assert whole[1].equal(chunked[1])


@pytest.mark.parametrize("vocabulary", [255, 256, 257, 384, 1000])
def test_tokens_of_a_large_vocabulary_invert_the_cumulative_distribution(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(4, vocabulary, generator=generator)
    params = SamplingParams(temperature=1.5, top_k=vocabulary // 2)
    cumulative = (logits.double() / 1.5).masked_fill(logits < logits.topk(params.top_k).values[:, -1:], -torch.inf)
    cumulative = cumulative.softmax(-1).cumsum(-1).numpy()
    seen = set()
    for number in np.linspace(0, 1, 400, endpoint=False):
        tokens, logprobs = sample(logits, params, np.full(4, number))
        for row, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
            below = cumulative[row, token - 1] if token else 0.0
            # float32 probabilities move the borders between tokens by about 1e-7
            assert below - 1e-6 <= number <= cumulative[row, token] + 1e-6
            assert cumulative[row, token] > below
            assert logprob == pytest.approx(math.log(cumulative[row, token] - below), abs=1e-4)
            seen.add(token)
    assert len(seen) > 50


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("allowed", [[0], [127], [128], [999], [200, 700]])
def test_the_ends_of_a_large_vocabulary_sample_tokens_of_positive_probability(number, allowed):
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, allowed] = torch.arange(1.0, len(allowed) + 1)
    token, logprob = sample(logits, SamplingParams(), np.array([number]))
    assert token.item() == (allowed[0] if number == 0 else allowed[-1])
    assert logprob.isfinite().all()


def test_greedy_selects_the_most_likely_token_with_log_prob_0():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0]])
    tokens, logprobs = sample(logits, SamplingParams(temperature=0.0), np.zeros(2))
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(temperature):
    logits = torch.zeros(3, 4)
    logits[1] = float("nan")
    with pytest.raises(EngineError, match="running row 1"):
        sample(logits, SamplingParams(temperature=temperature), np.zeros(3))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("max_new_tokens", 0),
        ("stop_token_ids", (3, -1)),
    ],
)
def test_parameters_outside_their_range_are_refused_by_key(name, value):
    with pytest.raises(SamplingError, match=f"rollout.{name}"):
        SamplingParams(**{name: value})

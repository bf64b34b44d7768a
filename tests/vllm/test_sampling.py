"""What a row samples: its tokens depend on its seed alone, and are drawn with the probabilities of their log-probs."""

import math
import os

import numpy as np
import pytest
import torch

from rlpack.batch.ragged import Ragged
from rlpack.models.policy import Policy
from rlpack.rollout.errors import SamplingError
from rlpack.rollout.hf import HFEngine
from rlpack.rollout.sampling import filtered_logprobs
from rlpack.rollout.types import Generations, SamplingParams
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from tests.vllm.engines import MAX_LENGTH, TOLERANCE, VOCABULARY, policy, prompts_of, row_logits, sampled, send

# Of each setting: 200,000 in all.
DRAWS = int(os.environ.get("RLPACK_DRAWS", "40000"))
# The χ² statistic of a correct sampler exceeds it once in a million runs.
RARITY = 1e-6
PARAMS = SamplingParams(max_new_tokens=30, temperature=1.0)


@pytest.fixture(scope="module")
def built(shared_engine: VLLMEngine) -> Policy:
    """Return the policy whose weights the engine has as version 7."""
    made = policy("qwen2", tied=False, seed=5)
    send(shared_engine, made)
    shared_engine.policy_version = 7
    return made


def rows_of(made: Generations) -> list[tuple[list[int], list[float]]]:
    pairs = zip(made.token_ids.rows(), made.logprobs.rows(), strict=True)
    return [(tokens.tolist(), logprobs.tolist()) for tokens, logprobs in pairs]


def test_a_row_is_the_same_alone_in_any_order_and_among_any_neighbours(shared_engine: VLLMEngine, built: Policy):
    """Bit for bit, log-probs included; a seed is 64 bits wide."""
    prompts = prompts_of(*range(1, 25))
    seeds = np.random.default_rng(1).integers(2**64, size=24, dtype=np.uint64)
    together = rows_of(sampled(shared_engine, prompts, PARAMS, seeds))
    assert rows_of(sampled(shared_engine, prompts, PARAMS, seeds)) == together
    for row in (0, 9, 23):
        index = torch.tensor([row])
        assert rows_of(sampled(shared_engine, prompts.select(index), PARAMS, seeds[[row]])) == [together[row]]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    shuffled = rows_of(sampled(shared_engine, prompts.select(order), PARAMS, seeds[order.numpy()]))
    assert shuffled == [together[row] for row in order.tolist()]
    others = Ragged.concat([prompts_of(*[50] * 40, seed=9), prompts])
    more = np.concatenate([np.arange(40, dtype=np.uint64), seeds])
    assert rows_of(sampled(shared_engine, others, PARAMS, more))[40:] == together


def test_other_seeds_sample_other_tokens(shared_engine: VLLMEngine, built: Policy):
    prompts = prompts_of(8).select(torch.zeros(16, dtype=torch.int64))
    rows = rows_of(sampled(shared_engine, prompts, PARAMS))
    assert len({tuple(tokens) for tokens, _ in rows}) == 16
    same = rows_of(sampled(shared_engine, prompts, PARAMS, np.full(16, 3)))
    assert same == [rows[3]] * 16


def test_a_shared_prefix_that_is_cached_changes_no_row(shared_engine: VLLMEngine, built: Policy):
    """Blocks have 32 tokens: prompts of 70 share two of them once they are cached."""
    first, second = prompts_of(70, 70, seed=4).rows()
    prompts = Ragged.from_rows(
        [torch.cat([first[:64], tail]) for tail in (first[64:], second[64:], first[:3])], torch.int64
    )
    seeds = np.array([5, 6, 7])
    fresh = []
    for row in range(3):
        shared_engine._control(shared_engine._engine.reset_prefix_cache(), "reset")
        fresh += rows_of(sampled(shared_engine, prompts.select(torch.tensor([row])), PARAMS, seeds[[row]]))
    assert rows_of(sampled(shared_engine, prompts, PARAMS, seeds)) == fresh
    assert rows_of(sampled(shared_engine, prompts, PARAMS, seeds)) == fresh


def test_a_prefix_that_older_weights_computed_is_never_used(shared_engine: VLLMEngine, built: Policy):
    prompts, seeds = prompts_of(90, seed=6), np.array([1])
    before = rows_of(sampled(shared_engine, prompts, PARAMS, seeds))
    other = policy("qwen2", tied=False, seed=6)
    send(shared_engine, other)
    changed = rows_of(sampled(shared_engine, prompts, PARAMS, seeds))
    send(shared_engine, built)
    assert changed != before
    assert rows_of(sampled(shared_engine, prompts, PARAMS, seeds)) == before


def test_every_token_has_the_version_that_sampled_it(shared_engine: VLLMEngine, built: Policy):
    made = sampled(shared_engine, prompts_of(3, 4), PARAMS)
    assert made.policy_versions.values.tolist() == [7] * 60
    try:
        shared_engine.policy_version = 12
        made = sampled(shared_engine, prompts_of(3), PARAMS)
        assert made.policy_versions.values.tolist() == [12] * 30
    finally:
        shared_engine.policy_version = 7


def test_greedy_rows_take_the_most_probable_token_whatever_their_seed_with_a_log_prob_of_0(
    shared_engine: VLLMEngine, built: Policy
):
    prompts, params = prompts_of(4, 9, 30), SamplingParams(max_new_tokens=20, temperature=0.0)
    made = sampled(shared_engine, prompts, params)
    assert rows_of(made) == rows_of(sampled(shared_engine, prompts, params, np.array([9, 8, 7])))
    assert not made.logprobs.values.any()
    for prompt, tokens in zip(prompts.rows(), made.token_ids.rows(), strict=True):
        logits = row_logits(built, torch.cat([prompt, tokens]))[len(prompt) - 1 : -1]
        assert tokens.tolist() == logits.argmax(-1).tolist()


def test_a_stop_token_ends_its_row_and_is_part_of_it(shared_engine: VLLMEngine, built: Policy):
    """A row with stop tokens is the row without, up to the first of them; the model's own end is no stop token."""
    prompts, stops = prompts_of(*[5] * 32), (10, 20, 30)
    whole = rows_of(sampled(shared_engine, prompts, PARAMS))
    params = SamplingParams(max_new_tokens=30, stop_token_ids=stops)
    made = sampled(shared_engine, prompts, params)
    assert set(made.finish_reasons) == {"stop", "length"}
    for (tokens, logprobs), full, reason in zip(rows_of(made), whole, made.finish_reasons, strict=True):
        end = next((index + 1 for index, token in enumerate(full[0]) if token in stops), 30)
        assert (tokens, logprobs) == (full[0][:end], full[1][:end])
        assert reason == ("stop" if tokens[-1] in stops else "length")


def test_the_longest_row_fits_and_one_token_more_is_refused(shared_engine: VLLMEngine, built: Policy):
    params = SamplingParams(max_new_tokens=28)
    made = sampled(shared_engine, prompts_of(MAX_LENGTH - 28), params)
    assert made.token_ids.lengths.tolist() == [28]
    with pytest.raises(SamplingError, match="prompt 1 has 101 tokens; with 28 new ones that is over the engine's 128"):
        sampled(shared_engine, prompts_of(3, MAX_LENGTH - 27), params)
    with pytest.raises(SamplingError, match="prompt 0 is empty"):
        sampled(shared_engine, Ragged.from_rows([torch.zeros(0, dtype=torch.int64)], torch.int64), params)


@torch.no_grad()
def with_ties() -> Policy:
    """Return a policy whose logits have ties: tokens 3 to 8 have the same output weights, and the largest logits."""
    made = policy("qwen2", tied=False, seed=5)
    prompt = next(iter(prompts_of(12).rows()))
    largest = int(row_logits(made, prompt)[-1].argmax())
    made.model.lm_head.weight[3:9] = 1.1 * made.model.lm_head.weight[largest]
    return made


def exact(built: Policy, prompt: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the probability of each token after a prompt, f64 [V], in double precision."""
    logits = row_logits(built, prompt)[-1:]
    return filtered_logprobs(logits, params)[0].double().exp()


def border_of(built: Policy, prompt: torch.Tensor) -> float:
    """Return a mass just above that of the five most probable tokens: a sixth is needed to reach it."""
    ordered = row_logits(built, prompt)[-1].double().softmax(-1).sort(descending=True).values.cumsum(-1)
    return float(ordered[4]) + 1e-5


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Return the probability that χ² with this freedom exceeds the statistic."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2.0).double()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plain", "temperature", "top-k", "top-k with ties", "top-p at a border", "top-k, then top-p"]
)
def test_both_engines_draw_from_the_exact_distribution(shared_engine: VLLMEngine, built: Policy, name: str):
    """χ² of the draws of each engine: one new token for each of as many rows with one prompt and seeds of their own."""
    prompt = next(iter(prompts_of(12).rows()))
    model = with_ties() if name == "top-k with ties" else built
    send(shared_engine, model)
    params = {
        "plain": SamplingParams(max_new_tokens=1),
        "temperature": SamplingParams(max_new_tokens=1, temperature=0.7),
        "top-k": SamplingParams(max_new_tokens=1, top_k=7, temperature=1.3),
        "top-k with ties": SamplingParams(max_new_tokens=1, top_k=4),
        "top-p at a border": SamplingParams(max_new_tokens=1, top_p=border_of(model, prompt)),
        # Of the ten most probable tokens alone, those that make up 70 %.
        "top-k, then top-p": SamplingParams(max_new_tokens=1, temperature=0.8, top_k=10, top_p=0.7),
    }[name]
    probabilities = exact(model, prompt, params)
    candidates = int((probabilities > 0).sum())
    assert {
        "plain": VOCABULARY,
        "temperature": VOCABULARY,
        "top-k": 7,
        "top-k with ties": 6,
        "top-p at a border": 6,
    }.get(name, candidates) == candidates
    if name == "top-k, then top-p":  # the other order would keep more
        nucleus = exact(model, prompt, SamplingParams(temperature=0.8, top_p=0.7)) > 0
        assert 1 < candidates < min(10, int(nucleus.sum()))
    seeds = np.random.default_rng(8).integers(2**64, size=DRAWS, dtype=np.uint64)
    for engine in (shared_engine, HFEngine(model.model)):
        counts = torch.zeros(VOCABULARY, dtype=torch.int64)
        for part in np.array_split(seeds, max(1, DRAWS // 4000)):
            prompts = Ragged.from_rows([prompt] * len(part), torch.int64)
            counts += engine.generate(prompts, params, part).token_ids.values.bincount(minlength=VOCABULARY)
        assert int(counts.sum()) == DRAWS
        assert not counts[probabilities == 0].any(), name
        expected = probabilities * DRAWS
        # Tokens that are drawn less than five times in the mean count as one.
        rare = (expected < 5) & (expected > 0)
        cells = [*zip(counts[expected >= 5].tolist(), expected[expected >= 5].tolist(), strict=True)]
        if rare.any():
            cells.append((int(counts[rare].sum()), float(expected[rare].sum())))
        statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
        assert chi_square_tail(statistic, len(cells) - 1) > RARITY, (name, type(engine).__name__, statistic, len(cells))


def test_a_nucleus_that_ends_among_ties_has_no_token_more_than_it_needs(shared_engine: VLLMEngine, built: Policy):
    """Six tokens tie for the largest logit; three and a half of them would do, so any four of them are kept."""
    prompt = next(iter(prompts_of(12).rows()))
    model = with_ties()
    send(shared_engine, model)
    largest = row_logits(model, prompt)[-1].double().softmax(-1).sort(descending=True).values[:7]
    assert largest[0] - largest[5] < 1e-6 < largest[5] - largest[6]
    params = SamplingParams(max_new_tokens=1, top_p=3.5 * float(largest[0]))
    seeds = np.random.default_rng(9).integers(2**64, size=400, dtype=np.uint64)
    try:
        for engine in (shared_engine, HFEngine(model.model)):
            made = engine.generate(Ragged.from_rows([prompt] * 400, torch.int64), params, seeds)
            assert set(made.token_ids.values.tolist()) <= set(range(3, 9))
            assert (made.logprobs.values + math.log(4)).abs().max() < TOLERANCE
    finally:
        send(shared_engine, built)

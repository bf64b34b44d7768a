import copy
import itertools
import json

import numpy as np
import pytest
import torch

from rlpack.batch.ragged import Ragged
from rlpack.batch.weight_layout import TensorSpec, WeightLayout
from rlpack.rollout import decoding
from rlpack.rollout.decoding import DECODERS
from rlpack.rollout.errors import EngineError, SamplingError
from rlpack.rollout.hf import HFEngine
from rlpack.rollout.types import SamplingParams
from rlpack.spans import recorded_spans
from tests.unit.rollout.builders import VOCABULARY, decoder, plain_logprobs

KINDS = ["qwen2", "qwen2_tied", "qwen2_sliding", "qwen3", "gemma3"]


def prompts_of(count, longest=9, seed=0):
    """Prompts of 1 to `longest` tokens; the padding id 0 is among their tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def seeds_of(count, seed=7):
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def generate(prompts, params, seeds=None, kind="qwen2", **options):
    engine = HFEngine(decoder(kind), **options)
    return engine.generate(
        Ragged.from_rows(prompts, torch.int64), params, seeds_of(len(prompts)) if seeds is None else seeds
    )


def load(engine, state):
    """Send a state to an engine in buckets of two tensors."""
    specs = [TensorSpec(name, tuple(weight.shape), weight.dtype) for name, weight in state.items()]
    layout = WeightLayout(tuple(tuple(specs[at : at + 2]) for at in range(0, len(specs), 2)))
    engine.check_weights(layout)
    for bucket in layout.buckets:
        engine.load_bucket({spec.name: state[spec.name] for spec in bucket})
    engine.finish_update()


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_prompt_is_scored_as_by_a_plain_forward(kind):
    tokens = torch.randint(VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(1))
    scores = HFEngine(decoder(kind)).logprobs(tokens)
    assert (scores.shape, scores.dtype) == ((3, 11), torch.float32)
    assert scores[:, 0].tolist() == [0, 0, 0]
    for row, own in zip(tokens, scores, strict=True):
        expected = plain_logprobs(decoder(kind), row[:1].tolist(), row[1:].tolist()).gather(1, row[1:, None])[:, 0]
        torch.testing.assert_close(own[1:].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_a_plain_forward_of_each_row_alone(kind):
    prompts = [*prompts_of(7), [5], [5, 6, 7] * 6]
    params = SamplingParams(temperature=1.5, max_new_tokens=12, stop_token_ids=(1, 2))
    responses = generate(prompts, params, kind=kind)
    for prompt, response, logprobs in zip(prompts, responses.token_ids.rows(), responses.logprobs.rows(), strict=True):
        expected = plain_logprobs(decoder(kind), prompt, response.tolist(), temperature=1.5)
        expected = expected.gather(1, response[:, None]).squeeze(1)
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_known_layers_run_directly_and_others_with_prepared_masks(kind, monkeypatch):
    assert HFEngine(decoder(kind)).decoder_name == "DirectDecoder"
    monkeypatch.setattr(decoding, "unknown_part", lambda _: "anything")
    assert HFEngine(decoder(kind)).decoder_name == "PreparedMaskDecoder"


@pytest.mark.parametrize("way", DECODERS)
def test_every_decoder_gives_the_logprobs_of_a_plain_forward(way, monkeypatch):
    monkeypatch.setattr(decoding, "DECODERS", (way,))
    prompts = prompts_of(6)
    for kind in ("qwen2", "qwen2_sliding"):
        engine = HFEngine(decoder(kind))
        assert engine.decoder_name == way.__name__
        column = Ragged.from_rows(prompts, torch.int64)
        responses = engine.generate(column, SamplingParams(max_new_tokens=30, stop_token_ids=(1,)), seeds_of(6))
        for prompt, tokens, own in zip(prompts, responses.token_ids.rows(), responses.logprobs.rows(), strict=True):
            expected = plain_logprobs(decoder(kind), prompt, tokens.tolist()).gather(1, tokens[:, None]).squeeze(1)
            torch.testing.assert_close(own.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_sliding"])
def test_a_row_gets_the_same_tokens_alone_and_among_any_neighbours(kind):
    prompts, seeds = prompts_of(8), seeds_of(8)
    params = SamplingParams(max_new_tokens=8, stop_token_ids=(3,), top_p=0.9)
    together = generate(prompts, params, seeds, kind=kind)
    for options in ({"max_num_seqs": 5}, {"max_num_seqs": 1}, {"pad_token_id": 9}):
        again = generate(prompts, params, seeds, kind=kind, **options)
        assert [row.tolist() for row in again.token_ids.rows()] == [row.tolist() for row in together.token_ids.rows()]
        torch.testing.assert_close(again.logprobs.values, together.logprobs.values, rtol=1e-4, atol=1e-4)
    order = np.random.default_rng(1).permutation(8)
    shuffled = generate([prompts[i] for i in order], params, seeds[order], kind=kind)
    for place, row in enumerate(order):
        assert shuffled.token_ids[place].tolist() == together.token_ids[int(row)].tolist()


def test_samples_of_one_prompt_follow_the_exact_distribution_of_two_tokens():
    # 3,000 copies of one prompt, read once; all pairs of tokens against their exact probability.
    draws, prompt = 3000, [4, 8, 15]
    params = SamplingParams(temperature=2.0, top_k=3, max_new_tokens=2)
    responses = generate([prompt] * draws, params, max_num_seqs=1000)
    pairs = responses.token_ids.values.view(draws, 2)
    expected = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)

    def top_three(logprobs):
        best = logprobs.topk(3)
        return zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True)

    for first, probability in top_three(plain_logprobs(decoder(), prompt, [0], 2.0)[0]):
        for second, conditional in top_three(plain_logprobs(decoder(), prompt, [first, 0], 2.0)[1]):
            expected[first, second] = probability * conditional * draws
    counts = torch.zeros_like(expected).index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(1).double(), accumulate=True)
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    assert ((counts - expected)[likely] ** 2 / expected[likely]).sum() < 35  # at most 9 cells


def test_greedy_follows_the_most_likely_token_of_a_plain_forward():
    prompts = prompts_of(6)
    responses = generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=8))
    assert (responses.logprobs.values == 0).all()
    for prompt, response in zip(prompts, responses.token_ids.rows(), strict=True):
        assert plain_logprobs(decoder(), prompt, response.tolist()).argmax(-1).tolist() == response.tolist()


def test_a_response_ends_with_its_first_stop_token_or_at_the_limit():
    stops = (1, 2)
    free = generate(prompts_of(20), SamplingParams(max_new_tokens=7))
    responses = generate(prompts_of(20), SamplingParams(max_new_tokens=7, stop_token_ids=stops))
    assert set(responses.finish_reasons) == {"stop", "length"}
    for row, (whole, cut) in enumerate(zip(free.token_ids.rows(), responses.token_ids.rows(), strict=True)):
        first = next((place for place, token in enumerate(whole.tolist()) if token in stops), None)
        assert cut.tolist() == whole[: 7 if first is None else first + 1].tolist()
        assert responses.finish_reasons[row] == ("length" if first is None else "stop")


def test_a_stop_token_exactly_at_the_limit_is_a_stop():
    first = generate([[5]], SamplingParams(max_new_tokens=1)).token_ids.values.tolist()
    responses = generate([[5]], SamplingParams(max_new_tokens=1, stop_token_ids=tuple(first)))
    assert responses.token_ids.values.tolist() == first
    assert responses.finish_reasons == ["stop"]


def test_batches_record_their_tokens_and_the_rows_that_ran(tmp_path):
    with recorded_spans(tmp_path, "main/0"):
        generated = generate(prompts_of(20), SamplingParams(max_new_tokens=7, stop_token_ids=(1, 2)), max_num_seqs=8)
    (path,) = tmp_path.glob("*.jsonl")
    batches = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [name for name, *_ in batches] == ["engine"] * 3
    assert sum(values["tokens"] for *_, values in batches) == len(generated.token_ids.values)
    assert all(0 < values["running"] <= 8 for *_, values in batches)
    assert all(one[1] + one[2] <= other[1] for one, other in itertools.pairwise(batches))


def test_no_prompts_give_no_generations():
    responses = generate([], SamplingParams())
    assert (responses.token_ids.num_rows, responses.logprobs.num_rows, responses.finish_reasons) == (0, 0, [])


def test_an_empty_prompt_and_a_missing_seed_are_refused():
    with pytest.raises(SamplingError, match="prompt 1 is empty"):
        generate([[1], []], SamplingParams())
    with pytest.raises(SamplingError, match="1 seeds for 2 prompts"):
        generate([[1], [2]], SamplingParams(), seeds_of(1))


def test_generated_columns_can_enter_an_autograd_graph():
    responses = generate([[1, 2]], SamplingParams(max_new_tokens=3))
    weight = torch.ones(3, requires_grad=True)
    (weight * responses.logprobs.values).sum().backward()
    assert weight.grad is not None
    assert not responses.token_ids.values.is_inference()
    assert not responses.token_ids.lengths.is_inference()


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_tied"])
def test_loaded_weights_generate_what_their_model_would(kind):
    params, prompts = SamplingParams(max_new_tokens=6), prompts_of(4)
    source = copy.deepcopy(decoder(kind))
    engine = HFEngine(copy.deepcopy(source))
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    state = {
        name: weight for name, weight in source.state_dict().items() if kind == "qwen2" or name != "lm_head.weight"
    }
    load(engine, state)
    engine.policy_version = 5
    column = Ragged.from_rows(prompts, torch.int64)
    responses = engine.generate(column, params, seeds_of(4))
    expected = HFEngine(source).generate(column, params, seeds_of(4))
    assert (engine.policy_version, expected.policy_versions.values.unique().tolist()) == (5, [0])
    assert responses.policy_versions.values.tolist() == [5] * responses.token_ids.values.numel()
    assert responses.token_ids.values.equal(expected.token_ids.values)
    # Copied, not shared: training goes on while the engine generates.
    with torch.no_grad():
        next(source.parameters()).zero_()
    assert engine.generate(column, params, seeds_of(4)).token_ids.values.equal(responses.token_ids.values)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_refused_and_nothing_is_copied(fault):
    model = copy.deepcopy(decoder())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    state = {name: weight + 1 for name, weight in before.items()}
    name = "model.norm.weight"
    if fault == "missing":
        del state[name]
    elif fault == "unknown":
        name = "model.norm.bias"
        state[name] = torch.zeros(1)
    else:
        state[name] = torch.zeros(1)
    with pytest.raises(EngineError, match=name):
        load(HFEngine(model), state)
    assert all(weight.equal(before[key]) for key, weight in model.state_dict().items())


def test_broken_weights_are_reported_before_a_token_is_sampled():
    model = copy.deepcopy(decoder())
    engine = HFEngine(model)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(EngineError, match="NaN or infinite"):
        engine.generate(Ragged.from_rows([[1]], torch.int64), SamplingParams(), seeds_of(1))


def test_a_model_without_a_cache_path_is_refused():
    model = copy.deepcopy(decoder())
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(EngineError, match="sdpa or eager"):
        HFEngine(model)

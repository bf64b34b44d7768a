import pytest
import torch
from transformers import PreTrainedModel

from rlpack.rollout.canary import (
    TOLERANCES,
    CanaryTolerance,
    calibrated,
    canary_tokens,
    canary_tolerance,
    check_canary,
)
from rlpack.rollout.errors import CanaryError
from tests.unit.models.tiny import VOCABULARY, tiny_model

SHAPE = {"initializer_range": 0.02, "tie_word_embeddings": False}


def test_the_prompt_is_fixed_and_uses_the_vocabulary():
    tokens = canary_tokens(30)
    assert tokens.equal(canary_tokens(30))
    assert (tokens.shape, tokens.dtype) == ((1, 24), torch.int64)
    assert 0 <= tokens.min() <= tokens.max() < 30
    assert len(tokens.unique()) > 12


def test_the_largest_difference_is_returned_or_named_with_the_tokens_that_differ_most():
    tokens = torch.tensor([[3, 4, 5], [6, 7, 8]])
    expected = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]])
    logprobs = expected + torch.tensor([[0.0, 0.0, 0.25], [0.0, -0.5, 0.0]])
    assert check_canary(logprobs, expected, tokens, tolerance=CanaryTolerance(0.5, 1.0), version=3) == 0.5
    message = (
        r"policy version 3 differ from the trainer's by up to 0\.5 nats \(tolerance 0\.4\) and 0\.188 on "
        r"average \(tolerance 0\.323\), most at "
        r"token 7 \(engine -3\.5, trainer -3\), token 5 \(engine -1\.75, trainer -2\)"
    )
    with pytest.raises(CanaryError, match=message):
        check_canary(logprobs, expected, tokens, tolerance=CanaryTolerance(0.4, 1.0), version=3)


def test_a_nan_on_either_side_is_a_difference():
    expected, broken = torch.zeros(1, 4), torch.tensor([[0.0, float("nan"), 0.0, 0.0]])
    for logprobs, other in ((broken, expected), (expected, broken)):
        with pytest.raises(CanaryError, match="by up to inf nats"):
            check_canary(logprobs, other, torch.arange(4)[None], tolerance=CanaryTolerance(10.0, 10.0), version=1)


def test_the_tolerance_is_that_of_the_less_precise_type():
    assert canary_tolerance(torch.float32, torch.float32)[:2] == (1e-3, 1e-4)
    assert canary_tolerance(torch.float32, torch.bfloat16) == canary_tolerance(torch.bfloat16, torch.bfloat16)
    assert canary_tolerance(torch.float32, torch.bfloat16)[:2] == (2.0, 0.5)


def test_a_mean_difference_is_refused_by_its_size_and_by_its_share_of_the_spread():
    tokens = torch.arange(5)[None]
    expected = torch.tensor([[0.0, -1.0, -3.0, -1.0, -3.0]])
    spread = (4 / 3) ** 0.5  # of -1, -3, -1, -3 about their mean, -2
    for shift, tolerance, refused in (
        (0.2, 0.5, False),
        (0.2, 0.19, True),
        (0.24 * spread, 10.0, False),
        (0.26 * spread, 10.0, True),
    ):
        logprobs = expected - shift * torch.tensor([[0.0, 1.0, -1.0, 1.0, 1.0]])
        arguments = {"tolerance": CanaryTolerance(10.0, tolerance), "version": 1}
        if refused:
            with pytest.raises(CanaryError, match=f"{shift:.3g} on average"):
                check_canary(logprobs, expected, tokens, **arguments)
        else:
            assert check_canary(logprobs, expected, tokens, **arguments) == pytest.approx(shift)


def test_equal_log_probs_of_all_tokens_leave_room_for_rounding_in_fp32():
    expected = torch.full((1, 5), -3.0)
    check_canary(expected + 5e-5, expected, torch.arange(5)[None], tolerance=TOLERANCES[torch.bfloat16], version=1)
    with pytest.raises(CanaryError):
        check_canary(expected + 2e-4, expected, torch.arange(5)[None], tolerance=TOLERANCES[torch.bfloat16], version=1)


@torch.no_grad()
@pytest.mark.parametrize("damaged", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_bf16_rounding_passes_and_lost_weights_do_not(damaged: str):
    """The largest difference alone passes all three on this model, whose log-probs are close together."""
    engine = tiny_model(implementation="sdpa", dtype=torch.float32, **SHAPE)
    tokens = canary_tokens(VOCABULARY)
    expected = scores_of(tiny_model(implementation="sdpa", dtype=torch.float32, **SHAPE).bfloat16(), tokens)
    tolerance = canary_tolerance(torch.float32, torch.bfloat16)
    check_canary(scores_of(engine, tokens), expected, tokens, tolerance=tolerance, version=1)
    engine.get_parameter(damaged).zero_()
    assert (scores_of(engine, tokens) - expected).abs().max() < tolerance.largest
    with pytest.raises(CanaryError, match="on average"):
        check_canary(scores_of(engine, tokens), expected, tokens, tolerance=tolerance, version=1)


def scores_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probs [R, L] of each token by definition; 0 for the first."""
    scores = model(tokens, use_cache=False).logits.float().log_softmax(-1)
    return torch.nn.functional.pad(scores[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0], (1, 0))


def test_the_first_publication_tells_a_stale_layer_from_rounding_in_bf16():
    """The bounds for any model miss one layer that is stale by a small step; those measured on this model find it."""
    rounded, exact = tiny_model("qwen2"), tiny_model("qwen2")
    tokens = canary_tokens(VOCABULARY)
    with torch.no_grad():
        for model in (rounded, exact):
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        expected = scores(rounded.to(torch.bfloat16), tokens)
        fresh = scores(exact, tokens)
        for parameter in exact.model.layers[0].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
        stale = scores(exact, tokens)
    anywhere = canary_tolerance(torch.float32, torch.bfloat16)
    here = calibrated(anywhere, fresh, expected)
    check_canary(fresh, expected, tokens, tolerance=here, version=2)
    check_canary(stale, expected, tokens, tolerance=anywhere, version=2)
    with pytest.raises(CanaryError, match="policy version 2"):
        check_canary(stale, expected, tokens, tolerance=here, version=2)


def scores(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of the tokens by a model's own forward pass, f32 [R, L]; 0 for first tokens."""
    logits = model(input_ids=tokens, use_cache=False).logits.float()[:, :-1]
    found = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0))


def test_calibrated_bounds_are_never_wider_nor_below_the_least():
    expected = torch.tensor([[0.0, -1.0, -3.0, -2.0]])
    for wide in TOLERANCES.values():
        assert calibrated(wide, expected, expected)[2:5] == wide.least
        assert calibrated(wide, expected + 10.0, expected).limits(1.0) == wide.limits(1.0)
        flat = expected.new_zeros(1, 4)
        assert calibrated(wide, flat, flat)[2:4] == wide[2:4]


@pytest.mark.parametrize("rounding", [4e-6, 4e-5])
def test_after_the_first_publication_four_times_its_difference_passes_in_fp32_and_no_more(rounding: float):
    tokens, signs = torch.arange(5)[None], torch.tensor([[0.0, 1.0, -1.0, 1.0, 1.0]])
    expected = torch.tensor([[0.0, -1.0, -3.0, -1.0, -3.0]])
    anywhere = TOLERANCES[torch.float32]
    first = expected + rounding * signs
    check_canary(first, expected, tokens, tolerance=anywhere, version=1)
    here = calibrated(anywhere, first, expected)
    limit = min(4 * rounding, anywhere.mean)
    check_canary(expected + 0.98 * limit * signs, expected, tokens, tolerance=here, version=2)
    with pytest.raises(CanaryError, match="policy version 2"):
        check_canary(expected + 1.02 * limit * signs, expected, tokens, tolerance=here, version=2)


def test_the_first_publication_itself_is_held_to_the_bounds_for_any_model():
    tokens, expected = torch.arange(4)[None], torch.tensor([[0.0, -1.0, -3.0, -2.0]])
    for dtype, shift in ((torch.float32, 1.1e-4), (torch.bfloat16, 0.6)):
        with pytest.raises(CanaryError, match="policy version 1"):
            check_canary(expected + shift, expected, tokens, tolerance=TOLERANCES[dtype], version=1)


def test_one_token_is_held_to_bounds_of_the_first_publication_too():
    """In bf16 the largest difference was 0.01 of the spread, so 0.5 of it may pass, and not the 2 nats of any model."""
    tokens, expected = torch.arange(25)[None], -torch.arange(25.0)[None] % 5
    here = calibrated(TOLERANCES[torch.bfloat16], expected - 0.01, expected)
    spread = expected[:, 1:].std().item()
    lone = torch.zeros(1, 25)
    lone[0, 7] = 0.45 * spread
    check_canary(expected + lone, expected, tokens, tolerance=here, version=2)
    lone[0, 7] = 0.55 * spread
    with pytest.raises(CanaryError, match="policy version 2"):
        check_canary(expected + lone, expected, tokens, tolerance=here, version=2)
    check_canary(expected + lone, expected, tokens, tolerance=TOLERANCES[torch.bfloat16], version=1)

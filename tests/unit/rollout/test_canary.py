import pytest
import torch

from rlpack.rollout.canary import canary_tokens, canary_tolerance, check_canary
from rlpack.rollout.errors import CanaryError


def test_the_prompt_is_fixed_and_uses_the_vocabulary():
    tokens = canary_tokens(30)
    assert tokens.equal(canary_tokens(30))
    assert (tokens.shape, tokens.dtype) == ((4, 16), torch.int64)
    assert 0 <= tokens.min() <= tokens.max() < 30
    assert len(tokens.unique()) > 20


def test_the_largest_difference_is_returned_or_named_with_the_tokens_that_differ_most():
    tokens = torch.tensor([[3, 4, 5], [6, 7, 8]])
    expected = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]])
    logprobs = expected + torch.tensor([[0.0, 0.0, 0.25], [0.0, -0.5, 0.0]])
    assert check_canary(logprobs, expected, tokens, tolerance=0.5, version=3) == 0.5
    message = (
        r"policy version 3 differ from the trainer's by up to 0\.5 nats \(tolerance 0\.4\), most at "
        r"token 7 \(engine -3\.5, trainer -3\), token 5 \(engine -1\.75, trainer -2\)"
    )
    with pytest.raises(CanaryError, match=message):
        check_canary(logprobs, expected, tokens, tolerance=0.4, version=3)


def test_a_nan_on_either_side_is_a_difference():
    expected, broken = torch.zeros(1, 4), torch.tensor([[0.0, float("nan"), 0.0, 0.0]])
    for logprobs, other in ((broken, expected), (expected, broken)):
        with pytest.raises(CanaryError, match="by up to inf nats"):
            check_canary(logprobs, other, torch.arange(4)[None], tolerance=10.0, version=1)


def test_the_tolerance_is_that_of_the_less_precise_type():
    assert canary_tolerance(torch.float32, torch.float32) == 1e-3
    assert canary_tolerance(torch.float32, torch.bfloat16) == canary_tolerance(torch.bfloat16, torch.bfloat16) > 1e-2

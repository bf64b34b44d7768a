"""Errors of engines keep their type and policy version on the way from a rank to the driver."""

import pickle

import pytest

from rlpack.rollout.errors import BucketError, CanaryError, EngineError, StalenessError


@pytest.mark.parametrize("error", [CanaryError("differs"), BucketError("not loaded", 3), StalenessError("too old")])
def test_an_error_of_an_engine_has_the_version_of_its_weights_and_keeps_it_when_sent(error: EngineError):
    with pytest.raises(EngineError) as raised, EngineError.at_version(8), EngineError.at_version(7):
        raise error
    received = pickle.loads(pickle.dumps(raised.value))
    assert (type(received), received.policy_version, str(received)) == (type(error), 7, str(error))


def test_other_errors_pass_unchanged():
    with pytest.raises(ValueError, match="no") as raised, EngineError.at_version(7):
        raise ValueError("no")
    assert not vars(raised.value)

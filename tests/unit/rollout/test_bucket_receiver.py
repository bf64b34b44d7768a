"""Which buckets a receiver takes, and when its weights are usable; every refusal names role, bucket and version."""

import pickle
from dataclasses import replace

import pytest
import torch

from rlpack.batch.bucket import Bucket, pack_bucket
from rlpack.rollout.bucket_receiver import BucketReceiver
from rlpack.rollout.errors import EngineError

COUNT = 3


def bucket(index: int, version: int = 1, count: int = COUNT) -> Bucket:
    weights = {f"weight {index}": torch.full((4,), float(index + version))}
    return pack_bucket(weights, index=index, count=count, version=version)


def opened(arrived: int = 0, version: int = 1) -> BucketReceiver:
    """Return a receiver with the first buckets of an update."""
    receiver = BucketReceiver("rollout")
    receiver.open(COUNT)
    for index in range(arrived):
        receiver.unpack(bucket(index, version), version)
    return receiver


def update(receiver: BucketReceiver, version: int) -> None:
    for index in range(COUNT):
        receiver.unpack(bucket(index, version), version)
    receiver.check_complete(version)
    receiver.close()


def test_a_whole_update_is_unpacked_and_usable_only_once_it_is_closed():
    receiver = opened()
    receiver.check_usable()  # the weights that it was built with
    for version in (1, 2, 7):
        for index in range(COUNT):
            weights = receiver.unpack(bucket(index, version), version)
            assert {name: weight.tolist() for name, weight in weights.items()} == {
                f"weight {index}": [float(index + version)] * 4
            }
            expected = (
                rf"rollout has no usable weights: bucket {index + 1} of 3 of policy version {version} has arrived"
            )
            with pytest.raises(EngineError, match=expected):
                receiver.check_usable()
        receiver.check_complete(version)
        with pytest.raises(EngineError, match="not published"):
            receiver.check_usable()
        receiver.close()
        receiver.check_usable()


WRONG_BUCKETS = {
    "dropped": (1, bucket(2), 1, r"bucket 3 of 3 of policy version 1 came where bucket 2 was due, which was dropped"),
    "the first dropped": (0, bucket(1), 1, r"bucket 2 of 3 .* came where bucket 1 was due"),
    "repeated": (2, bucket(1), 1, r"bucket 2 of 3 of policy version 1 came again or out of order, after bucket 2"),
    "after the last": (3, bucket(2), 1, r"bucket 3 of 3 .* came again or out of order, after bucket 3"),
    "of an earlier update": (1, bucket(1, 1), 2, r"bucket 2 of 3 of policy version 1 came in the update to version 2"),
    "of a later update": (1, bucket(1, 2), 1, r"bucket 2 of 3 of policy version 2 came in the update to version 1"),
    "of another update": (1, bucket(1, 2), 2, r"bucket 2 of 3 of policy version 2 came in the middle of .* version 1"),
    "of another count": (1, bucket(1, 1, 4), 1, r"bucket 2 of 4 .* came where an update has 3 buckets"),
    "damaged": (
        1,
        bucket(2)._replace(header=bucket(1).header),
        1,
        r"bucket 2 of 3 .* corrupted in transit: its digest is ",
    ),
}


@pytest.mark.parametrize("case", WRONG_BUCKETS)
def test_a_bucket_that_is_not_the_one_due_is_named_and_nothing_goes_on_after_it(case: str):
    arrived, wrong, version, words = WRONG_BUCKETS[case]
    receiver = opened(arrived)
    with pytest.raises(EngineError, match=f"^role rollout: {words}") as failure:
        receiver.unpack(wrong, version)
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)
    with pytest.raises(EngineError, match="came after a failure: "):
        receiver.unpack(bucket(arrived % COUNT), 1)
    for refused in (lambda: receiver.check_complete(1), receiver.check_usable):
        with pytest.raises(EngineError, match=words):
            refused()


@pytest.mark.parametrize("arrived", range(COUNT))
def test_an_update_with_a_missing_bucket_is_not_complete(arrived: int):
    receiver = opened(arrived)
    with pytest.raises(EngineError, match=rf"bucket {arrived + 1} of 3 of policy version 1 has not arrived"):
        receiver.check_complete(1)
    with pytest.raises(EngineError, match="no usable weights"):
        receiver.check_usable()


@pytest.mark.parametrize("index", range(COUNT))
def test_a_bucket_that_comes_after_its_update_was_published_is_refused(index: int):
    receiver = opened()
    update(receiver, 1)
    update(receiver, 2)
    for late in (1, 2):
        again = pickle.loads(pickle.dumps(receiver))
        with pytest.raises(
            EngineError, match=rf"bucket {index + 1} of 3 of policy version {late} came after version 2"
        ):
            again.unpack(bucket(index, late), late)


def test_an_update_is_completed_once_and_as_the_version_that_it_was_sent_as():
    with pytest.raises(EngineError, match=r"policy version 2 was to be published where bucket 3 of 3 of .* version 1"):
        opened(COUNT, 1).check_complete(2)
    receiver = opened()
    update(receiver, 1)
    with pytest.raises(EngineError, match="policy version 1 was to be published again, after version 1"):
        receiver.check_complete(1)


def test_buckets_need_an_agreed_count():
    for refused in (lambda one: one.unpack(bucket(0), 1), lambda one: one.check_complete(1)):
        with pytest.raises(EngineError, match="check_weights"):
            refused(BucketReceiver("rollout"))


def test_opening_again_starts_over_but_does_not_make_failed_weights_usable():
    receiver = opened(1)
    with pytest.raises(EngineError):
        receiver.unpack(replace_digest(bucket(1)), 1)
    receiver.open(COUNT)
    with pytest.raises(EngineError, match=r"no usable weights: bucket 2 of 3 .* corrupted in transit"):
        receiver.check_usable()
    update(receiver, 1)
    receiver.check_usable()


@pytest.mark.parametrize("error", [EngineError("the second engine is full"), RuntimeError("sizes differ")], ids=repr)
def test_a_bucket_that_can_not_be_loaded_is_named_and_ends_the_update(error: Exception):
    receiver = opened(1)
    words = rf"bucket 2 of 3 of policy version 1 was not loaded: .*{error}"
    with pytest.raises(EngineError, match=f"^role rollout: {words}"), receiver.receive(bucket(1), 1):
        raise error
    for refused in (lambda: receiver.unpack(bucket(2), 1), lambda: receiver.check_complete(1), receiver.check_usable):
        with pytest.raises(EngineError, match=words):
            refused()


def replace_digest(given: Bucket) -> Bucket:
    return given._replace(header=replace(given.header, digest=bytes(16)))


def test_an_engine_that_was_replaced_is_used_only_after_the_next_update():
    receiver = BucketReceiver("rollout")
    receiver.require_update("the engine is new")
    receiver.check_usable()  # it has the weights that it was built with, as its predecessor had
    receiver.open(COUNT)
    update(receiver, 1)
    receiver.require_update("the engine is new")
    with pytest.raises(EngineError, match="rollout has no usable weights: the engine is new"):
        receiver.check_usable()
    receiver.open(COUNT)
    with pytest.raises(EngineError, match="the engine is new"):
        receiver.check_usable()
    update(receiver, 1)
    receiver.check_usable()

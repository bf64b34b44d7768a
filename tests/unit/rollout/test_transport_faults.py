"""Each of the 18 faults of a weight transport is found before a token is sampled; the transport is the object store."""

import pickle
import re

import pytest

from rlpack.batch.bucket import Bucket, pack_bucket, unpack_bucket
from rlpack.rollout.errors import EngineError
from tests.weight_faults import FAULTS, Fault, ObjectStoreTransport, check_fault, check_no_fault


def carried(bucket: Bucket) -> Bucket:
    """Return a bucket as Ray gives it to another process: its arrays are read-only and mapped in place."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(bucket, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


# What the error says, by kind of fault; `check_fault` sees to the bucket and the version.
WORDS = {
    "drop": r"came where bucket \d+ was due, which was dropped|has not arrived: it was dropped",
    "delay": r"came where bucket \d+ was due, which was dropped, is late|has not arrived: .* is late",
    "duplicate": "came again",
    "truncate": "was corrupted in transit: its digest is",
    "reorder": r"came where bucket \d+ was due, which .* out of order",
    "bit flip": "was corrupted in transit: its digest is",
}


def test_the_table_has_every_kind_at_every_place():
    assert len(set(FAULTS)) == 18
    assert {fault.index(5) for fault in FAULTS} == {0, 2, 4}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_detected_and_named_and_no_token_is_sampled_after_it(fault: Fault):
    assert re.search(WORDS[fault.kind], check_fault(ObjectStoreTransport(carried), fault))


def test_an_update_without_a_fault_is_published():
    check_no_fault(ObjectStoreTransport(carried))


def test_the_flipped_bit_is_one_that_only_the_digest_finds():
    transport = ObjectStoreTransport(carried)
    for index in range(transport.count):
        flipped = unpack_bucket(transport.flip_bit(transport.export(index)))
        transport.deliver(pack_bucket(flipped, index=index, count=transport.count, version=2))  # with a new digest
    transport.publish()
    assert transport.sampled_versions() == {2}


@pytest.mark.parametrize("index", [0, -1])
def test_a_bucket_that_is_delivered_again_after_its_publication_ends_sampling(index: int):
    transport = ObjectStoreTransport(carried)
    parcels = [transport.export(at) for at in range(transport.count)]
    for parcel in parcels:
        transport.deliver(parcel)
    transport.publish()
    with pytest.raises(EngineError, match="came after version 2 was published"):
        transport.deliver(parcels[index])
    with pytest.raises(EngineError, match="no usable weights"):
        transport.sampled_versions()

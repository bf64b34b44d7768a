"""A bucket's header: what its digest covers; the truth are changes that a transport could make."""

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
import xxhash

from rlpack.batch.bucket import Arrays, digest, pack_bucket, unpack_bucket

WEIGHTS = {
    "layer.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "layer.bias": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
    "scale": torch.tensor(3.0),
    "steps": torch.tensor([2**40 + 1]),
    "nothing": torch.zeros(0, 4),
}


def arrays() -> Arrays:
    weights = {name: weight.clone() for name, weight in WEIGHTS.items()}
    return pack_bucket(weights, index=0, count=1, version=1).arrays


def test_what_is_packed_is_unpacked_bit_for_bit_across_processes():
    sent = pack_bucket(WEIGHTS, index=1, count=3, version=4)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    received = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])  # as Ray maps them: read-only
    assert received.header == sent.header
    assert digest(received.arrays) == sent.header.digest
    weights = unpack_bucket(received)
    assert list(weights) == list(WEIGHTS)
    for name, weight in weights.items():
        assert (weight.dtype, weight.shape) == (WEIGHTS[name].dtype, WEIGHTS[name].shape)
        assert weight.equal(WEIGHTS[name])
    assert str(received.header) == "bucket 2 of 3 of policy version 4"


def test_the_digest_is_xxh3_128_of_a_description_and_the_bytes_of_each_tensor():
    pair = torch.tensor([1, 2], dtype=torch.int16)
    given = pack_bucket({"a": pair}, index=0, count=1, version=1).header.digest
    assert given == xxhash.xxh3_128_digest(b"('a', 'int16', '<i2', (2,))" + b"\x01\x00\x02\x00")


def test_every_single_bit_counts():
    clean = arrays()
    expected = digest(clean)
    for name, (array, _) in clean.items():
        flat = array.reshape(-1).view(np.uint8)
        for bit in range(8 * flat.size):
            flat[bit // 8] ^= 1 << bit % 8
            assert digest(clean) != expected, (name, bit)
            flat[bit // 8] ^= 1 << bit % 8
    assert digest(clean) == expected


def reshaped(given: Arrays) -> Arrays:
    array, dtype = given["layer.weight"]
    return given | {"layer.weight": (array.reshape(4, 3), dtype)}


def renamed(given: Arrays) -> Arrays:
    return {name.replace("bias", "gain"): value for name, value in given.items()}


def swapped_names(given: Arrays) -> Arrays:
    return {"scale": given["steps"], "steps": given["scale"]} | {
        name: value for name, value in given.items() if name not in ("scale", "steps")
    }


def of_another_dtype(given: Arrays) -> Arrays:
    array, _ = given["layer.bias"]
    return given | {"layer.bias": (array, "float16")}


def with_other_numbers(given: Arrays) -> Arrays:
    array, dtype = given["layer.weight"]
    return given | {"layer.weight": (array.view(np.int32), dtype)}


def reordered(given: Arrays) -> Arrays:
    return dict(reversed(given.items()))


def without_an_empty_tensor(given: Arrays) -> Arrays:
    return {name: value for name, value in given.items() if name != "nothing"}


def cut_short(given: Arrays) -> Arrays:
    array, dtype = given["layer.weight"]
    return given | {"layer.weight": (array[:-1], dtype)}


def moved_to_the_neighbor(given: Arrays) -> Arrays:
    """Move the boundary between two tensors of one dtype; the bytes of all tensors together stay the same."""
    (first, dtype), (second, _) = given["layer.weight"], given["scale"]
    every = np.concatenate([first.reshape(-1), second.reshape(-1)])
    return given | {"layer.weight": (every[:4].reshape(1, 4), dtype), "scale": (every[4:], dtype)}


CHANGES = (
    *(reshaped, renamed, swapped_names, of_another_dtype, with_other_numbers, reordered, without_an_empty_tensor),
    *(cut_short, moved_to_the_neighbor),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_names_dtypes_shapes_and_order_count(change: Callable[[Arrays], Arrays]):
    assert digest(change(arrays())) != digest(arrays())


def test_the_digest_does_not_depend_on_the_layout_in_memory():
    array, dtype = arrays()["layer.weight"]
    columns_first = np.asfortranarray(array)
    assert digest({"layer.weight": (columns_first, dtype)}) == digest({"layer.weight": (array, dtype)})

"""A bucket of named weights in transit, with a header that the receiver checks it against.

Invariants (tests/unit/batch/test_bucket.py):

1. the digest covers names, order, dtypes, shapes and bytes of all tensors: changing any of these changes the digest;
2. packing and unpacking share memory with what they are given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from torch import Tensor

from rlpack.batch.serialization import from_array, to_array

# The bits and the dtype's name of each tensor, by the tensor's name. NumPy arrays are read in place from the object
# store.
Arrays = dict[str, tuple[np.ndarray, str]]


@dataclass(frozen=True)
class BucketHeader:
    """The sender's description of a bucket.

    Attributes:
        index: position in the update, from 0.
        count: number of buckets of the update.
        version: number of the update, which is the policy version that it produces; the first is 1.
        digest: `digest` of the tensors, 16 bytes.
    """

    index: int
    count: int
    version: int
    digest: bytes

    def __str__(self) -> str:
        """Return the bucket's name in errors, which count buckets from 1."""
        return bucket_name(self.index, self.count, self.version)


class Bucket(NamedTuple):
    """Named weights in transit."""

    header: BucketHeader
    arrays: Arrays


def bucket_name(index: int, count: int, version: int) -> str:
    """Return how errors name a bucket.

    >>> bucket_name(0, 3, 7)
    'bucket 1 of 3 of policy version 7'
    """
    return f"bucket {index + 1} of {count} of policy version {version}"


def pack_bucket(weights: Mapping[str, Tensor], *, index: int, count: int, version: int) -> Bucket:
    """Pack weights for sending; the bucket shares their memory.

    Args:
        weights: tensors by name.
        index: position of the bucket in the update, from 0.
        count: number of buckets of the update.
        version: number of the update, which is the policy version that it produces.
    """
    arrays = {name: to_array(weight) for name, weight in weights.items()}
    return Bucket(BucketHeader(index, count, version, digest(arrays)), arrays)


def unpack_bucket(bucket: Bucket) -> dict[str, Tensor]:
    """Return the tensors of a bucket, unchecked.

    They share the memory of the bucket's arrays, so they must not be written to.
    """
    return {name: from_array(array, dtype) for name, (array, dtype) in bucket.arrays.items()}


def digest(arrays: Arrays) -> bytes:
    """Return the xxh3-128 digest of names, dtypes, shapes and bytes together, in the order of the mapping.

    It detects accidental corruption, not tampering: xxh3 is not a cryptographic hash. A random change goes unnoticed
    with probability 2^-128.
    """
    hasher = xxhash.xxh3_128()
    for name, (array, dtype) in arrays.items():
        # repr is unambiguous: no two lists of names, dtypes and shapes have the same representation.
        hasher.update(repr((name, dtype, array.dtype.str, array.shape)).encode())
        hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hasher.digest()

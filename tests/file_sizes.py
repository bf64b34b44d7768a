"""Limit the size of files, so that writing more fails as it does on a full disk."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_larger_than(num_bytes: int) -> Iterator[None]:
    """Make writes of this process that would let a file exceed a size fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

"""Checks the buckets of an update on arrival, before anything is copied from them.

Invariants (tests/unit/rollout/test_bucket_receiver.py, test_transport_faults.py):

1. a bucket is unpacked only if it belongs to the current update, is the next of the agreed number of buckets, and has
   the digest that its sender computed; errors name buckets that are missing, late, repeated, out of order or damaged;
2. an update is complete only once all its buckets have arrived;
3. from the first bucket of an update until `close`, and after any failure, the weights are unusable;
4. a failure is final: every later bucket is refused until `open` is called again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import Tensor

from rlpack.batch.bucket import Bucket, BucketHeader, bucket_name, digest, unpack_bucket
from rlpack.rollout.errors import BucketError, EngineError


class BucketReceiver:
    """The state of one receiver of updates: which bucket is due, and whether its weights are usable.

    >>> import torch
    >>> from rlpack.batch.bucket import pack_bucket
    >>> receiver = BucketReceiver("rollout")
    >>> receiver.open(num_buckets=1)
    >>> sent = pack_bucket({"scale": torch.tensor(2.0)}, index=0, count=1, version=1)
    >>> with receiver.receive(sent, version=1) as weights:
    ...     weights
    {'scale': tensor(2.)}
    >>> receiver.check_complete(version=1)
    >>> receiver.close()
    >>> receiver.check_usable()
    """

    def __init__(self, role: str) -> None:
        """Start without an update; the weights that the receiver was built with are usable.

        Args:
            role: the receiver, for errors.
        """
        self._role = role
        self._num_buckets: int | None = None
        self._version: int | None = None  # of the update under way
        self._closed: int | None = None  # version of the last complete update
        self._arrived = 0
        self._failure: str | None = None
        self._unusable: str | None = None

    def open(self, num_buckets: int) -> None:
        """Set the number of buckets of every update, and forget earlier updates.

        Weights that are unusable remain so until the next update is closed.
        """
        self._num_buckets = num_buckets
        self._version, self._closed, self._arrived, self._failure = None, None, 0, None

    def unpack(self, bucket: Bucket, version: int) -> dict[str, Tensor]:
        """Check the next bucket of an update and return its tensors, on its memory.

        Args:
            bucket: the bucket as received.
            version: the update that the driver is sending, stated independently of the bucket.

        Raises:
            EngineError: the bucket is not the one that is due, or was damaged; none of it may be used.
        """
        header = bucket.header
        if problem := self._wrong_update(header, version) or self._wrong_place(header):
            self._fail(f"{header} {problem}")
        if (found := digest(bucket.arrays)) != header.digest:
            sent = header.digest.hex()
            self._fail(f"{header} was corrupted in transit: its digest is {found.hex()}, but {sent} was sent")
        self._version, self._arrived = version, header.index + 1
        self._unusable = f"{header} has arrived, and the update is not published"
        return unpack_bucket(bucket)

    @contextmanager
    def receive(self, bucket: Bucket, version: int) -> Iterator[dict[str, Tensor]]:
        """Check the next bucket of an update, as `unpack` does, and yield its tensors to be loaded.

        Raises:
            EngineError: the bucket is not the one that is due, was damaged, or could not be loaded; or the block raised
                a `BucketError` for an earlier bucket, which the message then names.
        """
        weights = self.unpack(bucket, version)
        with self._failing(f"{bucket.header} was not loaded"):
            yield weights

    @contextmanager
    def complete(self, version: int) -> Iterator[None]:
        """Check that all buckets of the update to `version` have arrived, and let the block apply them.

        Raises:
            EngineError: buckets are missing, another update is under way, or the block failed.
        """
        self.check_complete(version)
        with self._failing(f"policy version {version} was not loaded"):
            yield

    def check_complete(self, version: int) -> None:
        """Raise unless all buckets of the update to `version` have arrived.

        Raises:
            EngineError: buckets are missing, or another update is under way.
        """
        if self._failure is not None:
            self._fail(self._failure)
        if self._num_buckets is None:
            self._fail(f"no buckets of policy version {version} were agreed on; call check_weights first")
        if self._closed is not None and version <= self._closed:
            self._fail(f"policy version {version} was to be published again, after version {self._closed}")
        if self._version is not None and self._version != version:
            arrived = bucket_name(self._arrived - 1, self._num_buckets, self._version)
            self._fail(f"policy version {version} was to be published where {arrived} had arrived last")
        if self._arrived != self._num_buckets:
            missing = bucket_name(self._arrived, self._num_buckets, version)
            self._fail(f"{missing} has not arrived: it was dropped, or is late; nothing is published")

    def close(self) -> None:
        """Make the weights of a complete, checked update usable."""
        self._closed, self._version, self._arrived, self._unusable = self._version, None, 0, None

    def require_update(self, reason: str) -> None:
        """Make the weights unusable until the next update is closed; no effect before `open`.

        Args:
            reason: why, for the error.
        """
        if self._num_buckets is not None:
            self._unusable = reason

    @property
    def is_usable(self) -> bool:
        """Return whether the weights may be used."""
        return self._unusable is None

    def check_usable(self) -> None:
        """Raise if an update is under way or has failed.

        Raises:
            EngineError: why the weights can't be used.
        """
        if self._unusable is not None:
            raise EngineError(f"role {self._role} has no usable weights: {self._unusable}; restart with resume=auto")

    @contextmanager
    def _failing(self, problem: str) -> Iterator[None]:
        """Refuse all later buckets if the block fails.

        Args:
            problem: the failure to report, unless a `BucketError` names another bucket.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, BucketError) and self._num_buckets is not None and self._version is not None:
                problem = f"{bucket_name(error.index, self._num_buckets, self._version)} was not loaded"
            reason = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            self._failure = self._unusable = f"{problem}: {reason}"
            raise EngineError(f"role {self._role}: {self._failure}") from error

    def _wrong_update(self, header: BucketHeader, version: int) -> str | None:
        """Return why a bucket doesn't belong to the current update; None if it does."""
        if self._failure is not None:
            return f"came after a failure: {self._failure}"
        if self._num_buckets is None:
            return "came before check_weights"
        if header.version != version:
            return f"came in the update to version {version}"
        if self._closed is not None and version <= self._closed:
            return f"came after version {self._closed} was published"
        if self._version is not None and self._version != version:
            return f"came in the middle of the update to version {self._version}"
        return None

    def _wrong_place(self, header: BucketHeader) -> str | None:
        """Return why a bucket of the update is not the one that is due, None if it is."""
        if header.count != self._num_buckets:
            return f"came where an update has {self._num_buckets} buckets"
        if header.index < self._arrived:
            return f"came again or out of order, after bucket {self._arrived}"
        if header.index > self._arrived:
            return f"came where bucket {self._arrived + 1} was due, which was dropped, is late or out of order"
        return None

    def _fail(self, problem: str) -> NoReturn:
        """Refuse all later buckets, make the weights unusable, and raise."""
        self._failure = self._unusable = problem
        raise EngineError(f"role {self._role}: {problem}")

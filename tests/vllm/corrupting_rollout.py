"""Rollout roles whose second rank loads other weights than it was sent, as if they were damaged after the checksums.

The engine lives, and reports nothing: only the canary can see it.
"""

from collections.abc import Mapping
from unittest.mock import patch

from torch import Tensor

from rlpack.batch.bucket import Bucket
from rlpack.worker import broadcast
from rlpack.workers.rollout import RolloutWorker

RANK, VERSION = 1, 3
_NAME = "model.norm.weight"


class CorruptsOnce(RolloutWorker):
    """The first time that policy version 3 is loaded, a norm is changed."""

    num_faults = 1
    num_loads = 0

    @broadcast
    def load_bucket(self, bucket: Bucket, version: int) -> None:
        """Load a bucket, and a changed norm if this transfer is faulty."""
        is_due = (self.context.rank, version) == (RANK, VERSION)
        self.num_loads += is_due and bucket.header.index == 0
        if not is_due or self.num_loads > self.num_faults:
            return super().load_bucket(bucket, version)
        load = self._engine.load_bucket

        def corrupted(weights: Mapping[str, Tensor]) -> None:
            load({name: 1.5 * weight if name == _NAME else weight for name, weight in weights.items()})

        with patch.object(self._engine, "load_bucket", corrupted):
            return super().load_bucket(bucket, version)


class CorruptsTwice(CorruptsOnce):
    """The new engine gets a changed norm, too."""

    num_faults = 2

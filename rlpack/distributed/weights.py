"""Weights from one role to another: bucket by bucket through the object store, bypassing the driver.

    source ranks   open_weights       export_bucket(0)   export_bucket(1)   ...   canary_logprobs
                        │                   │                  │                       │
    target ranks   check_weights       load_bucket        load_bucket      ...     publish

The first column runs once, when a `WeightChannel` is opened: `open_weights` returns a small layout, which the driver
passes on. Every other arrow is an object that one source rank stores and all target ranks read in place.

Invariants (tests/distributed/test_weights.py):

1. the driver holds references, never values; bucket k is stored by source rank k mod (number of source ranks), so that
   no rank stores the whole model;
2. at most two buckets are in flight: bucket k is freed once all target ranks have loaded it, and only then the export
   of bucket k + 2 starts;
3. every bucket has the deadline `placement.call_timeout_s`; a failure kills both pools and names the exporting rank if
   its export failed, since the loads fail as a consequence;
4. every bucket has a header (`rlpack.batch.bucket`), and the driver states with each call which update it is sending;
   the target names a bucket that is dropped, late, repeated, out of order or damaged before it copies anything from it,
   and ends no update before all buckets have arrived (`rlpack.rollout.bucket_receiver`).
"""

from collections import Counter
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor

from rlpack.batch.bucket import Bucket
from rlpack.batch.weight_layout import WeightForm, WeightLayout
from rlpack.distributed.calls import Relay
from rlpack.distributed.dispatch import broadcast, rank_zero
from rlpack.distributed.worker_group import WorkerGroup


class WeightSource(Protocol):
    """A role whose weights other roles get. Its methods carry these decorators."""

    @broadcast
    def open_weights(self, form: WeightForm) -> WeightLayout:
        """Plan buckets of weights in the target's form."""
        ...

    @broadcast
    def export_bucket(self, index: int, form: WeightForm, version: int) -> Bucket | None:
        """Gather a bucket of the layout of `form` for the update to `version`, a collective.

        Only source rank `index` mod (number of source ranks) returns it.
        """
        ...


class ScoredSource(WeightSource, Protocol):
    """A source that can score the canary."""

    @broadcast
    def canary_logprobs(self, token_ids: Tensor) -> np.ndarray:
        """Return log p(token | tokens before it) at temperature 1, f32 [R, L]; a collective."""
        ...


class WeightTarget(Protocol):
    """A role that loads weights. Its methods carry these decorators."""

    @rank_zero
    def weights_form(self) -> WeightForm:
        """Return the form in which weights have to arrive."""
        ...

    @broadcast
    def check_weights(self, layout: WeightLayout) -> None:
        """Raise unless weights of this layout fit; every update then consists of its buckets."""
        ...

    @broadcast
    def load_bucket(self, bucket: Bucket, version: int) -> None:
        """Check one bucket of the update to `version` and copy it; nothing may refer to its memory afterwards."""
        ...


class TransferTarget(WeightTarget, Protocol):
    """A target that uses new weights once they are complete."""

    @broadcast
    def finish_transfer(self, version: int) -> None:
        """Raise unless all buckets of the update to `version` have arrived."""
        ...


class PublishTarget(WeightTarget, Protocol):
    """A target that checks the canary before it uses new weights."""

    @broadcast
    def publish(self, expected: np.ndarray, token_ids: Tensor, version: int, may_replace: bool) -> float:
        """Use the weights as policy version `version`; return the largest gap to the canary.

        Raises unless all buckets have arrived and the canary's log-probs agree; infinity if `may_replace` and a target
        that can be replaced fails the canary.
        """
        ...


S = TypeVar("S", bound=WeightSource)
T = TypeVar("T", bound=WeightTarget)
ScoredS = TypeVar("ScoredS", bound=ScoredSource)
TransferT = TypeVar("TransferT", bound=TransferTarget)
PublishT = TypeVar("PublishT", bound=PublishTarget)


class WeightChannel(Generic[S, T]):
    """Transfers one role's weights to another: opened once, used after every update.

    Attributes:
        version: number of updates so far, the policy version of the newest.
        is_published: whether engines have received weights through this channel.
        is_sending: whether an update is under way. If the target is restarted meanwhile, so is the update.
        keeps: whether the weights that were published last stay in the object store until the next publication, so
            that `publish_again` sends them even if the source has others by then.
    """

    def __init__(self, source: WorkerGroup[S], target: WorkerGroup[T]) -> None:
        """Agree on the buckets; the channel keeps no weights until `keeps` is set.

        Raises:
            RoleError: the source's weights do not fit the target, or a rank died or missed the deadline.
        """
        self.version = 0
        self.is_published = self.is_sending = self.keeps = False
        self._kept: list[Any] = []
        self._source, self._target = source, target
        form = target.run(WeightTarget.weights_form)
        layout = source.run(WeightSource.open_weights, form)
        target.run(WeightTarget.check_weights, layout)
        self._form, self._layout = form, layout

    @property
    def bytes_by_node(self) -> dict[str, int]:
        """Return the size of the buckets of an update that are stored on each node, in bytes."""
        sizes: Counter[str] = Counter()
        for index, bucket in enumerate(self._layout.buckets):
            sizes[self._source.ranks.nodes[index % self._source.num_ranks]] += sum(spec.num_bytes for spec in bucket)
        return dict(sizes)

    def transfer(self: "WeightChannel[S, TransferT]") -> None:
        """Load the source's weights into all ranks of the target.

        Raises:
            RoleError: a rank raised, died or missed the deadline, or a bucket did not arrive as it was sent.
        """
        version = self.version + 1
        self._source.ranks.relay(self._buckets(version), self._target.ranks)
        self._target.run(TransferTarget.finish_transfer, version)
        self.version = version

    def publish(self: "WeightChannel[ScoredS, PublishT]", canary: Tensor) -> float:
        """Load the weights into engines as the next policy version, if the engines pass the canary.

        Args:
            canary: the fixed prompt, token ids, int64 [R, L].

        Returns:
            The largest difference of a log-prob between an engine and the trainer, in nats; infinity if an engine
            failed the canary and can be replaced, after which comes `publish_again`.

        Raises:
            RoleError: a rank raised, died or missed the deadline, a bucket did not arrive as it was sent, or an engine
                failed the canary.
        """
        version = self.version + 1
        self.is_sending = True
        try:
            relays, kept = self._relays(canary, version, may_replace=True), self._kept if self.keeps else None
            gaps = self._source.ranks.relay(relays, self._target.ranks, kept)
        finally:
            self.is_sending = False
        self.version, self.is_published = version, True
        return max(gaps)

    def publish_again(self: "WeightChannel[ScoredS, PublishT]", canary: Tensor) -> float:
        """Load the weights into all engines under the version that they have, for engines that were replaced.

        The source's weights must not have changed since the last `publish`, unless the published ones were kept.
        Arguments and errors are the same as for `publish`; an engine that fails the canary is an error.
        """
        self.agree()
        relays = self._relays(canary, self.version, may_replace=False)
        if self.keeps and self.is_published:  # nothing is asked of the source, which another thread may train
            return max(self._target.ranks.load_again(self._kept, relays))
        self.is_sending = True
        try:
            return max(self._source.ranks.relay(relays, self._target.ranks))
        finally:
            self.is_sending = False

    def agree(self) -> None:
        """Agree on the buckets again with a target whose engines are new."""
        self._target.run(WeightTarget.check_weights, self._layout)

    def _relays(self, canary: Tensor, version: int, *, may_replace: bool) -> list[Relay]:
        """Return the transfers that load the weights as policy version `version`, and check the canary."""
        check = Relay(
            owner=0,
            export=(self._source.role, ScoredSource.canary_logprobs.__name__, (canary,)),
            load=(self._target.role, PublishTarget.publish.__name__, (canary, version, may_replace)),
        )
        return [*self._buckets(version), check]

    def _buckets(self, version: int) -> list[Relay]:
        """Return the transfers of all buckets of the update to `version`."""
        source, target = self._source, self._target
        return [
            Relay(
                owner=index % source.num_ranks,
                export=(source.role, WeightSource.export_bucket.__name__, (index, self._form, version)),
                load=(target.role, WeightTarget.load_bucket.__name__, (version,)),
            )
            for index in range(len(self._layout))
        ]

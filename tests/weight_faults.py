"""The 18 faults that every transport of weights has to detect, and the test of one fault on any transport.

A transport under test follows `Transport`; `check_fault(transport, fault)` is the test:

    @pytest.mark.parametrize("fault", FAULTS, ids=str)
    def test_...(fault):
        check_fault(MyTransport(), fault)
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.bucket import Bucket, pack_bucket
from rlpack.batch.weight_layout import WeightLayout
from rlpack.distributed.context import RankContext
from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream
from rlpack.rollout.canary import canary_tokens
from rlpack.rollout.errors import EngineError
from rlpack.rollout.types import SamplingParams
from rlpack.workers.build import build_model
from rlpack.workers.rollout import RolloutWorker
from tests.builders import tiny_config, tiny_rollouts, tiny_tokenizer

Kind = Literal["drop", "delay", "duplicate", "truncate", "reorder", "bit flip"]
Place = Literal["first", "middle", "last"]


class Fault(NamedTuple):
    """What happens to one bucket of an update on its way.

    `delay`: it arrives after the update was to be published. `reorder`: it changes places with the next one, the last
    one with the one before.
    """

    kind: Kind
    place: Place

    def __str__(self) -> str:
        return f"{self.kind} {self.place}"

    def index(self, count: int) -> int:
        """Return the index of the bucket among `count`."""
        return {"first": 0, "middle": count // 2, "last": count - 1}[self.place]


FAULTS = [Fault(kind, place) for kind, place in itertools.product(get_args(Kind), get_args(Place))]


class Transport(Protocol):
    """One way of an update's buckets to an engine. A parcel is a bucket on this way, of whatever type.

    The engine has published version 1 already; the update under test leads to version 2 and has other weights. A method
    that detects something wrong raises an `EngineError`, or what a transport's `errors` name.

    Attributes:
        count: number of buckets of an update, at least 3.
        errors: types of the errors by which a fault is detected.
    """

    count: int
    errors: tuple[type[Exception], ...]

    def export(self, index: int) -> Any:
        """Return a bucket of the update on its way: sent, and not received."""
        ...

    def truncate(self, parcel: Any) -> Any:
        """Return a parcel whose last bytes are missing."""
        ...

    def flip_bit(self, parcel: Any) -> Any:
        """Return a parcel in which one bit of a weight is different."""
        ...

    def deliver(self, parcel: Any) -> None:
        """Let the engine load a parcel."""
        ...

    def publish(self) -> None:
        """Let the engine publish the update."""
        ...

    def sampled_versions(self) -> set[int]:
        """Sample some tokens and return their policy versions."""
        ...


def named_bucket(fault: Fault, count: int) -> int:
    """Return the bucket that the error has to name, counted from 1: the first that is not as it should be."""
    number = fault.index(count) + 1
    if fault.kind in {"drop", "delay"}:
        return min(number + 1, count)  # the one that comes instead; without a next one, the missing one itself
    if fault.kind == "reorder":
        return min(number + 1, count)  # the later of the two, which comes first
    return number


def check_fault(transport: Transport, fault: Fault) -> str:
    """Send an update with a fault; fail unless it is detected before a token is sampled. Return the error's text.

    The rest of the update and its publication follow after the error, too: a sender that ignores it gets no further.
    """
    count, error = transport.count, None
    assert count >= 3
    for step in _steps(transport, fault):
        try:
            step()
        except transport.errors as raised:
            error = error or raised
        else:
            assert error is None, f"{fault}: the engine went on after {error}"
        if error is not None:
            with pytest.raises(transport.errors):
                transport.sampled_versions()
    assert error is not None, f"{fault}: not detected"
    named = re.search(r"role .*?bucket (\d+) of (\d+) of policy version (\d+)", str(error))
    assert named is not None, f"{fault}: the error names no bucket: {error}"
    assert tuple(map(int, named.groups())) == (named_bucket(fault, count), count, 2), f"{fault}: {error}"
    return str(error)


def check_no_fault(transport: Transport) -> None:
    """Send the update unharmed; fail unless it is published."""
    assert transport.sampled_versions() == {1}
    for index in range(transport.count):
        transport.deliver(transport.export(index))
    transport.publish()
    assert transport.sampled_versions() == {2}


def _steps(transport: Transport, fault: Fault) -> Iterator[Callable[[], None]]:
    """Yield the deliveries and the publication of an update with a fault, in their order."""
    at, order = fault.index(transport.count), list(range(transport.count))
    if fault.kind in {"drop", "delay"}:
        order.remove(at)
    if fault.kind == "duplicate":
        order.insert(at + 1, at)
    if fault.kind == "reorder":
        other = at + 1 if at + 1 < transport.count else at - 1
        order[at], order[other] = order[other], order[at]
    damage = {"truncate": transport.truncate, "bit flip": transport.flip_bit}.get(fault.kind)

    def delivery(index: int) -> Callable[[], None]:
        parcel = transport.export(index)
        return lambda: transport.deliver(damage(parcel) if damage and index == at else parcel)

    yield from (delivery(index) for index in order)
    yield transport.publish
    if fault.kind == "delay":
        yield delivery(at)


class ObjectStoreTransport:
    """Buckets to a `RolloutWorker` with the `hf` engine, through `carry`, which stands for the object store."""

    errors = (EngineError,)

    def __init__(self, carry: Callable[[Bucket], Bucket]) -> None:
        """Publish version 1.

        Args:
            carry: returns a bucket as another process would read it; nothing may write into its memory.
        """
        self._carry, self._canary = carry, canary_tokens(len(tiny_tokenizer()))
        self.worker = RolloutWorker.from_settings(RankContext(), tiny_config(), tiny_tokenizer())
        layout = self._update_to(1, seed=4)
        self.worker.check_weights(layout)
        self.count = len(layout)
        for index in range(self.count):
            self.deliver(self.export(index))
        self.publish()
        self._update_to(2, seed=5)

    def _update_to(self, version: int, seed: int) -> WeightLayout:
        """Make the weights of another model those of the update under way; return their layout."""
        policy = Policy(build_model(tiny_config().model, tiny_tokenizer(), RankContext(), seed=seed))
        stream = WeightStream(policy, self.worker.weights_form().dtype, bucket_bytes=8000)
        self._version, self._weights = version, list(stream)
        with torch.no_grad():
            self._expected = torch.stack([policy.probe_wrapped_model(row[None])[0] for row in self._canary]).numpy()
        return stream.layout

    def export(self, index: int) -> Bucket:
        return pack_bucket(self._weights[index], index=index, count=self.count, version=self._version)

    def truncate(self, parcel: Bucket) -> Bucket:
        name = list(parcel.arrays)[-1]
        array, dtype = parcel.arrays[name]
        return parcel._replace(arrays=parcel.arrays | {name: (array[:-1], dtype)})

    def flip_bit(self, parcel: Bucket) -> Bucket:
        """Flip the lowest bit of a mantissa, which no canary sees."""
        name = next(iter(parcel.arrays))
        array, dtype = parcel.arrays[name]
        damaged = array.copy()  # in its own memory: the sender's weights stay as they are
        damaged.reshape(-1).view(np.uint32)[0] ^= 1
        return parcel._replace(arrays=parcel.arrays | {name: (damaged, dtype)})

    def deliver(self, parcel: Bucket) -> None:
        self.worker.load_bucket(self._carry(parcel), self._version)

    def publish(self) -> None:
        self.worker.publish(self._expected, self._canary, self._version)

    def sampled_versions(self) -> set[int]:
        batch: BatchedDataDict = tiny_rollouts([(3, 0), (5, 0)]).keep(["input_ids", "group_ids", "uid"])
        prompts = batch.union({"seeds": torch.tensor([5, 6])})
        made = self.worker.generate(prompts, SamplingParams(max_new_tokens=2))
        return set(made["policy_version"].values[made["response_mask"].values].tolist())

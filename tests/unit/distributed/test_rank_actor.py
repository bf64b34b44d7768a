"""When and by which thread a rank drops the references that it received, without Ray."""

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.remote import RemoteColumn
from rlpack.distributed.context import RankContext
from rlpack.distributed.object_handles import ObjectHandle
from rlpack.distributed.rank_actor import RankActor
from rlpack.worker import Worker

WAIT_S = 30.0


class Reference:
    """Stands for the reference to an object of Ray: records in which thread the last name of it goes."""

    def __init__(self, drops: list[threading.Thread]) -> None:
        self._drops = drops

    def __del__(self) -> None:
        self._drops.append(threading.current_thread())


class Scorer(Worker):
    """Keeps the batches that it receives, as no role should."""

    def __init__(self) -> None:
        super().__init__(RankContext())
        self.kept: list[BatchedDataDict] = []

    def score(self, batch: BatchedDataDict) -> BatchedDataDict:
        self.kept.append(batch)
        return BatchedDataDict({"text": ["a", "b"]}, row_ids=batch.row_ids)

    def fail(self, batch: BatchedDataDict) -> BatchedDataDict:
        self.kept.append(batch)
        raise ValueError("no score")


@pytest.fixture
def actor() -> Iterator[RankActor]:
    threads = torch.get_num_threads()
    actor = RankActor(RankContext(), threads)
    actor._roles["scorer"] = Scorer()
    yield actor
    actor.close()
    torch.set_num_threads(threads)


def stored(drops: list[threading.Thread]) -> BatchedDataDict:
    """Return two rows whose only column is in the store."""
    handle = ObjectHandle(cast(Any, Reference(drops)))
    return BatchedDataDict({"note": RemoteColumn.whole(handle, "note", ["a", "b"])}, row_ids=[0, 1])


@pytest.mark.parametrize("method", ["score", "fail"])
def test_references_of_a_call_in_the_background_are_dropped_by_the_thread_that_receives_calls(
    actor: RankActor, method: str
):
    drops: list[threading.Thread] = []
    actor.submit(1, "scorer", method, {}, stored(drops))
    actor._threads["scorer"].shutdown()  # returns once the call has ended
    assert drops == []
    if method == "fail":
        with pytest.raises(ValueError, match="no score"):
            actor.result(1, WAIT_S)
    else:
        assert actor.result(1, WAIT_S) is not None
    assert drops == [threading.current_thread()]


def test_references_of_a_discarded_call_are_dropped_with_those_of_the_next(actor: RankActor):
    drops: list[threading.Thread] = []
    actor.submit(1, "scorer", "score", {}, stored(drops))
    actor._threads["scorer"].shutdown()
    actor.discard(1)
    actor.call_rows(2, "scorer", "score", {}, stored(drops))
    assert drops == [threading.current_thread()] * 2


def test_a_batch_can_not_be_read_after_its_call(actor: RankActor):
    drops: list[threading.Thread] = []
    actor.call_rows(1, "scorer", "score", {}, stored(drops))
    assert drops == [threading.current_thread()]
    (kept,) = actor._roles["scorer"].kept
    with pytest.raises(DataError, match="at the end of the call that received them"):
        kept["note"]

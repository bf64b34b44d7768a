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
from rlpack.distributed.rank_actor import RankActor, comes_with_rows
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

    def draw(self, batch: BatchedDataDict, num_tokens: int) -> BatchedDataDict:
        return BatchedDataDict({"tokens": torch.ones(2, num_tokens), "text": ["a", "b"]}, row_ids=batch.row_ids)

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
            actor.ready_rows(1, WAIT_S)
    else:
        assert actor.ready_rows(1, WAIT_S)[0] is not None
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


def drawn(actor: RankActor, num_tokens: int, *, in_background: bool) -> tuple[Any, ...]:
    """Return the answer to call 1, which draws two rows."""
    arguments = "scorer", "draw", {"num_tokens": num_tokens}, BatchedDataDict({}, row_ids=[0, 1])
    if not in_background:
        measured, *columns = actor.measure_rows(1, *arguments)
        return measured.result, *columns
    actor.submit(1, *arguments)
    return actor.ready_rows(1, WAIT_S)


@pytest.mark.parametrize("in_background", [False, True])
def test_small_columns_come_with_their_rows_and_large_ones_when_they_are_asked_for(
    actor: RankActor, in_background: bool
):
    rows, tensors, lists = drawn(actor, 8, in_background=in_background)
    assert comes_with_rows(rows)
    assert tensors["tokens"].values.numel() == 16
    assert lists["text"] == ["a", "b"]
    assert not actor._columns  # nothing is left here

    rows, *none = drawn(actor, 2**18, in_background=in_background)  # 2 MiB
    assert not comes_with_rows(rows)
    assert none == [None, None]
    _, tensors, lists = actor.store_columns(1)
    assert tensors["tokens"].values.numel() == 2**19
    assert lists["text"] == ["a", "b"]


def test_rows_that_are_not_ready_come_without_columns(actor: RankActor):
    started, go_on = threading.Event(), threading.Event()
    actor._roles["scorer"].wait = lambda batch: (started.set(), go_on.wait(WAIT_S), batch)[-1]
    actor.submit(1, "scorer", "wait", {}, BatchedDataDict({"text": ["a"]}, row_ids=[0]))
    assert started.wait(WAIT_S)
    assert actor.ready_rows(1, 0.0) == (None, None, None)
    go_on.set()
    rows, lists, none = actor.ready_rows(1, WAIT_S)
    assert rows.sizes
    assert (lists, none) == ({"text": ["a"]}, None)

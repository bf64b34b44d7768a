"""How a rank reads objects of another node, without Ray: references are texts, and a test says what each gives."""

import logging
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from ray.exceptions import ActorDiedError, ObjectLostError, OutOfMemoryError, RayError

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.offload import offload
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import RemoteColumn
from rlpack.distributed import object_handles
from rlpack.distributed.object_handles import ObjectHandle, ObjectReader, RowSource, for_node, handles_of
from rlpack.distributed.rank_actor import RankActor
from rlpack.distributed.shared_arguments import SharedArguments

TOKENS = Ragged.from_rows([[1, 2], [3], [4, 5, 6]], torch.int64)
LOST = ObjectLostError("whole", None, "")


def copy(refs: Any, rows: Any) -> Any:
    """Return the reference to copies of rows."""
    return "copy"


class Store:
    """Objects by reference, and a source for each of two ranks, which copies rows as a rank does.

    Attributes:
        asked: rank and references of each request for copies.
        busy: ranks that copy nothing.
        dead: ranks whose copies are lost.
        gets: references of each read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.objects: dict[Any, Any] = {}
        self.asked: list[tuple[int, list[str]]] = []
        self.busy: set[int] = set()
        self.dead: set[int] = set()
        self.gets: list[list[Any]] = []
        self.sources = [RowSource(lambda: None, partial(self._copy, rank)) for rank in range(2)]
        monkeypatch.setattr(object_handles, "get_objects", self._get)

    def _copy(self, rank: int, refs: Any, rows: Any) -> Any:
        if rank in self.busy:
            return None
        self.asked.append((rank, list(refs)))
        copy = f"copy {len(self.asked)}"
        payloads = [self.objects[ref] for ref in refs]
        self.objects[copy] = ActorDiedError() if rank in self.dead else RankActor.copy_rows(None, rows, *payloads)  # pyright: ignore[reportArgumentType]
        return copy

    def _get(self, refs: list[Any], timeout_s: float | None) -> list[Any]:
        self.gets.append(refs)
        found = [self.objects[ref] for ref in refs]
        for one in found:
            if isinstance(one, RayError):
                raise one
        return found

    def stored(self, rank: int, first_id: int, num_rows: int) -> BatchedDataDict:
        """Return rows of a rank on node `far`, in a payload of tokens and one of texts."""
        ids = range(first_id, first_id + num_rows)
        batch = BatchedDataDict({"input_ids": tokens_of(ids), "note": [f"note {one}" for one in ids]}, row_ids=ids)
        offloaded, payloads = offload(batch)
        refs = [f"rank {rank}, row {first_id}, payload {number}" for number in range(len(payloads))]
        self.objects |= zip(refs, payloads, strict=True)
        handles = [ObjectHandle(cast(Any, ref), "far", self.sources[rank], ("rollout", rank)) for ref in refs]
        return offloaded.with_handles(handles)


def tokens_of(ids: Sequence[int]) -> Ragged:
    """Return rows of one to four tokens."""
    return Ragged.from_rows([[one] * (1 + one % 4) for one in ids], torch.int64)


def check_received(sent: BatchedDataDict, rows: list[int]) -> None:
    """Check that a rank reads these rows of a batch that was sent to it, in this order."""
    batch = pickle.loads(pickle.dumps(sent))
    batch.reader = ObjectReader()
    assert [row.tolist() for row in batch["input_ids"].rows()] == [row.tolist() for row in tokens_of(rows).rows()]
    assert batch["note"] == [f"note {row}" for row in rows]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


def received(rows: list[int]) -> BatchedDataDict:
    """Return rows of an object on node `far` as a rank on node `here` receives them."""
    handle = ObjectHandle(cast(Any, "whole"), "far", RowSource(lambda: None, copy), ("rollout", 1))
    batch = BatchedDataDict({"input_ids": RemoteColumn.whole(handle, "input_ids", TOKENS)})
    sent = for_node(batch.select(rows), "here")
    assert [one.ref for one in handles_of(sent)] == ["copy"]
    return pickle.loads(pickle.dumps(sent))


@pytest.mark.parametrize("death", [ActorDiedError(), OutOfMemoryError("Task was killed.\nMemory on the node ...")])
def test_rows_of_a_rank_that_died_are_read_from_the_whole_object(monkeypatch: pytest.MonkeyPatch, death: RayError):
    asked: list[str] = []

    def get(refs: list[Any], timeout_s: float | None) -> list[Any]:
        asked.extend(refs)
        if "copy" in refs:
            raise death
        return [{"input_ids": TOKENS} for _ in refs]

    monkeypatch.setattr(object_handles, "get_objects", get)
    batch = received([2, 0])
    batch.reader = ObjectReader()
    assert [row.tolist() for row in batch["input_ids"].rows()] == [[4, 5, 6], [1, 2]]
    assert asked[-1] == "whole"


def test_an_object_that_is_lost_with_the_rank_is_what_the_error_says(monkeypatch: pytest.MonkeyPatch):
    def get(refs: list[Any], timeout_s: float | None) -> list[Any]:
        raise ActorDiedError if "copy" in refs else LOST

    monkeypatch.setattr(object_handles, "get_objects", get)
    batch = received([1])
    batch.reader = ObjectReader()
    with pytest.raises(ObjectLostError):
        batch["input_ids"]


def test_a_handle_that_is_freed_keeps_no_reference():
    (handle,) = handles_of(received([1]))
    assert handle.row_copy is not None
    handle.free("at the end of the call")
    assert (handle.row_copy, handle.is_readable) == (None, False)


def test_a_rank_that_is_busy_is_asked_for_no_rows():
    handle = ObjectHandle(cast(Any, "whole"), "far", RowSource(lambda: None, lambda refs, rows: None), ("rollout", 1))
    batch = BatchedDataDict({"input_ids": RemoteColumn.whole(handle, "input_ids", TOKENS)}).select([2, 0])
    assert [one.ref for one in handles_of(for_node(batch, "here"))] == ["whole"]


def eight_rows(store: Store) -> BatchedDataDict:
    """Return rows 0 to 7 in two payloads each of tokens and texts of both ranks."""
    return BatchedDataDict.concat([store.stored(number % 2, 2 * number, 2) for number in range(4)])


def test_a_rank_copies_the_rows_of_all_its_objects_for_all_ranks_of_a_node_in_one_call(store: Store):
    batch, rows_of_rank = eight_rows(store), [[6, 1, 3], [0, 7, 2], [5, 4]]
    shards, nodes = [batch.select(rows) for rows in rows_of_rank], ["here", "here", "there"]
    shared = SharedArguments([(shard,) for shard in shards], nodes)
    sent = [shared.for_node(shard, node) for shard, node in zip(shards, nodes, strict=True)]
    for shard, rows in zip(sent, rows_of_rank, strict=True):
        check_received(shard, rows)
    assert [(rank, len(refs)) for rank, refs in store.asked] == [(0, 2), (1, 4), (0, 2)]


def test_a_copy_is_read_once_for_all_its_columns(store: Store):
    check_received(for_node(eight_rows(store).select([3, 1, 6]), "here"), [3, 1, 6])
    assert store.gets == [["copy 1", "copy 2"]]


def test_rows_of_ranks_that_are_busy_are_read_from_whole_objects_and_others_from_copies(store: Store):
    store.busy = {0}
    check_received(for_node(eight_rows(store).select([5, 0, 7, 4]), "here"), [5, 0, 7, 4])
    assert [rank for rank, _ in store.asked] == [1]


def test_rows_of_a_rank_that_died_are_read_from_whole_objects_with_one_warning(
    store: Store, caplog: pytest.LogCaptureFixture
):
    store.dead = {1}
    with caplog.at_level(logging.WARNING):
        check_received(for_node(eight_rows(store).select([2, 5, 7, 0]), "here"), [2, 5, 7, 0])
    assert caplog.messages == ["a process that was to copy rows has ended (ActorDiedError); whole objects are read"]


def test_many_objects_of_a_rank_are_copied_in_calls_of_bounded_size(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_handles, "_OBJECTS_PER_COPY", 3)
    batch = BatchedDataDict.concat([store.stored(0, 2 * number, 2) for number in range(4)])
    check_received(for_node(batch.select([7, 2, 5, 0]), "here"), [7, 2, 5, 0])
    assert [len(refs) for _, refs in store.asked] == [3, 3, 2]

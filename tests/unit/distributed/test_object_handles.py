"""How a rank reads objects of another node, without Ray: references are texts, and a test says what each gives."""

import pickle
from typing import Any, cast

import pytest
import torch
from ray.exceptions import ActorDiedError, ObjectLostError, OutOfMemoryError, RayError

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import RemoteColumn
from rlpack.distributed import object_handles
from rlpack.distributed.object_handles import ObjectHandle, ObjectReader, RowSource, for_node, handles_of

TOKENS = Ragged.from_rows([[1, 2], [3], [4, 5, 6]], torch.int64)
LOST = ObjectLostError("whole", None, "")


def copy(ref: Any, rows: Any) -> Any:
    """Return the reference to a copy of rows."""
    return "copy"


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
    assert handle.whole is not None
    handle.free("at the end of the call")
    assert (handle.whole, handle.is_readable) == (None, False)


def test_a_rank_that_is_busy_is_asked_for_no_rows():
    handle = ObjectHandle(cast(Any, "whole"), "far", RowSource(lambda: None, lambda ref, rows: None), ("rollout", 1))
    batch = BatchedDataDict({"input_ids": RemoteColumn.whole(handle, "input_ids", TOKENS)}).select([2, 0])
    assert [one.ref for one in handles_of(for_node(batch, "here"))] == ["whole"]

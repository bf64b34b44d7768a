"""The budget of the object store, without Ray: parts are never put anywhere, and room is what a test says."""

import gc
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from rlpack.background_call import BackgroundCall
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from rlpack.batch.remote import RemoteColumn
from rlpack.distributed import ray_store
from rlpack.distributed.errors import StoreFullError
from rlpack.distributed.object_handles import ObjectHandle
from rlpack.distributed.ray_store import RayStore
from rlpack.distributed.store_leases import StoreLease, current_leases

GB = 10**9
# Longer than any test takes: a wait where no room can come exceeds the test's time limit.
LONG_S = 60.0


def store_of(budget: float | None = 100, *, wait_s: float = LONG_S, room: dict[str, Any] | None = None) -> RayStore:
    return RayStore(budget, wait_s=wait_s, room=lambda: room or {"a": (GB, GB)})


def test_others_than_batches_have_the_part_of_a_nodes_store_below_spilling_without_its_share_of_the_budget():
    room = {"large": (GB, 9 * GB), "small": (GB, GB)}
    assert store_of(None, room=room).spare("small") == pytest.approx(0.2 * GB)
    assert store_of(5 * GB, room=room).spare("large") == pytest.approx(2.7 * GB)
    assert store_of(9 * GB, room=room).spare("large") == 0.0
    assert store_of(None, room=room).spare("lost") == 0.0


def test_leases_have_the_room_of_their_nodes_within_the_budget_without_what_is_permanent():
    room = {"a": (GB, GB), "b": (0.5 * GB, GB)}
    store = store_of(1.5 * GB, room=room)
    assert store.room(["a", "b"]) == 1.5 * GB
    assert store.room(["a", "a", "b"]) == pytest.approx(1.2 * GB)  # two thirds of it are on a
    assert store.room(["a", "a"]) == pytest.approx(0.8 * GB)
    dataset = put(store, 100)
    with store.lease("a step"):
        part = put(store, 50)
        assert store.room(["a", "b"]) == 1.5 * GB - 100
        assert (dataset.is_readable, part.is_readable) == (True, True)


@pytest.fixture
def driver_on_a(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        def get_node_id(self) -> str:
            return "a"

    monkeypatch.setattr(ray_store.ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray_store.ray, "put", lambda _: "a reference")


ROWS = BatchedDataDict({"input_ids": Ragged(torch.zeros(100, dtype=torch.int64), torch.full((25,), 4))})  # 1,000 bytes


@pytest.mark.usefixtures("driver_on_a")
def test_the_drivers_own_batches_have_the_room_of_its_node():
    assert store_of(None, room={"a": (GB, GB), "b": (9 * GB, 9 * GB)}).offload_limit() == pytest.approx(0.8 * GB)
    assert store_of(0.5 * GB).offload_limit() == pytest.approx(0.5 * GB)


@pytest.mark.usefixtures("driver_on_a")
def test_rows_are_stored_permanently_if_their_node_has_room_for_them_now():
    room = {"a": (2000, 2000), "b": (GB, GB)}  # 1,600 bytes on a before Ray spills
    store = store_of(None, room=room)
    with store.lease("a step") as lease:
        kept = store.offload_permanently(ROWS)
        assert kept is not None
        assert (store.in_flight, lease.held_bytes) == (1000, 0)
        assert store.offload_permanently(ROWS) is None  # without waiting for the room of others
        assert store.in_flight == 1000
    assert store.in_flight == 1000
    del kept
    gc.collect()
    assert store.in_flight == 0
    with store.lease("a step"):
        rows = store.offload(ROWS)
        assert store.offload_permanently(ROWS) is None  # nor for the end of the step
    assert rows.num_rows == 25


def test_a_lease_counts_what_it_holds_and_the_most_that_it_held():
    store = store_of()
    with store.lease("a step") as lease:
        part, other = put(store, 60), put(store, 30)
        assert (lease.held_bytes, lease.peak_bytes) == (90, 90)
        del part
        gc.collect()
        assert (lease.held_bytes, lease.peak_bytes) == (30, 90)
        later = store.lease("a batch")
        later.hold(batch_in(other))
        later.hold(batch_in(other))
    assert (lease.held_bytes, lease.peak_bytes) == (0, 90)
    assert (later.held_bytes, later.peak_bytes) == (30, 30)


def test_a_lease_may_be_entered_again_in_its_own_block():
    store = store_of()
    with store.lease("a step") as lease:
        handle = lease.run(lambda: lease.run(lambda: put(store, 30)))
        with pytest.raises(StoreFullError):
            lease.run(lambda: put(store, 80))
        assert (lease.held_bytes, handle.is_readable) == (30, True)
        with lease:
            pass
        assert not handle.is_readable
    assert (store.in_flight, current_leases()) == (0, ())


def test_a_thread_that_stores_under_a_lease_leaves_the_leases_of_others_as_they_are():
    store = store_of()
    with store.lease("a step"):
        with store.lease("a part") as part:
            run_in_thread(lambda: part.run(lambda: put(store, 30))).join(LONG_S)
        handle = put(store, 50)
    assert (handle.is_readable, store.in_flight) == (False, 0)


def test_a_handle_that_the_thread_that_asks_ray_collects_holds_nobody_up():
    handles: list[ObjectHandle] = []

    def collect() -> dict[str, tuple[float, float]]:
        if handles:
            thread = run_in_thread(handles.clear)
            thread.join(5.0)
            assert not thread.is_alive(), "it waits for the lock of the thread that asks"
        return {"a": (GB, GB)}

    store = RayStore(100, wait_s=LONG_S, room=collect)
    with store.lease("a step"):
        handles.append(put(store, 60))
        handles.append(put(store, 30))
        kept = put(store, 80)
        assert (store.in_flight, kept.is_readable) == (80, True)


def test_a_lease_that_is_released_while_a_thread_stores_under_it_holds_nothing():
    store = store_of()
    lease, handles = store.lease("a batch"), list[ObjectHandle]()
    inside, released = threading.Event(), threading.Event()

    def reserve() -> None:
        with store.reserve({"a": 60}, "rollout", "generate") as room:
            inside.set()
            assert released.wait(LONG_S)
            handles.append(room.keep(cast(Any, "a reference"), 40, "a", None, ("rollout", 0)))

    thread = run_in_thread(lambda: lease.run(reserve))
    assert inside.wait(LONG_S)
    lease.release()
    released.set()
    thread.join(LONG_S)
    assert (lease.held_bytes, store.in_flight) == (0, 40)
    handles.clear()
    gc.collect()
    assert (lease.held_bytes, store.in_flight) == (0, 0)


def put(store: RayStore, size: int, node: str = "a") -> ObjectHandle:
    """Reserve room for a part, and keep it."""
    with store.reserve({node: size}, "rollout", "generate") as room:
        return room.keep(cast(Any, "a reference"), size, node, None, ("rollout", 0))


@contextmanager
def refused_within(seconds: float) -> Iterator[pytest.ExceptionInfo[StoreFullError]]:
    began = time.monotonic()
    with pytest.raises(StoreFullError) as full:
        yield full
    assert time.monotonic() - began < seconds


@contextmanager
def other_step(store: RayStore, size: int, node: str = "a") -> Iterator[Callable[[], None]]:
    """Have a step of another thread hold bytes; yield what ends it."""
    has_begun, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with store.lease("a step"):
            part = put(store, size, node)
            has_begun.set()
            assert may_end.wait(LONG_S)
            assert part.is_readable

    thread = threading.Thread(target=hold)
    thread.start()
    assert has_begun.wait(LONG_S)
    try:
        yield may_end.set
    finally:
        may_end.set()
        thread.join()


def batch_in(*handles: ObjectHandle) -> BatchedDataDict:
    """Return a batch with one row in each of these objects."""
    row = Ragged.from_rows([[1, 2]], torch.int64)
    columns = [RemoteColumn.whole(handle, "input_ids", row) for handle in handles]
    return BatchedDataDict({"input_ids": RemoteColumn.concat(columns)})


def test_a_step_gives_back_what_it_took_and_its_parts_are_gone():
    store = store_of()
    with store.lease("a step"):
        first, second = put(store, 60), put(store, 40)
        assert (store.in_flight, first.ref, second.ref) == (100, "a reference", "a reference")
    assert store.in_flight == 0
    with pytest.raises(DataError, match="were released at the end of a step; read them earlier"):
        pickle.dumps(first)
    assert (store.pop_peak_bytes(), store.pop_peak_bytes()) == (100, 0)


def test_what_nobody_has_any_more_is_given_back_before_the_step_ends():
    store = store_of()
    with store.lease("a step"):
        part = put(store, 60)
        assert store.in_flight == 60
        del part
        gc.collect()
        assert store.in_flight == 0
        kept = put(store, 100)
        assert kept.is_readable


def test_what_is_put_away_outside_of_steps_stays_as_long_as_someone_has_it():
    store = store_of()
    kept = put(store, 30)
    with store.lease("a step"):
        part = put(store, 70)
        assert part.is_readable
    assert (store.in_flight, kept.ref) == (30, "a reference")
    del kept
    gc.collect()
    assert store.in_flight == 0


def test_a_reservation_that_is_not_used_is_given_back():
    store = store_of()
    with pytest.raises(ValueError, match="a rank died"), store.reserve({"a": 80}, "rollout", "generate"):
        raise ValueError("a rank died")
    assert store.in_flight == 0


def test_steps_inside_of_steps_end_by_themselves():
    store = store_of()
    with store.lease("a step"):
        outer = put(store, 10)
        with store.lease("a step"):
            inner = put(store, 20)
        assert (store.in_flight, outer.is_readable, inner.is_readable) == (10, True, False)


def test_a_result_over_the_whole_budget_is_refused_at_once():
    with refused_within(4) as full:
        put(store_of(), 101)
    assert (full.value.role, full.value.method, full.value.size, full.value.short) == ("rollout", "generate", 101, 1)
    assert "raise placement.object_store_gb" in str(full.value)
    assert str(pickle.loads(pickle.dumps(full.value))) == str(full.value)


def test_ray_is_asked_again_only_for_what_is_large_next_to_its_last_answer(monkeypatch: pytest.MonkeyPatch):
    answers, free = [0], [GB]

    def room() -> dict[str, tuple[float, float]]:
        answers[0] += 1
        return {"a": (free[0], GB)}

    store = RayStore(None, wait_s=LONG_S, room=room, is_interrupted=lambda: True)
    with store.lease("step 1 of train"):
        handles = [put(store, GB // 1000) for _ in range(10)]
        assert answers == [1]  # of the start; these are 1 % of the room together
        handles.append(put(store, GB // 1000))
        assert answers == [2]
        handles.append(put(store, GB // 50))
        assert answers == [3]
        free[0] = GB // 5  # another run has taken the rest
        handles.append(put(store, GB // 1000))
        assert answers == [3]
        monkeypatch.setattr(ray_store, "_FRESH_S", 0.0)
        with pytest.raises(StoreFullError):
            put(store, GB // 1000)
        assert answers == [4]


def test_what_the_steps_own_bytes_leave_no_room_for_is_refused_at_once():
    store = store_of()
    with store.lease("a step"):
        outer = put(store, 60)
        with refused_within(4) as full, store.lease("a step"):
            put(store, 60)
        assert full.value.short == 20
        with refused_within(4):
            put(store, 60)
        assert put(store, 40).is_readable
        assert outer.is_readable


def test_a_step_does_not_wait_for_another_whose_end_would_not_help():
    store = store_of()
    with other_step(store, 1), store.lease("a step"):
        own = put(store, 60)
        with refused_within(4):
            put(store, 60)
        assert own.is_readable


def test_a_step_waits_for_another_one_to_end():
    store = store_of()
    with other_step(store, 80) as end, store.lease("a step"):
        threading.Timer(0.2, end).start()
        began = time.monotonic()
        part = put(store, 60)
        assert 0.1 < time.monotonic() - began < 30
        assert (store.in_flight, part.is_readable) == (60, True)


def reserving(store: RayStore, size: int, lease: StoreLease) -> BackgroundCall[ObjectHandle]:
    """Store bytes under a lease in a thread of its own, which has begun to wait for room."""
    call = BackgroundCall(lambda: lease.run(lambda: put(store, size)), name="draw")
    assert not call.wait(0.3)
    return call


@pytest.mark.parametrize("awaits", [lambda store, lease: store.waiting(), lambda store, lease: lease.awaited()])
def test_no_call_waits_for_the_release_of_a_thread_that_waits_for_it(awaits: Callable[..., Any]):
    store = store_of()
    with store.lease("a step"):
        own = put(store, 60)
        lease = store.lease("a batch")
        call = reserving(store, 50, lease)
        with store.lease("another batch").awaited():
            assert not call.wait(0.3)
        with awaits(store, lease):
            assert call.wait(4.0)
        with pytest.raises(StoreFullError):
            call.outcome()
        assert own.is_readable
        call = reserving(store, 50, store.lease("a batch"))
    assert call.wait(4.0)
    assert call.outcome().is_readable


def test_what_a_thread_that_ended_has_stored_is_waited_for_by_one_that_gets_its_number():
    store = store_of()
    first, second, idents = store.lease("batch 1"), store.lease("batch 2"), list[int]()

    def keep() -> None:
        idents.append(threading.get_ident())
        first.run(lambda: handles.append(put(store, 60)))

    def wait() -> None:
        if threading.get_ident() == idents[0]:
            second.run(lambda: handles.append(put(store, 60)))

    handles: list[ObjectHandle] = []
    run_in_thread(keep).join()
    threads = []
    while len(handles) < 2 and len(threads) < 50:
        threads.append(run_in_thread(wait))
        threads[-1].join(0.3)
        first.release()
        threads[-1].join()
    assert len(handles) == 2 or len(threads) == 50


def run_in_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_a_wait_for_another_step_has_a_deadline():
    store = store_of(wait_s=0.3)
    with other_step(store, 80), store.lease("a step"), refused_within(30):
        put(store, 60)


def test_a_result_of_numbers_needs_no_room():
    store = store_of(wait_s=LONG_S, room={"a": (0.0, GB)})
    with store.reserve({"a": 0}, "reward", "score"):
        assert store.in_flight == 0


def test_the_budget_is_a_share_of_the_store_where_none_is_given():
    assert store_of(None, room={"a": (10 * GB, 10 * GB)}).budget == 6 * GB


def test_a_step_does_not_wait_for_what_is_held_for_good():
    store = store_of()
    dataset = put(store, 20)
    with store.lease("a step"):
        own = put(store, 70)
        with refused_within(4):
            put(store, 15)
        assert (own.is_readable, dataset.is_readable) == (True, True)


def test_a_payload_lives_until_the_last_lease_on_it_is_released():
    store = store_of()
    later = store.lease("the batch begun at step 7")
    with store.lease("step 7"):
        first, second = put(store, 60), put(store, 30)
        later.hold(batch_in(first))
    assert (store.in_flight, first.is_readable, second.is_readable) == (60, True, False)
    with store.lease("step 8") as step:
        step.hold(batch_in(first))
        later.release()
        assert (store.in_flight, first.is_readable) == (60, True)
    assert (store.in_flight, first.is_readable) == (0, False)
    with pytest.raises(DataError, match="were released at the end of step 8; read them earlier"):
        pickle.dumps(first)
    with pytest.raises(DataError, match="were released at the end of step 7; read them earlier"):
        later.hold(batch_in(second))


def test_a_lease_can_be_released_early_and_again():
    store = store_of()
    with store.lease("step 1") as lease:
        first = put(store, 60)
        lease.release()
        assert (store.in_flight, first.is_readable) == (0, False)
        second = put(store, 90)
    lease.release()
    assert (store.in_flight, second.is_readable) == (90, True)  # stored under no lease


def test_a_lease_that_is_released_late_leaves_a_newer_one_current():
    store = store_of()
    failed, again = store.lease("step 1"), store.lease("step 1, again")
    failed.__enter__()
    failed.release()
    with again:
        failed.__exit__(None, None, None)
        handle = put(store, 60)
    assert (store.in_flight, handle.is_readable) == (0, False)


def test_a_lease_does_not_end_what_is_stored_permanently():
    store = store_of()
    dataset = put(store, 20)
    with store.lease("step 1") as lease:
        lease.hold(batch_in(dataset))
        assert store.pop_peak_bytes() == 0
    assert (store.in_flight, dataset.is_readable) == (20, True)


def test_what_a_lease_holds_is_given_back_once_nobody_has_it():
    store = store_of()
    lease = store.lease("a batch")
    with store.lease("step 1"):
        handle = put(store, 60)
        lease.hold(batch_in(handle))
    del handle
    gc.collect()
    assert store.in_flight == 0
    lease.release()


def test_bytes_under_two_leases_count_once():
    store = store_of()
    with store.lease("step 1"), store.lease("evaluation") as inner:
        handle = put(store, 60)
        inner.hold(batch_in(handle))
        assert (store.in_flight, store.pop_peak_bytes()) == (60, 60)
        assert put(store, 40).is_readable


def test_no_wait_is_made_for_another_lease_of_the_same_thread():
    store = store_of()
    begun = store.lease("the batch begun at step 1")
    with store.lease("step 1"):
        handle = put(store, 60)
        begun.hold(batch_in(handle))
    with refused_within(4), store.lease("step 2"):
        put(store, 60)
    begun.release()
    with store.lease("step 2"):
        assert put(store, 60).is_readable


def test_a_lease_holds_what_a_function_in_another_thread_stored():
    store = store_of()
    begun = store.lease("the batch of step 2")
    handles: list[ObjectHandle] = []
    thread = threading.Thread(target=begun.run, args=(lambda: handles.append(put(store, 60)),))
    thread.start()
    thread.join(LONG_S)
    with store.lease("step 1"):
        assert handles[0].is_readable
    assert handles[0].is_readable
    begun.release()
    assert (handles[0].is_readable, store.in_flight) == (False, 0)


def test_a_function_under_a_lease_leaves_the_current_one_current():
    store = store_of()
    begun = store.lease("the batch of step 2")
    with store.lease("step 1"):
        held = begun.run(lambda: put(store, 20))
        own = put(store, 30)
    assert (held.is_readable, own.is_readable, store.in_flight) == (True, False, 20)


def test_no_wait_is_made_for_a_batch_that_another_thread_stored_for_this_one():
    store = store_of()
    begun = store.lease("the batch of step 2")  # only this thread releases it
    held: list[ObjectHandle] = []
    thread = threading.Thread(target=begun.run, args=(lambda: held.append(put(store, 60)),))
    thread.start()
    thread.join(LONG_S)
    with refused_within(4), store.lease("step 1"):
        put(store, 60)


def test_a_batch_that_is_drawn_ahead_waits_for_the_room_of_the_step_in_progress():
    store = store_of()
    begun = store.lease("the batch of step 2")
    held: list[ObjectHandle] = []
    thread = threading.Thread(target=begun.run, args=(lambda: held.append(put(store, 60)),))
    with store.lease("step 1"):
        own = put(store, 60)
        thread.start()
        thread.join(0.5)
        assert own.is_readable
        assert not held
    thread.join(LONG_S)
    assert held[0].is_readable

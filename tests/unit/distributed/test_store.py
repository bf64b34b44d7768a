"""The budget of the object store, without Ray: parts are never put anywhere, and room is what a test says."""

import pickle
import threading
import time
from typing import Any, cast

import pytest

from rlpack.data.errors import DataError
from rlpack.distributed.errors import StoreFullError
from rlpack.distributed.store import RayStore, StoredPart

GB = 10**9


def store_of(budget: float | None = 100, *, wait_s: float = 20.0, free: float = GB, total: float = GB) -> RayStore:
    return RayStore(budget, wait_s=wait_s, room=lambda: (free, total))


def part() -> StoredPart:
    return StoredPart(cast(Any, "a reference"))


def test_a_step_gives_back_what_it_took_and_its_parts_are_gone():
    store = store_of()
    with store.step():
        store.reserve(60, "rollout", "generate")
        first = store.keep(part())
        store.reserve(40, "rollout", "generate")
        assert (store.in_flight, first.ref) == (100, "a reference")
    assert store.in_flight == 0
    with pytest.raises(DataError, match="freed when its step ended"):
        pickle.dumps(first)
    assert (store.take_peak(), store.take_peak()) == (100, 0)


def test_what_is_put_away_outside_of_steps_stays():
    store = store_of()
    store.reserve(30, "driver", "put")
    kept = store.keep(part())
    with store.step():
        store.reserve(70, "rollout", "generate")
    assert (store.in_flight, kept.ref) == (30, "a reference")


def test_steps_inside_of_steps_end_by_themselves():
    store = store_of()
    with store.step():
        store.reserve(10, "a", "b")
        with store.step():
            store.reserve(20, "a", "b")
        assert store.in_flight == 10
        store.reserve(5, "a", "b")
    assert store.in_flight == 0


def test_a_result_over_the_whole_budget_is_refused_at_once():
    began = time.monotonic()
    with pytest.raises(StoreFullError, match=r"raise placement\.object_store_gb") as full:
        store_of().reserve(101, "rollout", "generate")
    assert (full.value.role, full.value.method, full.value.size, full.value.short) == ("rollout", "generate", 101, 1)
    assert time.monotonic() - began < 1
    assert str(pickle.loads(pickle.dumps(full.value))) == str(full.value)


def test_a_step_that_fills_the_store_itself_is_refused_soon():
    store = store_of(wait_s=0.2)
    with store.step():
        store.reserve(60, "rollout", "generate")
        with pytest.raises(StoreFullError) as full:
            store.reserve(60, "actor", "logprobs")
        assert full.value.short == 20
        store.reserve(40, "actor", "logprobs")


def test_a_step_waits_for_another_one_to_end():
    store, has_begun, may_end = store_of(), threading.Event(), threading.Event()

    def other() -> None:
        with store.step():
            store.reserve(80, "rollout", "generate")
            has_begun.set()
            assert may_end.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert has_begun.wait(10)
    threading.Timer(0.2, may_end.set).start()
    with store.step():
        began = time.monotonic()
        store.reserve(60, "rollout", "generate")
        assert 0.1 < time.monotonic() - began < 10
        assert store.in_flight == 60
    thread.join()


def test_a_wait_for_another_step_has_a_deadline():
    store, has_begun, may_end = store_of(wait_s=0.3), threading.Event(), threading.Event()

    def other() -> None:
        with store.step():
            store.reserve(80, "rollout", "generate")
            has_begun.set()
            assert may_end.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert has_begun.wait(10)
    with store.step(), pytest.raises(StoreFullError):
        store.reserve(60, "rollout", "generate")
    may_end.set()
    thread.join()


def test_the_store_keeps_a_fifth_of_its_memory_free_before_it_would_write_to_disk():
    store = store_of(GB, wait_s=0.2, free=0.3 * GB)
    store.reserve(int(0.09 * GB), "rollout", "generate")
    with pytest.raises(StoreFullError) as full:
        store.reserve(int(0.11 * GB), "rollout", "generate")
    assert full.value.short == pytest.approx(0.01 * GB)


def test_the_budget_is_a_share_of_the_store_where_none_is_given():
    assert store_of(None, total=10 * GB).budget == 6 * GB

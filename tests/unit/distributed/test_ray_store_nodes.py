"""The object stores of single nodes, each of which may be full while the budget of all is not; without Ray."""

import threading
import time

import pytest

from rlpack.distributed import ray_store
from tests.unit.distributed.test_ray_store import GB, other_step, put, refused_within, store_of

THREE_NODES = dict.fromkeys("abc", (GB, GB))


def test_a_node_keeps_a_fifth_of_its_store_free_before_it_would_write_to_disk():
    store = store_of(2 * GB, wait_s=0.2, room={"a": (0.3 * GB, GB), "b": (GB, GB)})
    kept = [put(store, int(0.09 * GB)), put(store, int(0.79 * GB), "b")]
    with refused_within(30) as full:
        put(store, int(0.11 * GB))
    assert full.value.short == pytest.approx(0.01 * GB)
    with refused_within(30) as full:
        put(store, int(0.02 * GB), "b")
    assert all(part.is_readable for part in kept)
    assert str(full.value).startswith(
        "role rollout, in generate: 20 MB of tokens and texts exceed the free room in the object store of node b by 10 "
        "MB: 790 MB of the 800 MB for batches are in use there; lower trainer.prompts_per_step"
    )
    assert str(full.value).endswith("(on an existing cluster: ray start --object-store-memory)")


def test_a_wait_for_another_steps_bytes_on_one_node_is_as_long_as_for_those_of_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_store, "_SETTLE_S", 0.2)
    store = store_of(None, room=THREE_NODES)
    with other_step(store, GB // 2, "b") as end, store.lease("a step"):
        threading.Timer(1.0, end).start()
        assert put(store, GB // 2, "b").is_readable


def test_room_that_ray_has_yet_to_report_on_a_node_is_not_waited_for_as_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_store, "_SETTLE_S", 0.2)
    store = store_of(None, room={**THREE_NODES, "b": (0.3 * GB, GB)})
    began = time.monotonic()
    with refused_within(4) as full:
        put(store, GB // 2, "b")
    assert time.monotonic() - began >= 0.2
    assert full.value.short == pytest.approx(0.4 * GB)


def test_a_step_does_not_wait_for_room_on_a_node_that_its_own_bytes_fill():
    store = store_of(None, room=THREE_NODES)
    with other_step(store, GB // 10, "b"), store.lease("a step"):
        own = put(store, GB // 2, "b")
        with refused_within(4):
            put(store, GB // 2, "b")
        assert put(store, GB // 2, "c").is_readable
        assert own.is_readable


def test_a_result_over_the_limit_of_its_node_is_refused_at_once():
    with refused_within(4):
        put(store_of(None, room=THREE_NODES), int(0.9 * GB), "b")

"""The object stores of single nodes, each of which may be full while the budget of all is not; without Ray."""

import pickle
import threading
import time
from functools import partial

import pytest

from rlpack.distributed import ray_store
from rlpack.distributed.ray_store import RayStore
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
    store = store_of(None, room={**THREE_NODES, "b": (0.85 * GB, GB)})
    began = time.monotonic()
    with refused_within(4) as full:
        put(store, int(0.7 * GB), "b")
    assert time.monotonic() - began >= 0.2
    assert full.value.short == pytest.approx(0.05 * GB)


def test_room_that_others_on_a_cluster_hold_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(ray_store, "_SETTLE_S", 0.2)
    room = {"a": (0.4 * GB, GB)}
    store = store_of(None, room=room)
    leave = partial(room.update, a=(GB, GB))  # once the wait is logged
    monkeypatch.setattr(ray_store.logger, "filters", [lambda record: leave() is None])
    assert put(store, GB // 4).is_readable
    assert [record.message for record in caplog.records] == [
        "role rollout, in generate: waits up to 60 s for room in the object store, of which others, such as another "
        "run on this cluster, hold 600 MB"
    ]


def test_a_run_that_is_stopped_does_not_wait_for_room_that_others_hold():
    stops = iter([False, False, True])
    room = {"a": (0.4 * GB, GB)}
    store = RayStore(None, wait_s=60.0, room=lambda: room, is_interrupted=lambda: next(stops))
    with refused_within(30) as full:
        put(store, GB // 4)
    assert "hold 600 MB" in str(full.value)


def test_on_a_runs_own_cluster_nobody_else_holds_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_store, "_SETTLE_S", 0.1)
    room = {"a": (0.4 * GB, GB)}
    store = RayStore(None, wait_s=60.0, room=lambda: room, has_others=False)
    with refused_within(30) as full:
        put(store, GB // 4)
    assert "others" not in str(full.value)


def test_the_error_of_a_store_that_others_fill_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_store, "_SETTLE_S", 0.1)
    store = store_of(None, wait_s=0.5, room={"a": (0.4 * GB, GB)})
    began = time.monotonic()
    with refused_within(30) as full:
        put(store, GB // 4)
    assert time.monotonic() - began >= 0.5
    assert str(full.value).startswith(
        "role rollout, in generate: 250 MB of tokens and texts exceed the free room in the object store of node a by "
        "50 MB: 0 bytes of the 800 MB for batches are in use there, and others, such as another run on this cluster, "
        "hold 600 MB; wait until they end, lower trainer.prompts_per_step"
    )
    assert str(pickle.loads(pickle.dumps(full.value))) == str(full.value)


@pytest.mark.parametrize(
    ("budget", "of_store", "of_others"),
    [
        (None, 0.19, 0.0),  # weights in transit
        (None, 0.41, 0.41),
        (0.6, 0.49, 0.0),  # a small budget leaves more of the store to weights
        (2.4, 0.19, 0.0),
        (2.4, 0.41, 0.41),
    ],
)
def test_bytes_that_this_run_does_not_count_are_not_taken_for_those_of_others(
    monkeypatch: pytest.MonkeyPatch, budget: float | None, of_store: float, of_others: float
):
    monkeypatch.setattr(ray_store, "_SETTLE_S", 0.1)
    room = {**THREE_NODES, "b": ((1 - of_store) * GB, GB)}
    store = store_of(None if budget is None else budget * GB, wait_s=0.1, room=room)
    kept = put(store, int(0.2 * GB), "a")  # copies of it may be on the other nodes
    with refused_within(30) as full:
        put(store, int(0.79 * GB), "b")
    assert kept.is_readable
    shortage = full.value.args[3]
    assert shortage.others == pytest.approx(of_others * GB)


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

"""Restarted runs wait for nodes that are missing; others don't."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from rlpack.config.schema import Placement, Pool
from rlpack.distributed import cluster as cluster_module
from rlpack.distributed import missing_nodes, ray_store
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.errors import PlacementError
from rlpack.distributed.missing_nodes import expect_missing_nodes, wait_for_capacity
from rlpack.user_code import Interrupted


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_nodes._Process, "is_restarted", False)
    monkeypatch.setattr(missing_nodes, "_LOOK_S", 0.01)


def passing_at(number: int) -> tuple[Callable[[], None], list[int]]:
    """Return a check that passes when it is called the n-th time, and the numbers of its calls."""
    calls: list[int] = []

    def check() -> None:
        calls.append(len(calls) + 1)
        if len(calls) < number:
            raise PlacementError("the pools main ask for 2 CPU, the cluster has 1")

    return check, calls


def test_a_run_that_was_not_restarted_is_refused_at_once():
    check, calls = passing_at(2)
    with pytest.raises(PlacementError, match="ask for 2 CPU"):
        wait_for_capacity(check, 60.0, lambda: False)
    assert calls == [1]


def test_a_restarted_run_waits_for_its_nodes_with_one_warning(caplog: pytest.LogCaptureFixture):
    expect_missing_nodes()
    check, calls = passing_at(4)
    wait_for_capacity(check, 60.0, lambda: False)
    assert calls == [1, 2, 3, 4]
    assert [record.getMessage() for record in caplog.records] == [
        "the pools main ask for 2 CPU, the cluster has 1. The run was restarted, so a node may be missing temporarily: "
        "waiting up to placement.start_timeout_s=60 s for it"
    ]


def test_the_wait_ends_at_the_deadline_and_when_it_is_interrupted():
    expect_missing_nodes()
    check, calls = passing_at(10**9)
    with pytest.raises(PlacementError, match="ask for 2 CPU"):
        wait_for_capacity(check, 0.05, lambda: False)
    assert len(calls) > 1
    with pytest.raises(Interrupted):
        wait_for_capacity(check, 60.0, lambda: True)


@pytest.mark.parametrize("in_flight_gb", [None, 12.0])
def test_the_store_of_a_restarted_run_is_measured_with_the_nodes_that_it_waited_for(
    monkeypatch: pytest.MonkeyPatch, in_flight_gb: float | None
):
    nodes = {"a": 10e9}
    placement = Placement(address="auto", pools={"main": Pool(ranks=2)}, in_flight_gb=in_flight_gb)
    opened: list[float] = []

    def join(*_: object) -> None:
        if not nodes.keys() >= {"b"}:
            nodes["b"] = 10e9
            raise PlacementError("the pools main ask for 2 CPU, the cluster has 1")

    def stores() -> dict[str, tuple[float, float]]:
        found = {node: (size, size) for node, size in nodes.items()}
        if in_flight_gb is not None:
            nodes["b"] = 10e9
        return found

    expect_missing_nodes()
    for name in ("connect", "disconnect"):
        monkeypatch.setattr(cluster_module, name, lambda *_: None)
    monkeypatch.setattr(cluster_module, "_check_capacity", join)
    monkeypatch.setattr(cluster_module, "reserve", lambda *_: opened.append(cluster.store.budget) or {})
    monkeypatch.setattr(cluster_module, "RayRanks", Mock())
    monkeypatch.setattr(ray_store, "stores", stores)
    cluster = Cluster(placement)
    cluster.open_pools(["main"])
    assert cluster.store.size == 20e9
    assert opened == [cluster.store.budget] == [12e9]

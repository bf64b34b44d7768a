"""Which devices the ranks of a pool get on a cluster that others use; Ray's placement groups are simulated."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Barrier, Event, Lock
from time import sleep
from typing import Any, cast

import pytest
import ray

from rlpack.config.schema import Pool
from rlpack.distributed import reservations
from rlpack.distributed.errors import PlacementError
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.reservations import bundles_by_rank, reserve
from rlpack.user_code import Interrupted


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("devices", [(8, 8, 8, 8), (4, 8, 8, 4), (1, 2)])
def test_the_ranks_of_a_node_are_consecutive_in_whatever_order_bundles_are_placed(devices: tuple[int, ...], seed: int):
    placed = [f"node{node}" for node, free in enumerate(devices) for _ in range(free)]
    random.Random(seed).shuffle(placed)
    node_of = dict(enumerate(placed))

    bundles = bundles_by_rank(node_of)

    assert sorted(bundles) == sorted(node_of)
    nodes = [node_of[bundle] for bundle in bundles]
    sizes = [nodes.count(node) for node in dict.fromkeys(nodes)]
    assert nodes == [node for node, size in zip(dict.fromkeys(nodes), sizes, strict=True) for _ in range(size)]
    assert sizes == sorted(devices, reverse=True)


def test_bundles_on_one_node_keep_their_order():
    assert bundles_by_rank(dict.fromkeys(range(12), "a")) == tuple(range(12))


def test_tensor_parallel_groups_are_within_nodes_if_partly_free_nodes_come_first():
    node_of = {bundle: "half a" if bundle < 4 else "whole" if bundle < 12 else "half b" for bundle in range(16)}
    layout = ParallelLayout(dp_shard=4, tp=4)
    nodes = [node_of[bundle] for bundle in bundles_by_rank(node_of)]
    assert nodes[:8] == ["whole"] * 8
    for data_rank in range(4):
        assert len({nodes[rank] for rank in range(16) if layout.dp_rank_of(rank) == data_rank}) == 1


class Devices:
    """Ray's placement groups on one node with 8 GPUs: a group is pending until all its bundles fit.

    Attributes:
        free: number of GPUs that no group has.
        on_request: called after each request.
        requested: the bundles of each request.
    """

    def __init__(self) -> None:
        self.free = 8
        self.on_request: Callable[[], None] = lambda: None
        self.requested: list[list[dict[str, float]]] = []
        self._groups: dict[int, tuple[int, bool]] = {}
        self._numbers, self._lock = count(), Lock()

    def request(self, bundles: list[dict[str, float]], strategy: str) -> int:
        assert strategy == "PACK"
        with self._lock:
            number = next(self._numbers)
            self.requested.append(bundles)
            self._groups[number] = (len(bundles), False)
            self._place()
        self.on_request()
        return number

    def remove(self, group: int) -> None:
        with self._lock:
            size, has_devices = self._groups.pop(group)
            self.free += size * has_devices
            self._place()

    def table(self, group: int) -> dict[str, Any]:
        with self._lock:
            size, has_devices = self._groups[group]
        nodes = dict.fromkeys(range(size), "node" if has_devices else "")
        return {"state": "CREATED" if has_devices else "PENDING", "bundles_to_node_id": nodes}

    def _place(self) -> None:
        for number, (size, has_devices) in self._groups.items():
            if not has_devices and size <= self.free:
                self._groups[number] = (size, True)
                self.free -= size


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices()
    monkeypatch.setattr(reservations, "placement_group", devices.request)
    monkeypatch.setattr(reservations, "remove_placement_group", devices.remove)
    monkeypatch.setattr(reservations, "placement_group_table", devices.table)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 8.0, "GPU": float(devices.free)})
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 8.0})
    monkeypatch.setattr(reservations, "_LOOK_S", 0.005)
    monkeypatch.setattr(reservations, "_FIRST_HOLD_S", 0.05)
    return devices


HALVES = {name: Pool(ranks=4, gpus_per_rank=1.0) for name in ("main", "engines")}


def test_pools_that_fit_are_reserved_together(devices: Devices):
    reserved = reserve(HALVES, timeout_s=10.0)
    assert {name: one.bundles for name, one in reserved.items()} == dict.fromkeys(HALVES, (0, 1, 2, 3))
    assert devices.free == 0


def test_two_runs_that_each_hold_half_of_the_devices_get_all_of_them_one_after_the_other(devices: Devices):
    both_hold_half, requests = Barrier(2), count()
    num_reserved: list[int] = []

    def meet() -> None:
        if next(requests) < 2:
            both_hold_half.wait(timeout=10.0)

    def run() -> None:
        reserved = reserve(HALVES, timeout_s=20.0)
        num_reserved.append(len(reserved))
        for one in reserved.values():
            devices.remove(cast(int, one.group))

    devices.on_request = meet
    with ThreadPoolExecutor(2) as threads:
        for end in [threads.submit(run) for _ in range(2)]:
            end.result(timeout=60.0)
    assert num_reserved == [2, 2]
    assert devices.free == 8


def test_a_run_that_waits_for_its_second_pool_lets_another_run_have_the_first(devices: Devices):
    long_run = devices.request([{"GPU": 1.0}] * 4, "PACK")
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(reserve, HALVES, timeout_s=20.0)
        while devices.free:
            sleep(0.001)
        small = threads.submit(reserve, {"main": HALVES["main"]}, timeout_s=20.0).result(timeout=60.0)
        assert not waiting.done()
        for group in (long_run, cast(int, small["main"].group)):
            devices.remove(group)
        assert set(waiting.result(timeout=60.0)) == set(HALVES)


@pytest.mark.parametrize("fails", ["placement_group", "placement_group_table"])
def test_an_error_of_ray_leaves_no_devices_reserved(devices: Devices, monkeypatch: pytest.MonkeyPatch, fails: str):
    original, calls = getattr(reservations, fails), count()

    def fail_at_the_second_call(*args: Any, **named: Any) -> Any:
        if next(calls):
            raise RuntimeError("Ray has ended")
        return original(*args, **named)

    monkeypatch.setattr(reservations, fails, fail_at_the_second_call)
    with pytest.raises(RuntimeError, match="Ray has ended"):
        reserve(HALVES, timeout_s=10.0)
    assert devices.free == 8


def test_a_run_with_two_pools_gets_its_devices_among_runs_with_one(devices: Devices):
    has_all = Event()

    def small_run() -> None:
        while not has_all.is_set():
            (one,) = reserve({"main": HALVES["main"]}, timeout_s=30.0).values()
            sleep(0.3)
            devices.remove(cast(int, one.group))

    with ThreadPoolExecutor(5) as threads:
        small = [threads.submit(small_run) for _ in range(4)]
        sleep(0.1)
        large = threads.submit(reserve, HALVES, timeout_s=30.0)
        try:
            reserved = large.result(timeout=60.0)
        finally:
            has_all.set()
        for one in reserved.values():
            devices.remove(cast(int, one.group))
        for end in small:
            end.result(timeout=60.0)


def test_devices_that_others_keep_end_the_wait_at_its_deadline_and_none_are_held(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(reservations, "_WARN_S", 0.05)
    monkeypatch.setattr(reservations, "_FIRST_HOLD_S", 60.0)
    devices.request([{"GPU": 1.0}] * 4, "PACK")
    with pytest.raises(PlacementError) as refused:
        reserve(HALVES, timeout_s=0.3)
    claim = "4 ranks of 1 CPU, 1 GPU each for pool engines; 8 CPU, 0 GPU are free"
    assert str(refused.value) == (
        f"placement.start_timeout_s (0.3) passed without {claim}; wait for others to finish, raise the limit, or lower "
        "placement.pools.engines.ranks"
    )
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting up to 0.3 s for devices in use elsewhere: {claim}"
    ]
    assert devices.free == 4


@pytest.mark.parametrize("first_hold_s", [60.0, 1e-9], ids=["holding half", "pausing"])
def test_an_interrupted_run_stops_waiting_and_holds_no_devices(
    devices: Devices, first_hold_s: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reservations, "_FIRST_HOLD_S", first_hold_s)
    devices.request([{"GPU": 1.0}] * 4, "PACK")
    questions = count()
    with pytest.raises(Interrupted):
        reserve(HALVES, timeout_s=20.0, is_interrupted=lambda: next(questions) > 3)
    assert devices.free == 4


def test_the_pools_with_the_largest_ranks_are_requested_first(devices: Devices):
    pools = {
        "scores": Pool(ranks=1, cpus_per_rank=2.0),
        "main": Pool(ranks=2, gpus_per_rank=1.0),
        "engines": Pool(ranks=2, gpus_per_rank=1.0, cpus_per_rank=4.0),
        "draft": Pool(ranks=1, gpus_per_rank=1.0),
    }
    reserve({**pools, "judge": Pool(ranks=1, gpus_per_rank=2.0)}, timeout_s=10.0)
    sizes = [(len(bundles), bundles[0].get("GPU", 0.0), bundles[0]["CPU"]) for bundles in devices.requested]
    assert sizes == [(1, 2.0, 1.0), (2, 1.0, 4.0), (2, 1.0, 1.0), (1, 1.0, 1.0), (1, 0.0, 2.0)]


@pytest.mark.parametrize(("gpus", "key"), [(2.0, "gpus_per_rank or .cpus_per_rank"), (0.0, "cpus_per_rank")])
def test_pools_that_fit_no_idle_cluster_together_are_said_to_instead_of_others_that_use_it(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpus: float, key: str
):
    monkeypatch.setattr(reservations, "_WARN_S", 0.05)
    monkeypatch.setattr(reservations, "_FIRST_HOLD_S", 60.0)
    pools = {"main": Pool(ranks=3, gpus_per_rank=2.0), "engines": Pool(ranks=6, gpus_per_rank=gpus)}
    # Each of the pools fits, but after main no node has room for the ranks of the engines.
    held = {"CPU": 3.0, "GPU": 6.0}
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 8.0 - held["CPU"], "GPU": 8.0 - held["GPU"]})
    with pytest.raises(PlacementError) as refused:
        reserve(pools, timeout_s=0.3)
    assert str(refused.value).endswith(
        "each for pool engines; 5 CPU, 2 GPU are free and nothing else uses the cluster, so the pools main, engines "
        f"don't fit its nodes together; lower placement.pools.engines.{key}, or the ranks of a pool"
    )
    warning = "waiting up to 0.3 s for devices that no node has free, though the cluster is idle: 6 ranks of "
    assert caplog.records[0].getMessage().startswith(warning)

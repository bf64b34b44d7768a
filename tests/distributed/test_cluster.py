import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private import services

from rlpack.config.schema import Placement, Pool, Role
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.errors import PlacementError, RoleError
from rlpack.distributed.start_roles import start_roles
from tests.builders import tiny_config, tiny_tokenizer
from tests.distributed.roles import Faulty

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def own_processes() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_a_hang_ends_at_its_deadline_and_leaves_no_process(role_path: Path):
    config = tiny_config(
        roles={"sleepy": Role(target="tests.distributed.roles:Faulty")},
        placement=Placement(
            pools={"main": Pool(ranks=2, cpus_per_rank=0.5)}, roles={}, start_timeout_s=240.0, call_timeout_s=3.0
        ),
    )
    before = own_processes()

    def run_until_it_hangs() -> None:
        with Cluster(config.placement) as cluster:
            group = start_roles(cluster, config, ["sleepy"], (config, tiny_tokenizer()))["sleepy"]
            started.update(own_processes() - before)
            times.append(time.monotonic())
            group.run(Faulty.hang, 1)

    started: set[psutil.Process] = set()
    times: list[float] = []
    with pytest.raises(RoleError) as failure:
        run_until_it_hangs()
    assert 3 <= time.monotonic() - times[0] < 60
    assert str(failure.value).startswith("role sleepy, rank 1, in hang: no answer from rank(s) 1 within 3 s; raise")
    assert len(started) > 3
    assert not ray.is_initialized()
    assert not psutil.wait_procs(started, timeout=30)[1]


def stricken(
    monkeypatch: pytest.MonkeyPatch, *, times: int, sent: signal.Signals = signal.SIGKILL
) -> list[subprocess.Popen[bytes]]:
    """Send a signal to Ray's raylet right after it started, the first `times` times; return all that were started."""
    start, started = services.start_raylet, []

    def start_raylet(*args: Any, **options: Any) -> Any:
        info = start(*args, **options)
        started.append(info.process)
        if len(started) <= times:
            info.process.send_signal(sent)
        return info

    monkeypatch.setattr(services, "start_raylet", start_raylet)
    return started


def test_a_raylet_that_ends_while_ray_starts_is_started_again(monkeypatch, caplog):
    started, before = stricken(monkeypatch, times=1), own_processes()
    with Cluster(Placement(pools={"main": Pool(ranks=1)})) as cluster:
        cluster.open_pools(["main"])
    assert len(started) == 2
    assert "Ray's raylet ended while it started, see /" in caplog.text
    assert "starting Ray again (attempt 2 of 3)" in caplog.text
    assert not psutil.wait_procs(own_processes() - before, timeout=30)[1]


def test_a_raylet_that_always_ends_is_said_long_before_the_deadline_and_leaves_no_process(monkeypatch):
    started, before = stricken(monkeypatch, times=9), own_processes()
    began = time.monotonic()
    with pytest.raises(PlacementError, match=r"Ray's raylet ended while it started, see /.*/logs; .*start_timeout_s"):
        Cluster(Placement(start_timeout_s=240.0))
    assert time.monotonic() - began < 120
    assert len(started) == 3
    assert not ray.is_initialized()
    assert not psutil.wait_procs(own_processes() - before, timeout=30)[1]


def test_a_raylet_that_hangs_is_said_at_the_deadline_and_leaves_no_process(monkeypatch):
    stricken(monkeypatch, times=9, sent=signal.SIGSTOP)
    before, began = own_processes(), time.monotonic()
    with pytest.raises(PlacementError, match=r"did not start on this machine within placement\.start_timeout_s=5 s"):
        Cluster(Placement(start_timeout_s=5.0))
    assert time.monotonic() - began < 25
    assert not psutil.wait_procs(own_processes() - before, timeout=30)[1]


def test_more_devices_than_there_are_is_said_at_once():
    pools = {"main": Pool(ranks=1), "accelerated": Pool(ranks=2, gpus_per_rank=1.0)}
    before = own_processes()
    with Cluster(Placement(pools=pools)) as cluster:
        total = max(os.cpu_count() or 1, 3)
        began = time.monotonic()
        with pytest.raises(
            PlacementError,
            match=rf"the pools main, accelerated ask for 2 GPU, the cluster has 0 \({total} CPU, 0 GPU free\); lower",
        ):
            cluster.open_pools(["main", "accelerated"])
        assert time.monotonic() - began < 30
    assert not psutil.wait_procs(own_processes() - before, timeout=30)[1]


def test_an_address_without_a_cluster_is_said():
    with pytest.raises(PlacementError, match=r"no Ray cluster answers at placement\.address=127\.0\.0\.1:1"):
        Cluster(Placement(address="127.0.0.1:1"))


def test_a_budget_over_the_store_is_said_and_leaves_no_process():
    before = own_processes()
    with pytest.raises(
        PlacementError, match=r"in_flight_gb is 1e\+06, and the object stores of all nodes have .*; lower"
    ):
        Cluster(Placement(in_flight_gb=1e6))
    assert not ray.is_initialized()
    assert not psutil.wait_procs(own_processes() - before, timeout=30)[1]

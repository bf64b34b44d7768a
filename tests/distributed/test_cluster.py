import os
import time
from pathlib import Path

import psutil
import pytest
import ray

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

"""Ranks on two nodes, each with an object store of its own, joined by their cluster's address."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster as Machines
from ray.util.placement_group import placement_group_table, remove_placement_group

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Placement, Pool, Role, RoleBatching
from rlpack.distributed import ray_connection
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.errors import ClusterError, PlacementError, RoleError
from rlpack.distributed.ranks import RayRanks
from rlpack.distributed.reservations import reserve
from rlpack.distributed.start_roles import start_roles
from tests.builders import tiny_config, tiny_rollouts, tiny_tokenizer
from tests.distributed.roles import Echo, Faulty
from tests.end_to_end.commands import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SIZES = [(3, 9), (5, 1), (4, 0), (2, 16), (7, 6), (3, 8), (1, 4), (6, 6), (2, 2)]


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        machines = Machines(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 2**27})
        machines.add_node(num_cpus=1, object_store_memory=2**27)
        yield machines
        machines.shutdown()


def test_a_rank_that_no_node_has_room_for_is_refused_at_once(machines: Machines):
    placement = Placement(
        address=machines.address, pools={"main": Pool(ranks=1, cpus_per_rank=2.0)}, start_timeout_s=240.0
    )
    began = time.monotonic()
    with Cluster(placement) as cluster, pytest.raises(PlacementError) as refused:
        cluster.open_pools(["main"])
    assert time.monotonic() - began < 120
    assert "1 ranks of 2 CPU and 0 GPU, each on one node; the cluster's 2 nodes have room for 0 of" in str(
        refused.value
    )
    assert "(2 CPU, 0 GPU free)" in str(refused.value)


def test_ranks_of_a_node_are_consecutive_though_ray_permutes_more_than_sixteen_bundles(machines: Machines):
    pool = Pool(ranks=36, cpus_per_rank=0.05)
    with Cluster(Placement(address=machines.address, pools={"main": pool})):
        reserved = reserve({"main": pool}, 60.0)["main"]
        node_of = placement_group_table(reserved.group)["bundles_to_node_id"]
        remove_placement_group(reserved.group)
    nodes = [node_of[bundle] for bundle in reserved.bundles]
    assert sorted(reserved.bundles) == list(range(36))
    assert [len(list(ranks)) for _, ranks in groupby(nodes)] == [20, 16]
    assert len(list(groupby(node_of[bundle] for bundle in range(36)))) > 2, "Ray keeps the order of bundles by now"


def test_a_pool_that_needs_a_whole_node_gets_it_though_it_is_named_after_smaller_pools(machines: Machines):
    sizes = {"main": 0.6, "engines": 0.4, "scores": 1.0}
    pools = {name: Pool(ranks=1, cpus_per_rank=size) for name, size in sizes.items()}
    with Cluster(Placement(address=machines.address, pools=pools)):
        reserved = reserve(pools, 30.0)
        nodes = {name: placement_group_table(one.group)["bundles_to_node_id"][0] for name, one in reserved.items()}
        for one in reserved.values():
            remove_placement_group(one.group)
    assert nodes["main"] == nodes["engines"] != nodes["scores"]


def test_a_run_that_is_terminated_while_it_waits_for_devices_ends_at_once(machines: Machines, tmp_path: Path):
    command = [sys.executable, "-P", "-m", "rlpack", "train", "experiment=smoke", "run_dir=run"]
    command += [f"placement.address={machines.address}", "placement.start_timeout_s=200"]
    every_cpu = {"main": Pool(ranks=2)}
    with Cluster(Placement(address=machines.address, pools=every_cpu)), (tmp_path / "out").open("w") as out:
        group = reserve(every_cpu, 60.0)["main"].group
        run = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
        try:
            until(lambda: "starting the roles" in (tmp_path / "out").read_text(), 120.0)
            run.terminate()
            code = run.wait(timeout=30.0)
        finally:
            run.kill()
            run.wait(timeout=30.0)
            remove_placement_group(group)
    assert code == 130, (tmp_path / "out").read_text()


def test_a_rank_is_sent_its_own_rows_of_what_lies_on_another_node(machines: Machines):
    echo = "tests.distributed.roles:Echo"
    roles: dict[str, Any] = {
        "packed": Role(target=echo, batching=RoleBatching(mode="packed", max_tokens=24)),
        "fixed": Role(target=echo, batching=RoleBatching(mode="fixed", micro_batch_size=2)),
    }
    placement = Placement(address=machines.address, pools={"main": Pool(ranks=2)}, start_timeout_s=240.0)
    config = tiny_config(roles=roles, placement=placement)
    batch = tiny_rollouts(SIZES).keep(["input_ids", "uid"])
    with Cluster(placement) as cluster, cluster.store.lease("a step"):
        groups = start_roles(cluster, config, list(roles), (config, tiny_tokenizer()))
        twice = groups["packed"].run(Echo.times, batch, 2)
        assert len({handle.node for handle in twice["times"].handles}) == 2
        given = BatchedDataDict({**twice, "input_ids": twice["times"]})
        part_of_row, order = twice["times"].source, groups["fixed"].plan(given).rank_plan
        for rank, (num_rows, num_read) in enumerate(groups["fixed"].run(Echo.rows_read, given)):
            rows = order(rank).rows
            far = int((part_of_row[rows] != rank).sum())
            assert num_rows == rows.size
            assert 0 < far < (part_of_row != rank).sum()
            # A part on the rank's own node is read in place; of the other's it is sent what it needs.
            assert num_read == (part_of_row == rank).sum() + far
        again = cluster.store.fetch(groups["fixed"].run(Echo.times, given, 3))
        assert torch.equal(again["times"].values, batch["input_ids"].values * 6)


def test_rows_of_several_calls_are_copied_for_another_node_in_one_call(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
):
    echo, copied = "tests.distributed.roles:Echo", list[tuple[int, int]]()
    placement = Placement(address=machines.address, pools={"main": Pool(ranks=2)}, start_timeout_s=240.0)
    config = tiny_config(roles={"packed": Role(target=echo)}, placement=placement)
    batch = tiny_rollouts(SIZES).keep(["input_ids", "uid"])
    copy_rows = RayRanks._copy_rows

    def counted(ranks: RayRanks, rank: int, refs: Any, rows: Any) -> Any:
        copied.append((rank, len(refs)))
        return copy_rows(ranks, rank, refs, rows)

    monkeypatch.setattr(RayRanks, "_copy_rows", counted)
    with Cluster(placement) as cluster, cluster.store.lease("a step"):
        group = start_roles(cluster, config, ["packed"], (config, tiny_tokenizer()))["packed"]
        parts = [group.run(Echo.times, batch.select(rows), 2) for rows in ([0, 1, 2], [3, 4, 5], [6, 7, 8])]
        copied.clear()
        order = [8, 2, 4, 0, 6, 3, 1, 7, 5]
        given = BatchedDataDict.concat(parts).select(order).rename({"times": "input_ids"})
        again = group.run(Echo.times, given.keep(["input_ids", "uid"]), 3)
        assert sorted(rank for rank, _ in copied) == [0, 1]
        assert sum(count for _, count in copied) > 2
        found = cluster.store.fetch(again)["times"]
    assert torch.equal(found.values, 6 * batch["input_ids"].select(order).values)


def test_rows_on_another_node_are_read_while_their_rank_runs_a_call_of_another_thread(machines: Machines):
    roles: dict[str, Any] = {name: Role(target="tests.distributed.roles:Echo") for name in ("engine", "reader")}
    pools = {"main": Pool(ranks=1), "engines": Pool(ranks=1)}
    placement = Placement(
        address=machines.address, pools=pools, roles={"engine": "engines"}, start_timeout_s=240.0, call_timeout_s=60.0
    )
    config = tiny_config(roles=roles, placement=placement)
    batch = tiny_rollouts(SIZES).keep(["input_ids", "uid"])
    with Cluster(placement) as cluster, cluster.store.lease("a step"):
        groups = start_roles(cluster, config, list(roles), (config, tiny_tokenizer()))
        made = groups["engine"].run(Echo.times, batch, 2)
        given = BatchedDataDict({**made, "input_ids": made["times"]})
        assert {handle.node for handle in made["times"].handles} != set(groups["reader"].ranks.nodes)
        seconds, has_started = 15.0, threading.Event()

        def generate() -> None:
            """Draw the next batch, as another thread does."""
            pending = groups["engine"].submit_to(0, Echo.hand_back_late, batch, seconds)
            has_started.set()
            pending.result()

        drawing = threading.Thread(target=generate)
        drawing.start()
        assert has_started.wait(30.0)
        assert groups["reader"].run(Echo.times, given, 3)["rank"].tolist() == [0] * len(SIZES)
        read = cluster.store.fetch(made)
        assert drawing.is_alive(), "rows were read only once the other call had ended"
        assert torch.equal(read["times"].values, batch["input_ids"].values * 2)
        drawing.join(60.0)


def test_a_rank_that_is_stopped_on_another_node_is_named(machines: Machines, tmp_path: Path):
    placement = Placement(
        address=machines.address, pools={"main": Pool(ranks=2)}, start_timeout_s=240.0, call_timeout_s=30.0
    )
    config = tiny_config(roles={"faulty": Role(target="tests.distributed.roles:Faulty")}, placement=placement)
    with Cluster(placement, log_path=tmp_path / "run.log") as cluster:
        group = start_roles(cluster, config, ["faulty"], (config, tiny_tokenizer()))["faulty"]
        ranks = cluster.open_pools([])["main"]
        here = ray.get_runtime_context().get_node_id()
        (far,) = (rank for rank, node in enumerate(ranks._pool.nodes) if node != here)
        ranks._call_s, ranks.is_restartable = 2.0, False  # as if the role was trained
        pid, address = ranks.process_ids()[far], ray.util.get_node_ip_address()
        os.kill(pid, signal.SIGSTOP)
        stopped = rf"process {pid} \(rank {far}\) on node {address} is stopped, .*; rank {1 - far} waits for it"
        with pytest.raises(RoleError, match=stopped) as said:
            group.run(Faulty.wait_for_all)
        assert said.value.rank == far
    assert f"main/{1 - far} INFO" in (tmp_path / "run.log").read_text()
    assert f"main/{far} INFO" in (tmp_path / f"run-{address}.log").read_text()


def test_a_rank_that_dies_on_another_node_is_named_with_its_node(machines: Machines):
    placement = Placement(address=machines.address, pools={"main": Pool(ranks=2)}, start_timeout_s=240.0)
    config = tiny_config(roles={"faulty": Role(target="tests.distributed.roles:Faulty")}, placement=placement)
    with Cluster(placement) as cluster:
        group = start_roles(cluster, config, ["faulty"], (config, tiny_tokenizer()))["faulty"]
        ranks = cluster.open_pools([])["main"]
        here, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        (far,) = (rank for rank, node in enumerate(ranks.nodes) if node != here)
        ranks.is_restartable = False  # as if the role was trained
        pid = ranks.process_ids()[far]
        os.kill(pid, signal.SIGKILL)
        died = rf"rank {far}, .*process {pid} on node {address} died; its log, in the Ray .* folder on that node, says"
        with pytest.raises(RoleError, match=died):
            group.run(Faulty.wait_for_all)


def test_a_pool_whose_node_is_lost_names_the_node_once_no_other_took_its_place(machines: Machines):
    third = machines.add_node(num_cpus=2, object_store_memory=2**27)
    placement = Placement(
        address=machines.address, pools={"main": Pool(ranks=1, cpus_per_rank=2.0)}, start_timeout_s=60.0
    )
    config = tiny_config(roles={"faulty": Role(target="tests.distributed.roles:Faulty")}, placement=placement)
    try:
        with Cluster(placement) as cluster:
            group = start_roles(cluster, config, ["faulty"], (config, tiny_tokenizer()))["faulty"]
            ranks, address = cluster.open_pools([])["main"], ray.util.get_node_ip_address()
            ranks._start_s = 5.0
            machines.remove_node(third, allow_graceful=False)
            until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, 60.0)
            lost = rf"node {address}, which had rank 0 of pool main, is lost, and no other had room within 5"
            with pytest.raises(RoleError, match=lost):
                group.run(Faulty.wait_for_all)
    finally:
        if third in machines.worker_nodes:
            machines.remove_node(third)


def test_a_gcs_that_is_stopped_ends_the_run_and_its_ranks_on_all_nodes(machines: Machines):
    placement = Placement(address=machines.address, pools={"main": Pool(ranks=2)}, ray_timeout_s=2.0)
    config = tiny_config(roles={"faulty": Role(target="tests.distributed.roles:Faulty")}, placement=placement)
    head = machines.head_node
    assert head is not None
    (gcs,) = head.all_processes["gcs_server"]
    ranks: list[psutil.Process] = []
    times: list[float] = []

    def run_until_the_gcs_stops() -> None:
        with Cluster(placement) as cluster:
            group = start_roles(cluster, config, ["faulty"], (config, tiny_tokenizer()))["faulty"]
            ranks.extend(map(psutil.Process, cluster.open_pools([])["main"].process_ids()))
            pending = group.submit(Faulty.hang, 1)
            gcs.process.send_signal(signal.SIGSTOP)
            times.append(time.monotonic())
            pending.result()

    try:
        with pytest.raises(ClusterError, match=rf"Ray's GCS at {machines.address} has not answered for \d+ s .*=2\)"):
            run_until_the_gcs_stops()
        assert time.monotonic() - times[0] < 25
        assert not psutil.wait_procs(ranks, timeout=10)[1]
    finally:
        gcs.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 30
        while ray_connection.hangs() and time.monotonic() < deadline:
            time.sleep(0.1)

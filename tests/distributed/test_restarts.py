"""Ranks without trained roles are started again after a fault, and calls that failed are repeated."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlpack.distributed.cluster import Cluster
from rlpack.distributed.errors import RanksRestartedError, RoleError
from rlpack.distributed.ray_store import RayStore
from rlpack.distributed.weights import WeightChannel
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.recipes.driver.engine_access import EngineAccess
from rlpack.recipes.driver.engine_restarts import replace_failed_engines
from tests.builders import tiny_rollouts
from tests.distributed.roles import Echo
from tests.distributed.test_worker_group import UNEVEN, ends

pytestmark = [pytest.mark.ray, pytest.mark.slow]
EXTRA_POOLS = ("lost", "damaged")
RESTARTS = True

Groups = dict[str, WorkerGroup[Any]]
BATCH = tiny_rollouts(UNEVEN).keep(["input_ids", "uid"])


@pytest.fixture(autouse=True)
def steps(cluster: Cluster) -> None:
    """Begin each test more than 100 steps after the last one."""
    for number in range(101):
        cluster.restarts.begin_step("train", number)
    cluster.restarts.pop_metrics()


def test_calls_are_repeated_after_a_death_and_after_a_hang(
    cluster: Cluster, groups: Groups, store: RayStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    group, before = groups["lost"], groups["lost"].ranks.process_ids()
    monkeypatch.setattr(group.ranks, "_call_s", 5.0)
    group.run_at_every_start(Echo.set_factor, 3)
    with store.lease("a step"):
        earlier = group.run(Echo.times, BATCH, 5)
        given = earlier.keep(["uid"]).union({"input_ids": earlier["times"]})
        unasked = group.submit(Echo.times_in_background, given, 2)
        found = group.run(Echo.times_after_faults, given, {1: ["kill"], 0: ["stop"]}, str(tmp_path))
        tokens = BATCH["input_ids"].values
        assert torch.equal(store.fetch(found)["times"].values, 5 * 3 * tokens)
        assert torch.equal(store.fetch(unasked.result())["times"].values, 5 * 2 * tokens)
    assert found["uid"] == BATCH["uid"]
    assert not set(group.ranks.process_ids()) & set(before)
    assert not any(psutil.pid_exists(pid) for pid in before)
    metrics = cluster.restarts.pop_metrics()
    assert metrics.pop("time/restart_s") < 60
    assert metrics == {"faults/restarts/lost": group.ranks.num_starts - 1.0}


def test_a_failure_beside_a_stopped_process_is_that_of_the_stopped_one(
    groups: Groups, store: RayStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    group = groups["lost"]
    stopped = group.ranks.process_ids()[1]
    faults = {0: ["exception"], 1: ["stop"]}  # an exception as of a collective that rank 1 does not reach
    group.run_at_every_start(Echo.set_factor, 3)
    with store.lease("a step"):
        found = group.run(Echo.times_after_faults, BATCH, faults, str(tmp_path))
        assert torch.equal(store.fetch(found)["times"].values, 3 * BATCH["input_ids"].values)
    assert f"rank 1, in times_after_faults: no answer, because process {stopped} (rank 1) is stopped" in caplog.text
    assert "role lost failed on rank 0 in times_after_faults: ValueError: an exception of the role" in caplog.text


def test_a_process_that_dies_between_calls_is_noticed_by_the_next(groups: Groups, store: RayStore):
    group = groups["damaged"]
    held = group.submit_to(0, Echo.hand_back, BATCH)
    held.result()
    os.kill(group.ranks.process_ids()[0], signal.SIGKILL)
    assert ends(group, 0)
    with pytest.raises(RanksRestartedError, match="role damaged, rank 0, in hand_back: the process died"):
        group.submit_to(0, Echo.hand_back, BATCH).result()  # a rank may hold rows of earlier calls
    assert group.submit_to(0, Echo.hand_back, BATCH).result().num_rows == BATCH.num_rows


def test_a_rank_that_hangs_is_named_by_the_deadline_of_its_own_call_and_not_those_that_work(
    cluster: Cluster, groups: Groups, store: RayStore
):
    group = groups["lost"]
    assert group.ranks._call_s >= 60
    stopped = group.ranks.process_ids()[1]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    works = group.submit_to(0, Echo.hand_back_late, BATCH, 20.0, answer_s=60.0)  # before the call of the other rank
    hangs = group.submit_to(1, Echo.hand_back, BATCH, answer_s=3.0)
    with pytest.raises(RanksRestartedError, match=rf"rank 1, in hand_back: .* because process {stopped} \(rank 1\) is"):
        hangs.result()
    with pytest.raises(RanksRestartedError):
        works.result()
    restart_s = cluster.restarts.pop_metrics()["time/restart_s"]
    assert time.monotonic() - began - restart_s < 3.0 + 2.0
    assert group.submit_to(1, Echo.hand_back, BATCH).result().num_rows == BATCH.num_rows


def test_engines_that_are_replaced_have_the_deadline_of_a_start_in_addition(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
):
    group, access = groups["lost"], EngineAccess(are_concurrent=False)
    pids, number = group.ranks.process_ids(), group.ranks.num_starts
    monkeypatch.setattr(group.ranks, "_call_s", 0.5)
    replace_failed_engines(group, access)
    assert (group.ranks.process_ids(), group.ranks.num_starts) == (pids, number)
    assert access.pop_metrics() == {"rollout/engines_replaced": 1.0}


def test_an_update_is_sent_again_to_ranks_that_were_started_again(groups: Groups, tmp_path: Path):
    group = groups["damaged"]
    channel = WeightChannel(groups["packed"], group)
    group.ranks.after_restart("channel", channel.agree)
    group.run(Echo.harm_bucket, 2, "death")
    channel.transfer()
    (loaded,) = group.run(Echo.loaded_weights, tiny_rollouts([(1, 1)]).keep(["input_ids"]))
    assert [int(weight[0]) for weight in loaded.values()] == [1, 2, 3, 4, 5]
    assert groups["packed"].run(Echo.place)[1] == 0  # the source was left alone


def test_an_exception_is_not_repeated_and_neither_is_a_fault_that_comes_again_and_again(groups: Groups, tmp_path: Path):
    group = groups["lost"]
    starts = group.ranks.num_starts
    with pytest.raises(RoleError, match="role lost, rank 1, in times_after_faults: the process died") as failure:
        group.run(Echo.times_after_faults, BATCH, {1: ["kill"] * 9}, str(tmp_path))
    assert group.ranks.num_starts == starts + 3
    assert str(failure.value).endswith(
        f"; pool {group.ranks._pool.name} was started again 3 times within 100 steps before; remove the cause, which "
        "run.log and Ray's logs may name, and resume with resume=auto"
    )
    assert all(ends(group, rank) for rank in range(2))
    assert failure.value.original is None
    with pytest.raises(RoleError, match="in times_after_faults: ValueError: an exception of the role") as failure:
        groups["damaged"].run(Echo.times_after_faults, BATCH, {0: ["exception"]}, str(tmp_path))
    assert type(failure.value.original) is ValueError

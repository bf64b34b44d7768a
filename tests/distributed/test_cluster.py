import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import ray
from ray._private import services

from rlpack.config.schema import Placement, Pool, Role
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.errors import ClusterError, PlacementError, RoleError
from rlpack.distributed.start_roles import start_roles
from tests.builders import tiny_config, tiny_tokenizer
from tests.distributed.roles import Faulty

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def own_processes() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.mark.parametrize("how", [pytest.param("asleep", marks=pytest.mark.long), "stopped"])
def test_a_hang_ends_at_its_deadline_and_leaves_no_process(role_path: Path, how: str):
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
            group.ranks.is_restartable = False  # as if it was trained
            started.update(own_processes() - before)
            pids.extend(cluster.open_pools([])["main"].process_ids())
            times.append(time.monotonic())
            try:
                if how == "asleep":
                    group.run(Faulty.hang, 1)
                os.kill(pids[1], signal.SIGSTOP)
                group.run(Faulty.wait_for_all)
            finally:
                times.append(time.monotonic())

    started: set[psutil.Process] = set()
    pids: list[int] = []
    times: list[float] = []
    with pytest.raises(RoleError) as failure:
        run_until_it_hangs()
    assert 3 <= times[1] - times[0] < 10  # the error is known, and a run has printed it, before anything is ended
    assert time.monotonic() - times[0] < 60
    message = {
        "asleep": "role sleepy, rank 1, in hang: no answer from rank 1 within 3 s; raise",
        "stopped": f"role sleepy, rank 1, in wait_for_all: no answer within 3 s, because process {pids[1]} (rank 1) is "
        "stopped, by SIGSTOP, a debugger or a scheduler; rank 0 waits for it in a collective; ",
    }
    assert str(failure.value).startswith(message[how])
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


@pytest.mark.parametrize("daemon", ["raylet", pytest.param("gcs_server", marks=pytest.mark.long)])
def test_a_daemon_that_is_stopped_does_not_delay_the_end_of_a_run(daemon: str, caplog: pytest.LogCaptureFixture):
    before = own_processes()
    with Cluster(Placement(pools={"main": Pool(ranks=1)}, ray_timeout_s=1.0)) as cluster:
        cluster.open_pools(["main"])
        started = own_processes() - before
        (stopped,) = (process for process in started if process.name() == daemon)
        stopped.send_signal(signal.SIGSTOP)
        began = time.monotonic()
    assert time.monotonic() - began < 15
    assert "one of Ray's daemons is stopped (SIGSTOP) and does not end; it is killed" in caplog.text
    assert not psutil.wait_procs(started, timeout=10)[1]


def test_a_raylet_that_ends_while_ray_starts_is_started_again(monkeypatch, caplog, tmp_path):
    started, before = stricken(monkeypatch, times=1), own_processes()
    with Cluster(Placement(pools={"main": Pool(ranks=1)}), log_path=tmp_path / "run.log") as cluster:
        (pid,) = cluster.open_pools(["main"])["main"].process_ids()
    assert f"main/0 INFO rlpack: process {pid} on" in (tmp_path / "run.log").read_text()
    assert len(started) == 2
    assert "Ray's raylet ended while it started, see /" in caplog.text
    assert "starting Ray again (attempt 2 of 3)" in caplog.text
    assert not psutil.wait_procs(own_processes() - before, timeout=30)[1]


@pytest.mark.parametrize("file", ["dashboard/agent.py", "runtime_env/agent/main.py"])
def test_workers_do_not_wait_for_the_agents_of_ray(file, monkeypatch, caplog, tmp_path):
    """Ray's raylet would abort after 15 s without them, as on a machine that is busy or reads from a slow disk."""
    script = f"""
        import sys, time
        if any(word.endswith("{file}") for word in sys.orig_argv):
            time.sleep(600)
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(script))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    before = own_processes()
    with Cluster(Placement(pools={"main": Pool(ranks=1)})) as cluster:
        assert cluster.open_pools(["main"])["main"].process_ids()
        started = own_processes() - before
        (agent,) = [one for one in started if one.name() != "raylet" and file in " ".join(one.cmdline())]
        assert agent.is_running()  # it would have another title if it didn't sleep
    assert "starting Ray again" not in caplog.text
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


@pytest.mark.skipif((os.cpu_count() or 1) == 1, reason="Ray by itself starts one worker per core")
def test_one_worker_waits_for_one_rank_however_many_cores_there_are():
    before = own_processes()

    def waiting() -> int:
        return sum("ray::IDLE" in " ".join(process.cmdline()) for process in own_processes() - before)

    with Cluster(Placement(pools={"main": Pool(ranks=1)})):
        deadline = time.monotonic() + 120
        while not waiting() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(3.0)  # for any other
        assert waiting() == 1
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
        PlacementError, match=r"in_flight_gb is 1e\+06, but the object stores of all nodes have .*; lower"
    ):
        Cluster(Placement(in_flight_gb=1e6))
    assert not ray.is_initialized()
    assert not psutil.wait_procs(own_processes() - before, timeout=30)[1]


def answer(address: str, token: str) -> grpc.StatusCode:
    """Ask Ray's GCS, as a program does that can reach its port."""
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            ask(b"", timeout=30, metadata=[("authorization", f"Bearer {token}")])
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def check_is_private(processes: set[psutil.Process]) -> Path:
    """Check that a Ray listens on loopback alone, and answers only who has its token; return the token's file."""
    addresses = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in [psutil.Process(), *processes]
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}
    raylets = [process for process in processes if process.name() == "raylet"]
    (token,) = (Path(process.environ()["RAY_AUTH_TOKEN_PATH"]) for process in raylets)
    assert token.stat().st_mode & 0o777 == 0o600
    address = ray.get_runtime_context().gcs_address
    assert answer(address, "0" * 64) == grpc.StatusCode.UNAUTHENTICATED
    assert answer(address, token.read_text()) == grpc.StatusCode.OK
    return token


def test_a_ray_of_its_own_is_private_and_its_end_is_said_at_once(monkeypatch, role_path: Path):
    monkeypatch.setenv("HOME", "/proc/nowhere")  # not writable, as that of a container's user may be
    monkeypatch.setenv("RAY_AUTH_TOKEN", "that of another cluster")
    environment = {name: value for name, value in os.environ.items() if "AUTH" in name}
    placement = Placement(pools={"main": Pool(ranks=2, cpus_per_rank=0.5)}, roles={}, call_timeout_s=200.0)
    config = tiny_config(roles={"sleepy": Role(target="tests.distributed.roles:Faulty")}, placement=placement)
    before = own_processes()
    processes: set[psutil.Process] = set()
    times: list[float] = []

    def run_until_ray_ends() -> None:
        with Cluster(placement) as cluster:
            group = start_roles(cluster, config, ["sleepy"], (config, tiny_tokenizer()))["sleepy"]
            assert {name: value for name, value in os.environ.items() if "AUTH" in name} == environment
            processes.update(own_processes() - before)
            tokens.append(check_is_private(processes))
            (gcs,) = (process for process in processes if process.name() == "gcs_server")
            pending = group.submit(Faulty.hang, 1)
            gcs.kill()
            times.append(time.monotonic())
            pending.result()

    tokens: list[Path] = []
    with pytest.raises(ClusterError, match=r"^Ray's gcs_server \(process \d+\) was killed by SIGKILL .*/logs and the"):
        run_until_ray_ends()
    assert time.monotonic() - times[0] < 20
    assert not psutil.wait_procs(processes, timeout=10)[1]
    assert not tokens[0].parent.exists()

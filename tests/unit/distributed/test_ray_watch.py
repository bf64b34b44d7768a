"""A Ray that ends, is stopped, or can't be reached is noticed, whatever this process waits for."""

import itertools
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from rlpack.distributed import ray_watch
from rlpack.distributed.answers import ask_ray
from rlpack.distributed.errors import ClusterError
from rlpack.distributed.ray_daemons import RayDaemons
from rlpack.distributed.ray_watch import LOOK_S, RayWatch, answers
from rlpack.distributed.run_token import RunToken


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_process_that_accepts_connections_and_says_nothing_is_no_answer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not answers(address_of(server), 0.2)
    assert not answers(address_of_nobody(), 0.2)


def address_of_nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return address_of(server)


@pytest.mark.parametrize("reply", [b"\0\0\0\4\0\0\0\0\0", b""])
def test_a_server_that_replies_or_closes_the_connection_runs(reply):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            connection.sendall(reply)
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        assert answers(address_of(server), 10.0)


def until_it_ends(watch: RayWatch) -> ClusterError:
    deadline = time.monotonic() + 20
    while (error := watch.ended()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return error


def test_a_gcs_that_falls_silent_is_named_with_its_address_and_the_key(monkeypatch):
    monkeypatch.setattr("rlpack.distributed.ray_watch._ASK_S", 0.01)
    monkeypatch.setattr("rlpack.distributed.ray_watch._STUCK_S", 60.0)
    watch, address = RayWatch(), address_of_nobody()
    watch.start_asking({"GCS": address}, 0.3, "/logs")
    watch.raise_if_ended()
    message = str(until_it_ends(watch))
    assert f"Ray's GCS at {address} has not answered for 0 s (placement.ray_timeout_s=0.3) during the run" in message
    with pytest.raises(ClusterError, match="/logs"):
        watch.raise_if_ended()


def test_a_daemon_that_is_stopped_for_too_long_has_ended_and_one_that_goes_on_has_not(monkeypatch):
    monkeypatch.setattr("rlpack.distributed.ray_watch._STUCK_S", 60.0)
    daemons = RayDaemons(RunToken())
    gcs = daemons.starting(subprocess.Popen)(["/ray/gcs_server", "300"], executable="/bin/sleep")
    try:
        daemons.watch("/logs", 1.0)
        gcs.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        gcs.send_signal(signal.SIGCONT)
        time.sleep(0.7)
        assert daemons.ended() is None
        gcs.send_signal(signal.SIGSTOP)
        assert rf"Ray's gcs_server (process {gcs.pid}) has been stopped (SIGSTOP) for 1 s" in str(
            until_it_ends(daemons)
        )
    finally:
        daemons.kill()
        daemons.close()
        gcs.wait(10)


def test_a_daemon_that_is_stopped_while_it_should_end_is_stuck():
    daemons = RayDaemons(RunToken())
    raylet = daemons.starting(subprocess.Popen)(["/ray/raylet", "300"], executable="/bin/sleep")
    try:
        daemons.watch("/logs", 3 * LOOK_S)
        daemons.stop_watching()
        assert not any(daemons.is_stuck() for _ in range(9))
        raylet.send_signal(signal.SIGSTOP)
        while psutil.Process(raylet.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        looks = [daemons.is_stuck() for _ in range(4)]
        assert (looks[0], looks[-1]) == (False, True)
    finally:
        daemons.kill()
        daemons.close()
        raylet.wait(10)


def test_a_question_to_ray_has_a_deadline():
    never = threading.Event()
    with pytest.raises(ClusterError, match=r"Ray's GCS or raylet did not answer within 0.3 s"):
        ask_ray(lambda: never.wait(60), 0.3)
    never.set()


@pytest.mark.parametrize(("silent_looks", "is_ended"), [(5, False), (10**9, True)])
def test_a_process_is_ended_only_if_a_daemon_stays_silent(monkeypatch, silent_looks, is_ended):
    looks, ended = itertools.count(), threading.Event()

    class Watch(RayWatch):
        def look(self):
            if next(looks) > 100:
                self.stop_watching()
            return 0.01

        def ended(self):
            return ClusterError("silent", "/logs") if next(looks) < silent_looks else None

    watch = Watch()
    monkeypatch.setattr(ray_watch, "_STUCK_S", 0.2)
    monkeypatch.setattr(ray_watch, "end_process", lambda error, kill: (ended.set(), watch.stop_watching()))
    watch._watch()
    assert ended.is_set() == is_ended


def test_what_ray_can_not_end_is_killed_before_a_driver_that_is_stuck_is_ended():
    code = (
        "import time; from rlpack.distributed import ray_watch; from rlpack.distributed.errors import PlacementError\n"
        "ray_watch._STUCK_S = 0.1\n"
        "with ray_watch.ended_at(0.1, lambda: PlacementError('too late'), lambda: print('killed', flush=True)):\n"
        "    time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (2, "too late\n", "killed\nkilled\n")


def test_a_process_that_never_asks_ends_itself_some_time_after_its_gcs():
    code = (
        "import time; from rlpack.distributed import ray_watch\n"
        "ray_watch._STUCK_S = ray_watch._ASK_S = 0.05\n"
        f"ray_watch.RayWatch().start_asking({{'GCS': '{address_of_nobody()}'}}, 0.1, '/logs')\n"
        "time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "Ray's GCS at 127.0.0.1:" in done.stderr

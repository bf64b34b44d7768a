"""The process of vLLM's server: readiness, reasons, deadlines and its end, with a small program in vLLM's place."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import psutil
import pytest

from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm import server_process
from rlpack.rollout.vllm.server_process import started_server, why_it_ended

HOST = "127.0.0.1"
# What a small program does when started as vLLM's server; `pids` is a file for the ids of its processes.
PROGRAM = """
import http.server, os, signal, subprocess, sys, time

mode, pids = sys.argv[1:]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

if __name__ == "__main__":
    family = [os.getpid()]
    if mode in {"stubborn", "leaves"}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
        child.stdout.readline()
        family.append(child.pid)
    with open(pids, "w") as file:
        print(*family, file=file)
    if mode == "fails":
        raise ValueError("no kernel for heads of 7")
    if mode == "hangs":
        time.sleep(600)
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    if mode == "leaves":
        server.handle_request()
        sys.exit("out of memory")
    server.serve_forever()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put the program in vLLM's place, and kill what a failed test leaves of it."""
    module = tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(PROGRAM)
    for folder in (module.parent, module.parent.parent, module.parent.parent.parent):
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(server_process, "_GRACE_S", 1.0)
    yield
    for pid in processes(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def start(folder: Path, mode: str):
    return started_server([mode, str(folder / "pids")], os.environ, folder / "vllm.log")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(pids: list[int], timeout_s: float) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.usefixtures("fake")
def test_the_port_that_the_server_chose_answers_and_nothing_is_left_at_the_end(tmp_path):
    with start(tmp_path, "serves") as server:
        port = server.wait_until_ready(HOST, 0, 60.0)
        assert httpx.get(f"http://{HOST}:{port}/health", timeout=5.0).status_code == 200
        assert alive(processes(tmp_path)) == [server.pid]
    assert alive(processes(tmp_path)) == []


@pytest.mark.usefixtures("fake")
def test_a_server_that_fails_gives_its_own_reason_and_its_log(tmp_path):
    with (
        pytest.raises(EngineError, match=r"did not start: ValueError: no kernel for heads of 7; all .*vllm\.log"),
        start(tmp_path, "fails") as server,
    ):
        server.wait_until_ready(HOST, 0, 60.0)


@pytest.mark.usefixtures("fake")
def test_a_server_that_never_answers_ends_at_the_deadline(tmp_path):
    begin = time.monotonic()
    with (
        pytest.raises(EngineError, match=r"not ready within 1\.5 s; raise --start-timeout"),
        start(tmp_path, "hangs") as server,
    ):
        server.wait_until_ready(HOST, 0, 1.5)
    assert time.monotonic() - begin < 10
    assert alive(processes(tmp_path)) == []


@pytest.mark.usefixtures("fake")
def test_processes_that_ignore_sigterm_are_killed(tmp_path):
    with start(tmp_path, "stubborn") as server:
        server.wait_until_ready(HOST, 0, 60.0)
        family = processes(tmp_path)
        assert len(alive(family)) == 2
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    assert alive(family) == []


@pytest.mark.usefixtures("fake")
def test_a_server_that_ends_by_itself_is_an_error_and_leaves_no_orphan(tmp_path):
    with start(tmp_path, "leaves") as server:
        server.wait_until_ready(HOST, 0, 60.0)
        with pytest.raises(EngineError, match="server ended: out of memory"):
            server.wait_for_end()
    assert len(processes(tmp_path)) == 2
    assert alive(processes(tmp_path)) == []


@pytest.mark.usefixtures("fake")
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's end is Linux's")
def test_a_server_ends_when_the_command_is_killed(tmp_path):
    command = textwrap.dedent(
        f"""
        import os, sys, time
        from pathlib import Path
        sys.path.insert(0, {str(tmp_path / "site")!r})
        from rlpack.rollout.vllm.server_process import started_server
        arguments, log = ["serves", {str(tmp_path / "pids")!r}], Path({str(tmp_path / "log")!r})
        with started_server(arguments, os.environ, log) as server:
            print(server.wait_until_ready({HOST!r}, 0, 60.0), flush=True)
            time.sleep(600)
        """
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        parent.kill()
    assert len(processes(tmp_path)) == 1
    assert wait_until_gone(processes(tmp_path), 10.0) == []


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", ""),
        (
            "(EngineCore pid=7) ERROR 11-23 [core.py:9] RuntimeError: bad\nRuntimeError: Engine failed",
            "RuntimeError: bad",
        ),
        ("x WARNING 11-23 ImportError: no triton\nTraceback:\n  File\nOSError: no space", "OSError: no space"),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, max_model_len is too long [type=value_error, input_value=1]",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig: Value error, "
            "max_model_len is too long",
        ),
        ("Killed\n", "Killed"),
    ],
)
def test_the_reason_is_the_first_error_of_the_output(output, reason):
    assert why_it_ended(output) == reason

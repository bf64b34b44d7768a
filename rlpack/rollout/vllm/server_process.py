"""Start, watch and end the process of vLLM's server."""

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

import rlpack
from rlpack.rollout.errors import EngineError
from rlpack.rollout.vllm.engine_log import first_error
from rlpack.rollout.vllm.require_token import OPEN_PATH

_log = logging.getLogger(__name__)

# Counted from the first signal: the server has the first part to shut down gracefully, SIGKILL gets the rest.
_GRACE_S, _KILL_S = 5.0, 2.0
_POLL_S = 0.2
_PROBE_S = 5.0
_USAGE_ERROR = re.compile(r": error: (.+)$", re.MULTILINE)


class ServerProcess:
    """A running process of vLLM's server.

    Attributes:
        pid: id of the process, which leads its own session.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        """Wrap a started process and the file with its output."""
        self.pid = process.pid
        self._process, self._log = process, log
        # Also records the start time: once the process has ended, another may reuse its id.
        self._leader = psutil.Process(process.pid)

    def wait_until_ready(self, host: str, port: int, timeout_s: float) -> int:
        """Return the server's port as soon as it answers.

        Args:
            host: the address that it listens on.
            port: 0 if it chooses one.
            timeout_s: deadline.

        Raises:
            EngineError: it ended, or the deadline passed.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._check_runs("did not start")
            for candidate in [port] if port else self._ports(host):
                if _answers(f"{base_url(host, candidate)}{OPEN_PATH}"):
                    return candidate
            time.sleep(_POLL_S)
        raise EngineError(
            f"vLLM's server was not ready within {timeout_s:g} s; raise --start-timeout, or look at its output in "
            f"{self._log}"
        )

    def wait_for_end(self) -> None:
        """Wait for the server to fail; never returns, and ends only with an error or an interrupt.

        Raises:
            EngineError: it ended.
        """
        while True:
            self._check_runs("ended")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the server and every process that it started, within 10 s; a second interrupt kills them at once."""
        process, started = self._process, _descendants(self._leader)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.terminate()
                process.wait(_GRACE_S)
        finally:
            left = started | _descendants(self._leader) | _session(self.pid)
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.poll()
            if alive := _still_running(left, _KILL_S):
                _log.error("processes of vLLM are still there: %s", ", ".join(str(one.pid) for one in alive))

    def _check_runs(self, what: str) -> None:
        process = self._process
        code = process.poll()
        if code is not None:
            reason = why_it_ended(self._log.read_text(encoding="utf-8", errors="replace"))
            reason = reason or (f"signal {-code}" if code < 0 else f"exit code {code}")
            raise EngineError(f"vLLM's server {what}: {reason}; all of its output is in {self._log}")

    def _ports(self, host: str) -> list[int]:
        """Return the ports that the server listens on at an address; its other processes have ports, too."""
        try:
            sockets = self._leader.net_connections("tcp")
        except psutil.Error:
            return []
        return [entry.laddr.port for entry in sockets if entry.status == psutil.CONN_LISTEN and entry.laddr.ip == host]


@contextmanager
def started_server(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[ServerProcess]:
    """Start vLLM's server, and end it and all its processes at the end of the block.

    Args:
        arguments: arguments of vLLM's server.
        environment: environment variables of its process.
        log: the file for its output.
    """
    command = [sys.executable, "-P", "-m", "rlpack.rollout.vllm.server_main", str(os.getpid()), *arguments]
    # The process imports what this one does, but nothing from the working directory.
    own = str(Path(rlpack.__file__).parents[1])
    path = os.pathsep.join(folder for folder in sys.path if folder == own or folder not in {"", os.getcwd()})
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**environment, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only this process
        )
    server = ServerProcess(process, log)
    try:
        yield server
    finally:
        server.stop()


def why_it_ended(output: str) -> str:
    r"""Return the reason in the output of a server that ended; "" if it gave none.

    >>> why_it_ended("usage: vllm [-h]\nvllm: error: argument --seed: invalid int value: 'x'\n")
    "argument --seed: invalid int value: 'x'"
    """
    if usage := _USAGE_ERROR.search(output):
        return usage[1]
    lines = output.strip().splitlines()
    return first_error(output) or (lines[-1].strip() if lines else "")


def base_url(host: str, port: int) -> str:
    """Return the URL of a server on this machine.

    >>> base_url("127.0.0.1", 80), base_url("::1", 80), base_url("0.0.0.0", 80)
    ('http://127.0.0.1:80', 'http://[::1]:80', 'http://127.0.0.1:80')
    """
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=_PROBE_S, trust_env=False).status_code == httpx.codes.OK
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _still_running(processes: set[psutil.Process], timeout_s: float) -> set[psutil.Process]:
    """Wait for killed processes and return those that are left; zombies, which wait for another parent, have ended."""
    deadline = time.monotonic() + timeout_s
    while (alive := {process for process in processes if _runs(process)}) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _descendants(process: psutil.Process) -> set[psutil.Process]:
    try:
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _session(pid: int) -> set[psutil.Process]:
    """Return the processes of a session, whose parents may have ended."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == pid:
                found.add(process)
    return found

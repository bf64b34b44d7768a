"""Ray workers that are forked from a process with warm imports, which take most of a worker's start.

The driver's raylet runs this file in place of Ray's `default_worker.py`. It passes its arguments, environment and
standard streams to a server, which forks a process that runs `default_worker.py` with them. This process waits for the
fork and ends with it; if it is killed, the server kills the fork. So whatever looks for the raylet's children, or ends
them, finds or ends the forks. The server has not imported Ray, which reads the environment once.

There are two servers, whose processes hash strings differently, as separate processes do. Ranks that come from both
would show if a result depended on the order of a set.

Set RLPACK_TEST_RAY_WORKERS=1 to run the tests, apart from the fault matrix, with workers that Ray starts itself.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partialmethod
from pathlib import Path
from typing import Any

# The environment variable, of a run and so of its workers, that names the folder of the servers' sockets.
ADDRESS = "RLPACK_TEST_FORKED_WORKERS"
_SWITCH = "RLPACK_TEST_RAY_WORKERS"
# What the ranks import, and no Ray.
_IMPORTS = (
    "rlpack.workers.actor",
    "rlpack.workers.critic",
    "rlpack.workers.judge",
    "rlpack.workers.reference",
    "rlpack.workers.reward",
    "rlpack.workers.reward_model",
    "rlpack.workers.rollout",
    "tests.distributed.roles",
    "tests.faults.faulty_roles",
)
_STREAMS = 3
_SERVERS = 2
_START_S, _END_S = 120.0, 10.0
_ROOT = Path(__file__).parents[1]


@contextmanager
def worker_servers() -> Iterator[str]:
    """Run the servers in this block; yield the folder of their sockets."""
    with tempfile.TemporaryDirectory(prefix="workers") as folder, ExitStack() as stack:
        servers = [_start_server(folder, number, stack) for number in range(_SERVERS)]
        for server in servers:
            assert server.stdout is not None
            assert select.select([server.stdout], [], [], _START_S)[0], "a server of forked workers did not start"
            assert server.stdout.readline(), "a server of forked workers ended as it started"
        yield folder


def _start_server(folder: str, number: int, stack: ExitStack) -> "subprocess.Popen[bytes]":
    """Start a server, in its own session so that Ctrl-C doesn't end it before the tests; `stack` ends it."""
    from tests.fork_server import environment

    socket_path = os.path.join(folder, str(number))
    server = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve({socket_path!r})"],
        cwd=_ROOT,
        env=environment() | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "random"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    stack.callback(_end_server, server)
    return server


def _end_server(server: "subprocess.Popen[bytes]") -> None:
    """Ask a server to kill its workers and end."""
    try:
        server.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(_END_S)


@functools.cache
def shared_servers() -> str | None:
    """Return the folder of servers that live as long as this process; None if Ray is to start workers itself."""
    if os.environ.get(_SWITCH) == "1":
        return None
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(worker_servers())


@contextmanager
def forked_workers(address: str, *, log_monitor: bool = True) -> Iterator[None]:
    """Let the Ray that this process starts in this block fork its workers.

    Args:
        address: folder of the servers' sockets.
        log_monitor: whether to start Ray's log monitor, without which no output of workers reaches the driver.
    """
    import pytest  # not above, since each waiting process would import it
    from ray._private.parameter import RayParams

    options = {"worker_path": __file__} | ({} if log_monitor else {"include_log_monitor": False})
    start = partialmethod(RayParams.__init__, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS, address)
        patch.setattr(RayParams, "__init__", start)
        yield


def serve(address: str) -> None:
    """Fork a worker for each connection to a socket, until standard input is closed; then kill the workers."""
    for name in _IMPORTS:
        importlib.import_module(name)
    assert "ray" not in sys.modules, f"{_IMPORTS} must not import Ray at once"
    gc.collect()
    gc.freeze()
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return _kill_all(selector)
                if key.fileobj is listener:
                    _fork(listener.accept()[0], selector)
                elif selector.get_map().get(key.fd) is key:  # not if both ends of a worker were reported at once
                    _end(*key.data, selector)


def _fork(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    """Fork a worker, and watch it and the process that waits for it."""
    request, streams, _, _ = socket.recv_fds(connection, 1 << 20, _STREAMS)
    while not request.endswith(b"\n"):
        if not (more := connection.recv(1 << 20)):  # the waiting process was killed
            break
        request += more
    else:
        with suppress(OSError):  # without a process or a descriptor, the waiting process ends, and Ray starts another
            pid = os.fork()
            if pid == 0:
                _run(streams, **json.loads(request))
            ended = os.pidfd_open(pid)
            for one in (connection.fileno(), ended):
                selector.register(one, selectors.EVENT_READ, (connection, ended, pid))
    for stream in streams:
        os.close(stream)


def _end(connection: socket.socket, ended: int, pid: int, selector: selectors.BaseSelector) -> None:
    """Reap a worker that ended, or kill one whose waiting process did; closing the connection ends the latter."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for one in (connection.fileno(), ended):
        selector.unregister(one)
    connection.close()
    os.close(ended)


def _kill_all(selector: selectors.BaseSelector) -> None:
    """Kill the workers that are left."""
    for pid in {key.data[2] for key in selector.get_map().values() if key.data is not None}:
        os.kill(pid, signal.SIGKILL)


def _run(
    streams: list[int], arguments: list[str], variables: dict[str, str], folder: str, niceness: int, waiting: int
) -> None:
    """Become the worker, and end as any other process does."""
    code = 1
    try:
        _note(variables[ADDRESS], waiting).write_text(str(os.getpid()))
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(_STREAMS, os.sysconf("SC_OPEN_MAX"))
        os.setsid()
        os.chdir(folder)
        os.nice(max(0, niceness - os.nice(0)))
        _replace_environment(variables)
        from ray._private.workers import __path__ as place

        script = os.path.join(place[0], "default_worker.py")
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - it goes to the worker's log
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
        finally:
            os._exit(code)


def _note(address: str, waiting: int) -> Path:
    """Return the file with the process id of the worker that a process waits for."""
    return Path(address, f"{waiting}.worker")


def worker_of(waiting: int, address: str) -> int:
    """Return the process id of the worker that a process waits for."""
    return int(_note(address, waiting).read_text())


def _replace_environment(variables: dict[str, str]) -> None:
    """Replace the environment, and the places on the import path that come from it."""
    inherited = _places(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = [*_places(os.environ), *(place for place in sys.path if place and place not in inherited)]


def _places(variables: Mapping[str, str]) -> list[str]:
    """Return the places that PYTHONPATH names."""
    return [place for place in variables.get("PYTHONPATH", "").split(os.pathsep) if place]


def _wait_for_worker() -> None:
    """Ask the server for a worker, and wait for its end."""
    request: dict[str, Any] = {
        "arguments": sys.argv[1:],
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "niceness": os.nice(0),
        "waiting": os.getpid(),
    }
    with suppress(ConnectionError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.path.join(os.environ[ADDRESS], str(os.getpid() % _SERVERS)))
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], range(_STREAMS))
        connection.recv(1)


if __name__ == "__main__":
    _wait_for_worker()

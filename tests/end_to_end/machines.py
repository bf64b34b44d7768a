"""A Ray cluster of two nodes with a job server that asks for a token, in processes of its own.

A test process may run a Ray of its own, and Ray reads how it authenticates once: so a process of
`python -m tests.end_to_end.machines` holds the cluster, until its standard input is closed.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.end_to_end.commands import DEADLINE_S, ROOT

CPUS_PER_NODE = 1


@dataclass
class Machines:
    """A cluster that runs.

    Attributes:
        url: of its job server.
        address: of its head node, for `placement.address`.
        token: what it asks for.
        environment: of a process that may use it.
    """

    url: str
    address: str
    token: str
    environment: dict[str, str]


@contextmanager
def two_nodes(folder: Path) -> Iterator[Machines]:
    """Start two nodes of one CPU each, and end them."""
    token = secrets.token_hex(16)
    (folder / "token").write_text(token)
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    environment = os.environ | access | {"HF_HUB_OFFLINE": "1", "WANDB_SILENT": "true", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # Ray's own folder, whose name is short because sockets lie in it: a job finds its cluster by what is written there.
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="r", dir="/tmp"))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.machines"],
            cwd=ROOT,
            env=environment | {"RAY_TMPDIR": place},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context((folder / "machines.err").open("w")),
            text=True,
        )
        stack.callback(_end, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "machines.err").read_text()
        yield Machines(**json.loads(line), token=token, environment=environment)


def asked(machines: Machines, path: str) -> Any:
    """Return what the cluster's own API answers."""
    request = urllib.request.Request(machines.url + path, headers={"Authorization": f"Bearer {machines.token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def holders(machines: Machines) -> dict[str, list[str]]:
    """Return what still holds devices of the cluster, and the state it is in."""
    groups, actors = (
        asked(machines, f"/api/v0/{kind}?detail=1")["data"]["result"]["result"]
        for kind in ("placement_groups", "actors")
    )
    return {
        "groups": [group["state"] for group in groups if group["state"] != "REMOVED"],
        "actors": [actor["class_name"] for actor in actors if actor["state"] != "DEAD"],
    }


def _end(process: subprocess.Popen) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def _hold() -> None:
    from ray.cluster_utils import Cluster

    # Nodes on one machine have folders of their own, or the second unpacks a job's working directory over the first's.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as other:
        node = {"num_cpus": CPUS_PER_NODE, "object_store_memory": 2**27}
        ports = {"dashboard_port": _free_port(), "dashboard_agent_listen_port": _free_port()}
        machines = Cluster(initialize_head=True, head_node_args={**node, **ports, "include_dashboard": True})
        machines.add_node(**node, temp_dir=other)
        line = json.dumps({"url": f"http://{machines.webui_url}", "address": machines.address})
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        sys.stdin.read()
        machines.shutdown()


if __name__ == "__main__":
    _hold()

"""The driver's side of faults: it notices when a run reaches a phase of a step, and lets the faults of a plan happen.

`install` wraps functions of rlpack in the process that runs the command; the product itself knows nothing of it. A rank
that runs a method of the phase gets an order (`tests.faults.faulty_roles`); every other process gets a signal. Each
fault is noted, with its time, in `fired.jsonl`.
"""

import functools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray

from tests.faults.faulty_roles import SLOW_S, exceed_memory_limit

# The phase of a call that a rank runs. `generate` and `score` of an evaluation's thread belong to the evaluation.
PHASE_OF = {
    ("rollout", "generate"): "generate",
    ("rollout", "advance"): "generate",  # of engines that hold rows in flight
    ("reward", "score"): "score",
    ("judge", "score"): "score",
    ("critic", "advantages"): "advantages",  # other recipes compute them on the driver
    ("actor", "logprobs"): "log-probs",
    ("reference", "logprobs"): "log-probs",
    ("actor", "train_step"): "update",
    ("actor", "save"): "checkpoint",
}
# The calls of a phase by which processes that don't take part in it know that it was reached.
ANNOUNCES = {"score": "reward", "log-probs": "actor"}
# What a role runs in a transfer, to which an order belongs.
IN_TRANSFER = {"actor": "export_bucket", "rollout": "load_bucket"}
# The file about the run's own Ray.
CLUSTER = "cluster.json"


class Injection:
    """The faults of one run that have not happened yet."""

    def __init__(self, folder: Path, plan: list[dict[str, Any]]) -> None:
        self.folder, self.plan = folder, plan
        self.pools: dict[str, Any] = {}  # the ranks of each role
        self.step, self.is_restoring, self.of_thread = 0, False, threading.local()
        self.lock = threading.Lock()

    def due(self, phase: str, active: str | None = None) -> list[dict[str, Any]]:
        """Take the faults of this phase and step.

        With `active`, those that a rank of this role suffers in its call; else, those of all other processes.
        """
        step = vars(self.of_thread).get("step", self.step)
        with self.lock:
            mine = [
                fault
                for fault in self.plan
                if fault["phase"] == phase and fault["step"] == step and (fault["by"] == "order") == bool(active)
            ]
            if active:
                mine = [fault for fault in mine if fault["role"] == active]
            for fault in mine:
                self.plan.remove(fault)
        return mine

    def order(self, phase: str, role: str, method: str) -> None:
        """Leave orders for a call that is about to be submitted."""
        for fault in self.due(phase, role):
            name = f"{self.pools[role]._pool.name}-{fault['rank']}-{role}-{method}"
            (self.folder / "orders" / name).write_text(fault["fault"])
            self.note(fault)

    def strike(self, phase: str) -> None:
        """Let the faults of all processes happen that don't run a method of the phase."""
        for fault in self.due(phase):
            self.note(fault)
            if fault["role"] == "driver":
                self._strike_driver(fault["fault"])
                continue
            pid = self._pid(fault)
            if fault["fault"] == "slow":
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(SLOW_S, os.kill, (pid, signal.SIGCONT)).start()
            else:
                os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault["fault"]])

    def note(self, fault: dict[str, Any]) -> None:
        with (self.folder / "fired.jsonl").open("a") as file:
            file.write(json.dumps(fault | {"time": time.time()}) + "\n")

    def note_cluster(self) -> None:
        """Note what the run's end is checked by: the GCS's address, and the raylet's processes.

        Titles of Ray's agents overwrite their environment, which has the mark of the run's other processes.
        """
        from ray._private.worker import _global_node

        raylets = _global_node.all_processes.get("raylet", [])  # none on a cluster that the run has joined
        children = [child for one in raylets for child in psutil.Process(one.process.pid).children()]
        noted = {"gcs": ray.get_runtime_context().gcs_address, "raylet's": [(c.pid, c.create_time()) for c in children]}
        (self.folder / CLUSTER).write_text(json.dumps(noted))

    def _pid(self, fault: dict[str, Any]) -> int:
        if fault["role"] in ("raylet", "gcs"):
            from ray._private.worker import _global_node

            kind = {"raylet": "raylet", "gcs": "gcs_server"}[fault["role"]]
            return _global_node.all_processes[kind][0].process.pid
        return self.pools[fault["role"]].process_ids()[fault["rank"]]

    def _strike_driver(self, fault: str) -> None:
        if fault == "exception":
            raise ValueError("an exception on order")
        if fault == "memory limit":
            exceed_memory_limit()
        if fault == "slow":
            wake = f"sleep {SLOW_S}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault in ("kill", "stop"):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


class Hooks:
    """What runs around functions of rlpack; each gets the function first, then its arguments."""

    def __init__(self, faults: Injection) -> None:
        self.faults = faults

    def start_role(self, original: Any, ranks: Any, role: str, target: str, *args: Any) -> Any:
        self.faults.pools[role] = ranks
        self.faults.note_cluster()
        self.faults.order("start", role, "start")
        if role == "actor":
            self.faults.strike("start")
        return original(ranks, role, target, *args)

    def submit(self, original: Any, ranks: Any, call: Any) -> Any:
        phase = PHASE_OF.get((call.role, call.method))
        if phase is None:
            return original(ranks, call)
        phase = "evaluation" if vars(self.faults.of_thread).get("is_evaluating") else phase
        self.faults.order(phase, call.role, call.method)
        pending = original(ranks, call)
        if ANNOUNCES.get(phase, call.role) == call.role:
            self.faults.strike(phase)
        return pending

    def publish_again(self, original: Any, channel: Any, *args: Any) -> Any:
        self.faults.is_restoring = True  # of a restart, which is in another phase
        try:
            return original(channel, *args)
        finally:
            self.faults.is_restoring = False

    def start_relay(self, original: Any, ranks: Any, relay: Any, target: Any) -> Any:
        if self.faults.is_restoring:
            return original(ranks, relay, target)
        for role, method in IN_TRANSFER.items():
            self.faults.order("transfer", role, method)
        result = original(ranks, relay, target)
        self.faults.strike("transfer")
        return result

    def plan(self, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.role == "actor":
            self.faults.strike("plan")
        return original(group, *args, **kwargs)

    def advantages(self, original: Any, *args: Any) -> Any:
        self.faults.strike("advantages")
        return original(*args)

    def begin_step(self, original: Any, session: Any, number: int) -> Any:
        self.faults.step = number
        return original(session, number)

    def evaluate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.faults.of_thread.is_evaluating = True
        try:
            return original(*args, **kwargs)
        finally:
            self.faults.of_thread.is_evaluating = False

    def evaluate_ahead(self, original: Any, evaluations: Any, place: tuple[str, int], *args: Any) -> Any:
        self.faults.of_thread.step = place[1]  # the next step may have started
        return self.evaluate(original, evaluations, place, *args)


def install(folder: Path, plan: list[dict[str, Any]]) -> None:
    """Let the faults of a plan happen in this process's run."""
    from rlpack.distributed.ranks import RayRanks
    from rlpack.distributed.restartable_pool import RestartablePool
    from rlpack.distributed.weights import WeightChannel
    from rlpack.distributed.worker_group import WorkerGroup
    from rlpack.recipes.driver import policy_stages
    from rlpack.recipes.driver.evaluations import Evaluations
    from rlpack.recipes.driver.session import Session

    hooks = Hooks(Injection(folder, plan))
    for owner, name, hook in (
        (RestartablePool, "start_role", hooks.start_role),
        (RayRanks, "submit", hooks.submit),
        (RayRanks, "_start_relay", hooks.start_relay),
        (WeightChannel, "publish_again", hooks.publish_again),
        (WorkerGroup, "plan", hooks.plan),
        (policy_stages, "row_advantages", hooks.advantages),
        (Session, "begin_step", hooks.begin_step),
        (Session, "_evaluate", hooks.evaluate),
        (Evaluations, "_run", hooks.evaluate_ahead),
    ):
        function = getattr(owner, name)
        setattr(owner, name, functools.wraps(function)(_around(hook, function)))


def _around(hook: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(function, *args, **kwargs)

    return call

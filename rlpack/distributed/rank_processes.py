"""The processes of a pool's ranks, as their machines see them: which are stopped, and how to end those.

A process that is stopped, by SIGSTOP or a debugger, answers nothing, and neither do the ranks that wait for it in a
collective. Only the state of the processes tells them apart. The driver reads it on its own machine; on each other
node, a small process does.
"""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# Start times of one process, read in two others, may differ by the rounding of the machine's start time.
_SAME_START_S = 2.0
_ANSWER_S = 1.0
_START_S = 20.0


@dataclass(frozen=True)
class ProcessId:
    """A process: its id, which its machine may use again, and when it started, in seconds since the epoch."""

    pid: int
    started: float

    @classmethod
    def own(cls) -> "ProcessId":
        """Return this process."""
        return cls(os.getpid(), psutil.Process().create_time())

    def is_stopped(self) -> bool:
        """Return whether it exists on this machine and is stopped."""
        found = self._find()
        with suppress(psutil.Error):
            return found is not None and found.status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
        return False

    def kill(self) -> None:
        """Kill it, if it exists on this machine; SIGKILL ends stopped processes, too."""
        found = self._find()
        if found is not None:
            with suppress(psutil.Error):
                found.send_signal(signal.SIGKILL)

    def _find(self) -> psutil.Process | None:
        with suppress(psutil.Error):
            found = psutil.Process(self.pid)
            if abs(found.create_time() - self.started) < _SAME_START_S:
                return found
        return None


class StateReader:
    """Reads the state of processes on its node; a Ray actor without resources."""

    def are_stopped(self, processes: Sequence[ProcessId]) -> list[bool]:
        """Return for each process whether it is stopped."""
        return [process.is_stopped() for process in processes]

    def kill(self, processes: Sequence[ProcessId]) -> None:
        """Kill processes of this node."""
        for process in processes:
            process.kill()

    def kill_with_itself(self, processes: Sequence[ProcessId]) -> None:
        """Kill processes of this node, and this one; it needs none of Ray's daemons."""
        self.kill(processes)
        os._exit(0)


class RankProcesses:
    """The processes of a pool's ranks."""

    def __init__(self, nodes: Sequence[str], processes: Sequence[ProcessId]) -> None:
        """Take the node and the process of each rank; start a reader on each node but the driver's."""
        here = ray.get_runtime_context().get_node_id()
        self._processes = list(processes)
        self._are_killed = False
        self._ranks_of: dict[str, list[int]] = {}
        for rank, node in enumerate(nodes):
            self._ranks_of.setdefault(node, []).append(rank)
        reader = ray.remote(StateReader)
        self._readers: dict[str, Any] = {
            node: reader.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote()
            for node in self._ranks_of
            if node != here
        }
        # Later calls go straight to a reader that has answered once; the first needs Ray's GCS.
        if first := [reader.are_stopped.remote([]) for reader in self._readers.values()]:
            ray.wait(first, num_returns=len(first), timeout=_START_S)

    @property
    def pids(self) -> list[int]:
        """Return the process id of each rank, on its own node."""
        return [process.pid for process in self._processes]

    def stopped(self) -> list[int]:
        """Return the ranks whose processes are stopped; a node that does not answer in a second counts as running."""
        asked = {node: reader.are_stopped.remote(self._on(node)) for node, reader in self._readers.items()}
        stopped: list[int] = []
        done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
        for node, ranks in self._ranks_of.items():
            if node not in asked:
                states = [process.is_stopped() for process in self._on(node)]
            elif asked[node] in done:
                states = _value(asked[node]) or []
            else:
                continue
            stopped += [rank for rank, is_stopped in zip(ranks, states, strict=False) if is_stopped]
        return sorted(stopped)

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill the processes of these ranks, which Ray can't end while they are stopped."""
        for node, on_node in self._ranks_of.items():
            processes = [self._processes[rank] for rank in on_node if rank in ranks]
            if node in self._readers and processes:
                ray.wait([self._readers[node].kill.remote(processes)], timeout=_ANSWER_S)
            elif processes:
                StateReader().kill(processes)

    def kill_all(self) -> None:
        """Kill all processes and the readers, without the help of Ray's daemons, which have ended or hang."""
        if self._are_killed:
            return
        self._are_killed = True
        for node in self._ranks_of.keys() - self._readers.keys():
            StateReader().kill(self._on(node))
        ends = [reader.kill_with_itself.remote(self._on(node)) for node, reader in self._readers.items()]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=_ANSWER_S)

    def close(self) -> None:
        """End the readers; Ray's GCS kills them."""
        for reader in self._readers.values():
            ray.kill(reader)

    def _on(self, node: str) -> list[ProcessId]:
        return [self._processes[rank] for rank in self._ranks_of[node]]


def _value(ref: ray.ObjectRef) -> list[bool] | None:
    with suppress(RayError):
        return ray.get(ref, timeout=_ANSWER_S)
    return None

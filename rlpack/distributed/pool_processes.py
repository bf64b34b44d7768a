"""The actors of one pool: they are started, build roles, and are ended or started again together.

Waiting for them needs deadlines and typed errors, so `RayRanks` passes in a function for that.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from rlpack.config.schema import Placement, Pool
from rlpack.config.sections.submission import Submission
from rlpack.distributed.answers import ask_ray
from rlpack.distributed.errors import ClusterError
from rlpack.distributed.failures import RankPlace
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.rank_processes import RankProcesses
from rlpack.distributed.ray_watch import current, ray_ended
from rlpack.distributed.reservations import ReservedDevices
from rlpack.distributed.start_actors import start_actors
from rlpack.run_log import log_of_node

logger = logging.getLogger(__name__)

CLOSE_S = 5.0

# Waits for references to the answers of all ranks, until `placement.start_timeout_s`: role, method, references.
Finish = Callable[[str, str, list[ray.ObjectRef]], list[Any]]


@dataclass(frozen=True)
class BuiltRole:
    """The arguments that a role is built from on every rank: see `RayRanks.start_role`."""

    target: str
    settings: ray.ObjectRef
    arguments: dict[str, Any]
    layout: ParallelLayout | None


class PoolProcesses:
    """The actors of one pool.

    Attributes:
        name: name of the pool.
        actors: the actor of each rank; a new list after a restart.
        nodes: Ray's id of the node of each rank; those of before until ranks that are started again run.
        processes: the process of each rank; None before `start`.
        roles: the roles that were built, by name.
    """

    def __init__(self, name: str, pool: Pool, reserved: ReservedDevices | None, placement: Placement) -> None:
        """Start the processes; `start` waits for them."""
        self.name = name
        self.nodes: list[str] = []
        self._addresses: list[str] = []
        self.processes: RankProcesses | None = None
        self.roles: dict[str, BuiltRole] = {}
        self._pool, self._reserved = pool, reserved
        self._start_s, self._call_s = placement.start_timeout_s, placement.call_timeout_s
        # The daemons of a run's own Ray are processes of the driver, which ends all ranks with them.
        self._silence_s = None if placement.address is None else placement.ray_timeout_s
        self._job, self._log_path = Submission(), None
        self._former: set[str] = set()
        self._places: dict[str, RankPlace] = {}  # of actors, by their ids; those before a restart, too
        self._is_watched = False
        self.actors: list[Any] = self._start_actors()

    def _start_actors(self) -> list[Any]:
        return ask_ray(partial(start_actors, self.name, self._pool, self._reserved, self._silence_s))

    def start(self, job: Submission, log_path: Path | None, finish: Finish) -> None:
        """Wait until all processes run, load the secrets that the run names, and form the process group.

        The processes append what they log to `log_path`; those on other nodes, to a file of their node next to it.
        """
        self._job, self._log_path = job, log_path
        wait = partial(finish, f"pool {self.name}", "start")
        node_ips = wait([actor.node_ip.remote() for actor in self.actors])
        self.nodes, self._addresses = wait([actor.node.remote() for actor in self.actors]), node_ips
        processes = wait([actor.process_id.remote() for actor in self.actors])
        self.processes = ask_ray(lambda: RankProcesses(self.nodes, processes))
        here = ray.get_runtime_context().get_node_id()
        for actor, process, node, ip in zip(self.actors, processes, self.nodes, node_ips, strict=True):
            self._places[actor._actor_id.hex()] = RankPlace(process.pid, None if node == here else ip)
        if not self._is_watched and (watch := current()) is not None:
            watch.kill_with(self.kill_without_ray)
            self._is_watched = True
        if log_path is not None:
            places = zip(self.actors, self.nodes, node_ips, strict=True)
            paths = [(actor, log_path if node == here else log_of_node(log_path, ip)) for actor, node, ip in places]
            wait([actor.open_log.remote(path) for actor, path in paths])
        if job.secret_names:
            wait([actor.load_secrets.remote(job) for actor in self.actors])
        (address,) = wait([self.actors[0].rendezvous.remote(node_ips[0], self._start_s)])
        joins = zip(self.actors, node_ips, strict=True)
        wait([actor.join.remote(address, node_ip, self._call_s) for actor, node_ip in joins])

    def build(self, role: str, built: BuiltRole, finish: Finish) -> None:
        """Build a role on every rank."""
        self.roles[role] = built
        settings = (role, built.target, built.settings, built.arguments, built.layout)
        finish(role, "start", [actor.start_role.remote(*settings) for actor in self.actors])

    def start_again(self, finish: Finish) -> None:
        """End all processes, start others in the same places, and build all roles.

        If a node is lost, Ray waits until it, or another one with room, is available.
        """
        self._former |= {actor._actor_id.hex() for actor in self.actors}
        self.kill(for_good=False)
        self.actors = self._start_actors()
        self.start(self._job, self._log_path, finish)
        for role, built in list(self.roles.items()):
            self.build(role, built, finish)

    def lost_nodes(self) -> dict[str, list[int]]:
        """Return the ranks that ran on nodes that are lost since, by the address of each node."""
        alive = {node["NodeID"] for node in ask_ray(ray.nodes) if node["Alive"]}
        ranks_of: dict[str, list[int]] = {}
        for rank, (node, address) in enumerate(zip(self.nodes, self._addresses, strict=True)):
            if node not in alive:
                ranks_of.setdefault(address, []).append(rank)
        return ranks_of

    def rank_of(self, actor_id: str) -> int | None:
        """Return the rank of an actor, by its id in hexadecimal digits; None if it is not one of these."""
        return next((rank for rank, actor in enumerate(self.actors) if actor._actor_id.hex() == actor_id), None)

    def has_had(self, actor_id: str) -> bool:
        """Return whether an actor is one of these, or was before a restart."""
        return actor_id in self._former or self.rank_of(actor_id) is not None

    def place_of_actor(self, actor_id: str) -> RankPlace | None:
        """Return the process of an actor, which may be of before a restart; None if it is unknown."""
        return self._places.get(actor_id)

    def place_of(self, rank: int) -> RankPlace | None:
        """Return the process of a rank; None before `start`."""
        return self.place_of_actor(self.actors[rank]._actor_id.hex())

    def kill(self, *, for_good: bool = True) -> None:
        """Kill the processes; with `for_good`, also free the devices that are reserved for them."""
        try:
            if not ray_ended():
                ask_ray(partial(self._kill_by_ray, for_good), 2 * CLOSE_S)
                return
        except ClusterError as error:
            logger.debug("Ray doesn't kill pool %s: %s", self.name, error)
        self.kill_without_ray()

    def kill_without_ray(self) -> None:
        """Kill the processes by their ids."""
        if self.processes is not None:
            self.processes.kill_all()

    def _kill_by_ray(self, for_good: bool) -> None:
        """Let Ray's GCS kill the processes, and free their resources."""
        for actor in self.actors:
            ray.kill(actor)
        if self.processes is not None:
            if not for_good:  # devices have to be free before other processes take them
                self.processes.kill(range(len(self.actors)))
            self.processes.close()
        if for_good and self._reserved is not None:
            remove_placement_group(self._reserved.group)

"""Contracts of a role that need real processes, checked on a small Ray cluster that the check starts.

The contracts, after those of `rlpack.testing.contracts`:

10. processes: ranks import and build the role, answer by the deadline, and agree whatever the order of rows;
11. death: once a rank's process is killed, the next call ends within 10 s with one error that names the rank;
12. leaving: 10 s after the run, no process that a rank started is left, even though one rank died.
"""

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import psutil
from transformers import PreTrainedTokenizerBase

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.schema import Config, Placement, Pool, Role
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.errors import PlacementError, RoleError
from rlpack.distributed.process import load_class
from rlpack.distributed.ranks import RayRanks
from rlpack.distributed.start_roles import start_roles
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.testing.contracts import RoleUnderTest, broken
from rlpack.testing.errors import ContractError
from rlpack.testing.samples import sample_batch, sample_tokenizer

_NOTICED_S = 10.0
_LEFT_S = 10.0
# Name of an environment variable that every process of a check inherits.
_MARK = "RLPACK_ROLE_CHECK"
_ANSWER = "return from every call by the deadline, and let what goes wrong be an exception, never an exit or a wait"


def check_role_on_ray(
    kind: type[Any],
    method: Callable[..., Any] | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    config: Config | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch: BatchedDataDict | None = None,
    ranks: int = 2,
    deadline_s: float = 120.0,
) -> None:
    """Check that a role runs on real ranks, and that a rank's death is handled.

    The death of a rank has to be noticed, and no process may be left behind.

    It starts Ray on this machine, on CPUs, and kills the last rank; this takes about 20 seconds.

    Args:
        kind: the role's class, at the top level of a module that ranks can import.
        method: a sharded method that returns rows; None for `score`.
        arguments: arguments of the role's section, `roles.<name>.arguments`.
        config: for `from_settings`, except placement and roles; None for the defaults.
        tokenizer: for `from_settings`; None for that of `sample_batch`.
        batch: rows to call the method on; None for `sample_batch()`.
        ranks: number of ranks.
        deadline_s: deadline of the start and of each call, in seconds.

    Raises:
        ContractError: names the broken contract, the symptom and the fix.
    """
    role = RoleUnderTest.of(kind, method, arguments, config, tokenizer, tolerance=1e-4)
    placement = Placement(
        pools={"main": Pool(ranks=ranks, cpus_per_rank=0.5)},
        roles={},
        start_timeout_s=deadline_s,
        call_timeout_s=deadline_s,
        object_store_gb=0.2,
    )
    own = Role(target=_target(kind), arguments=dict(arguments or {}))
    settings = (config or Config()).model_copy(update={"placement": placement, "roles": {role.name: own}})
    sample = sample_batch() if batch is None else batch
    with _marked() as mark:
        try:
            with Cluster(placement) as cluster:
                with broken("processes", "build the role on any rank, from the arguments of from_settings"):
                    groups = start_roles(cluster, settings, [role.name], (settings, tokenizer or sample_tokenizer()))
                groups[role.name].ranks.is_restartable = False  # report the first failure, don't restart
                _check_calls(role, cluster, groups[role.name], sample)
                _check_death(role, groups[role.name], sample)
        finally:
            left = _left_behind(mark)
        if left:
            raise ContractError(
                "leaving",
                f"{_LEFT_S:g} s after the run, processes of {role.name} are alive: {'; '.join(left)}",
                "tie a process that a role starts to its rank: let it end when its standard input is closed",
            )


def _target(kind: type[Any]) -> str:
    """Return the target by which ranks import a class."""
    target = f"{kind.__module__}:{kind.__qualname__}"
    remedy = "move it to the top level of a module that is installed, or in a folder of sys.path"
    try:
        loaded = load_class(target)
    except PlacementError as error:
        raise ContractError("processes", f"ranks can't import {kind.__qualname__}: {error}", remedy) from error
    if loaded is not kind:
        raise ContractError("processes", f"{target} is not the class that is checked", remedy)
    return target


def _check_calls(role: RoleUnderTest, cluster: Cluster, group: WorkerGroup[Any], batch: BatchedDataDict) -> None:
    """Call the role twice, the second time with the rows in another order."""
    order = np.random.default_rng(0).permutation(batch.num_rows)
    with cluster.store.lease("the check"):
        rows = cluster.store.fetch(role.run(batch, "processes", _ANSWER, group))
        role.check_scores(batch, rows, group)
        again = cluster.store.fetch(role.run(batch.select(order), "processes", _ANSWER, group))
    when = "returns a different result for a row when rows come in another order"
    remedy = "compute a row from its own columns, in a group of ranks too"
    role.compare(rows, again.select(np.argsort(order)), "processes", when, remedy)


def _check_death(role: RoleUnderTest, group: WorkerGroup[Any], batch: BatchedDataDict) -> None:
    """Kill the last rank, and check that the next call reports it."""
    assert isinstance(group.ranks, RayRanks)
    processes = group.ranks.process_ids()
    victim = len(processes) - 1
    remedy = "keep no thread or process between a rank and its end: a role lives and dies with its rank"
    os.kill(processes[victim], signal.SIGKILL)
    begin = time.monotonic()
    try:
        group.run(role.method, batch)
    except RoleError as error:
        if error.rank == victim and time.monotonic() - begin < _NOTICED_S:
            return
        problem = f"rank {victim} was killed, and after {time.monotonic() - begin:.0f} s the call ended by: {error}"
        raise ContractError("death", problem, remedy) from error
    raise ContractError("death", f"rank {victim} of {role.name} was killed, but the next call continued", remedy)


@contextmanager
def _marked() -> Iterator[str]:
    """Mark the processes that are started inside the block."""
    mark = os.environ[_MARK] = secrets.token_hex(8)
    try:
        yield mark
    finally:
        del os.environ[_MARK]


def _left_behind(mark: str) -> list[str]:
    """Kill the marked processes that outlive the run; return their commands."""
    begin = time.monotonic()
    while (alive := [process for process in psutil.process_iter() if _is_marked(process, mark)]) and (
        time.monotonic() - begin < _LEFT_S
    ):
        psutil.wait_procs(alive, timeout=0.1)
    commands = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            commands.append(" ".join(process.cmdline())[:120])
            process.kill()
    return commands


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except psutil.Error:  # exited in the meantime, or of another user
        return False

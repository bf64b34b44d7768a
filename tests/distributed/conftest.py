"""One local Ray for a module's tests, with roles that live as long: a process takes seconds to start."""

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlpack.config.roles import builtin_roles, started_roles
from rlpack.config.schema import Config, Placement, Pool, Role, RoleBatching
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.ray_store import RayStore
from rlpack.distributed.start_roles import start_roles
from rlpack.distributed.worker_group import WorkerGroup
from tests.builders import tiny_config, tiny_tokenizer
from tests.forked_workers import forked_workers, shared_servers

ROOT = Path(__file__).parents[2]

JUDGE = '''
import torch
from rlpack.worker import Worker, sharded


class Judge(Worker):
    """Likes long answers."""

    def __init__(self, context, weight):
        super().__init__(context)
        self.weight = weight

    @classmethod
    def from_settings(cls, context, config, tokenizer):
        return cls(context, weight=1.0 / config.rollout.max_new_tokens)

    @sharded()
    def score(self, shard):
        counts = torch.tensor([float(len(text)) for text in shard["completion"]])
        quarantined = torch.zeros(shard.num_rows, dtype=torch.bool)
        return shard.keep([]).union({"rewards": counts * self.weight, "quarantined": quarantined})
'''

# Pools of roles that answer, whose ranks a test ends.
ENDED_RANKS = {"lost": 2, "damaged": 1, "incomplete": 1, "reordered": 1, "late": 1}
# Ranks of the pools that a module starts only if its EXTRA_POOLS names them; those of the others are there to fail.
EXTRA_RANKS = {
    **ENDED_RANKS,
    "explodes": 2,
    "explodes_first": 2,
    "hangs_first": 1,
    "loses_touch": 2,
    "dies": 2,
    "exports": 2,
    "imports": 1,
    "returns": 1,
}


def ray_config(extra: Sequence[str]) -> Config:
    """Return a run with a role per batching mode, a user's own judge, and the roles `extra` in separate pools."""
    echo = "tests.distributed.roles:Echo"
    roles = {
        **builtin_roles(),
        "packed": Role(target=echo, batching=RoleBatching(mode="packed", max_tokens=24)),
        "dynamic": Role(target=echo, batching=RoleBatching(mode="dynamic", max_tokens=48)),
        "fixed": Role(target=echo, batching=RoleBatching(mode="fixed", micro_batch_size=2)),
        "judge": Role(target="judge:Judge"),
        "sampler": Role(target="tests.distributed.roles:Sampler"),
        "listener": Role(target="tests.distributed.roles:Listener"),
        **{name: Role(target=echo, batching=RoleBatching(mode="packed", max_tokens=24)) for name in ENDED_RANKS},
        **{name: Role(target="tests.distributed.roles:Faulty") for name in EXTRA_RANKS if name not in ENDED_RANKS},
    }
    roles = {name: role for name, role in roles.items() if name not in EXTRA_RANKS or name in extra}
    ranks = {"main": 2, **{name: EXTRA_RANKS[name] for name in extra}}
    pools = {name: Pool(ranks=count, cpus_per_rank=0.2) for name, count in ranks.items()}
    return tiny_config(
        roles=roles,
        placement=Placement(
            pools=pools,
            roles={name: name for name in extra},
            start_timeout_s=240.0,
            call_timeout_s=90.0,
        ),
    )


@pytest.fixture(scope="session")
def role_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Put a folder with a user's own role on the path of the processes that Ray will start."""
    folder = tmp_path_factory.mktemp("users_roles")
    (folder / "judge.py").write_text(JUDGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder)]))
        patch.syspath_prepend(folder)  # the driver looks at a role's class, too
        yield folder


@pytest.fixture(scope="module")
def role_config(request: pytest.FixtureRequest) -> Config:
    """Return the configuration of the module's roles."""
    return ray_config(getattr(request.module, "EXTRA_POOLS", ()))


@pytest.fixture(scope="module")
def cluster(role_path: Path, role_config: Config) -> Iterator[Cluster]:
    """Return the cluster on which the roles of `groups` run; its workers have their imports when they start."""
    workers = shared_servers()
    with nullcontext() if workers is None else forked_workers(workers), Cluster(role_config.placement) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def store(cluster: Cluster) -> RayStore:
    """Return where results of the roles of `groups` lie."""
    return cluster.store


@pytest.fixture(scope="module")
def groups(request: pytest.FixtureRequest, cluster: Cluster, role_config: Config) -> dict[str, WorkerGroup[Any]]:
    """Return the running roles of `ray_config`, with the module's extra pools.

    These pools are not started again after a fault, as if a role of theirs was trained, unless the module's RESTARTS
    is true.
    """
    groups = start_roles(cluster, role_config, started_roles(role_config), (role_config, tiny_tokenizer()))
    if not getattr(request.module, "RESTARTS", False):
        for name in getattr(request.module, "EXTRA_POOLS", ()):
            groups[name].ranks.is_restartable = False
    return groups

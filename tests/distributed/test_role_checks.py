"""`check_role_on_ray`, and what its checks say of roles that raise, die, hang, or differ by rank."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.roles import builtin_roles
from rlpack.config.schema import Placement, Pool, Role
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.start_roles import start_roles
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.testing import ContractError, check_role_on_ray, sample_batch, sample_tokenizer
from rlpack.testing import on_ray as processes
from rlpack.testing.contracts import RoleUnderTest
from rlpack.worker import Worker, sharded
from tests.builders import tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Lengths(Worker):
    def __init__(self, context: Any, factor: float = 1.0) -> None:
        super().__init__(context)
        self.factor = factor

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        rewards = torch.tensor([self.factor * len(text) for text in shard["completion"]])
        quarantined = torch.zeros(shard.num_rows, dtype=torch.bool)
        return shard.keep([]).union({"rewards": rewards, "quarantined": quarantined, "texts": shard["completion"]})


class Exits(Lengths):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        os._exit(0)


class Hangs(Lengths):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        time.sleep(600)
        return shard


class Apart(Lengths):
    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        found = super().score(shard)
        return found.drop(["rewards"]).union({"rewards": found["rewards"] + self.context.rank})


FAULTY: dict[str, type[Worker]] = {"exits": Exits, "hangs": Hangs, "apart": Apart}
Started = tuple[Cluster, dict[str, WorkerGroup[Any]]]


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """Return a cluster and the running roles, each in a pool of its own."""
    pools = {name: Pool(ranks=2 if name == "apart" else 1, cpus_per_rank=0.2) for name in FAULTY}
    placement = Placement(
        pools={**pools}, roles={name: name for name in FAULTY}, start_timeout_s=240.0, call_timeout_s=20.0
    )
    roles = {name: Role(target=f"{__name__}:{kind.__name__}") for name, kind in FAULTY.items()}
    config = tiny_config(roles={**builtin_roles(), **roles}, placement=placement)
    with Cluster(placement) as cluster:
        groups = start_roles(cluster, config, list(FAULTY), (config, sample_tokenizer()))
        for group in groups.values():
            group.ranks.is_restartable = False  # as in `check_role_on_ray`
        yield cluster, groups


def test_a_good_role_runs_dies_and_leaves_nothing_behind():
    before = dict(os.environ)
    check_role_on_ray(Lengths, arguments={"factor": 0.5})
    assert os.environ.get("PYTHONPATH") == before.get("PYTHONPATH")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exits", "role exits, rank 0, in score: the process died"),
        ("hangs", r"role hangs, rank 0, in score: no answer from rank 0 within 20 s"),
        ("apart", "Apart.score returns a different result for a row when rows come in another order: 'rewards' of row"),
    ],
)
def test_a_role_that_fails_on_its_ranks_is_told_how(started: Started, name: str, message: str):
    cluster, groups = started
    role = RoleUnderTest.of(FAULTY[name], None, None, None, None, 1e-5)
    with pytest.raises(ContractError, match=f"^processes: {message}"):
        processes._check_calls(role, cluster, groups[name], sample_batch())

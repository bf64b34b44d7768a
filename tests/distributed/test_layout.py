"""Ranks that share rows, on four processes: data parallelism 2 × tensor parallelism 2."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlpack.batch.batch import BatchedDataDict
from rlpack.config.roles import builtin_roles
from rlpack.config.schema import Placement, Pool, Role, RoleBatching
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.start_roles import start_roles
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.worker import RankContext, Worker, broadcast, sharded
from tests.builders import tiny_config, tiny_rollouts, tiny_tokenizer
from tests.distributed.processes import on_ranks

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LAYOUT = ParallelLayout(dp_shard=2, tp=2)
DEADLINE_S = 6  # it holds for the start of the processes, too: on a loaded machine they connect within seconds
SIZES = [(3, 9), (5, 1), (4, 0), (2, 16), (7, 6), (3, 8), (1, 4)]


class Halves(Worker):
    """Both ranks of a data rank add their half of a number, as tensor-parallel layers do."""

    objects: list[str]

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.mesh = context.layout.device_mesh("cpu")

    @sharded()
    def double(self, shard: BatchedDataDict) -> BatchedDataDict:
        handles: list[Any] = []
        read = shard.reader
        assert read is not None
        shard.reader = lambda asked: handles.extend(asked) or read(asked)
        tokens = shard["input_ids"]
        self.objects = [handle.ref.hex() for handle in handles]
        halves = tokens.values.double()
        dist.all_reduce(halves, group=self.mesh["tp"].get_group())
        ranks = torch.full((shard.num_rows,), self.context.rank)
        return shard.keep([]).union({"input_ids": tokens.with_values(halves.long()), "rank": ranks})

    @sharded(merge=sum)
    def count(self, shard: BatchedDataDict) -> int:
        return shard.num_rows

    @broadcast
    def objects_read(self) -> list[list[str]]:
        """Return the objects that each rank read in its last call."""
        every: list[list[str] | None] = [None] * self.context.num_ranks
        dist.all_gather_object(every, self.objects)
        return [objects for objects in every if objects is not None]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    placement = Placement(pools={"main": Pool(ranks=4, cpus_per_rank=0.2)}, roles={}, start_timeout_s=240.0)
    with Cluster(placement) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def halves(cluster: Cluster) -> WorkerGroup[Halves]:
    role = Role(target=f"{__name__}:Halves", batching=RoleBatching(mode="packed", max_tokens=24))
    config = tiny_config(roles={**builtin_roles(), "halves": role})
    settings = (config, tiny_tokenizer())
    return start_roles(cluster, config, ["halves"], settings, layouts={"halves": LAYOUT})["halves"]


def test_ranks_of_a_data_rank_read_one_object_and_one_of_them_returns_the_rows(
    cluster: Cluster, halves: WorkerGroup[Halves]
):
    batch = tiny_rollouts(SIZES).keep(["input_ids"])
    with cluster.store.lease("a step"):
        before = cluster.store.in_flight
        twice = halves.run(Halves.double, batch)
        tokens = sum(prompt + response for prompt, response in SIZES)
        assert cluster.store.in_flight - before == 8 * tokens + 8 * len(SIZES)  # each row is stored once
        again = halves.run(Halves.double, twice.drop(["rank"]))
        assert torch.equal(cluster.store.fetch(again)["input_ids"].values, 4 * batch["input_ids"].values)
        assert set(again["rank"].tolist()) == {0, 2}
        objects = halves.run(Halves.objects_read)
    assert objects[0] == objects[1] != []
    assert objects[2] == objects[3] != []


def test_sums_are_over_data_ranks(halves: WorkerGroup[Halves]):
    assert halves.run(Halves.count, tiny_rollouts(SIZES)) == len(SIZES)


def coordinates(_: object, rank: int) -> tuple[dict[str, int], float]:
    """Return a rank's place in the layout's mesh, and the sum of the ranks over its tensor-parallel group."""
    mesh = LAYOUT.device_mesh("cpu")
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=mesh["tp"].get_group())
    return dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True)), total.item()


def test_the_mesh_has_the_layouts_order(tmp_path: Path):
    for rank, (place, total) in enumerate(on_ranks(tmp_path, LAYOUT.world_size, coordinates)):
        expected = LAYOUT.coordinates(rank)
        assert place == {"dp_shard": expected["dp_shard"], "tp": expected["tp"]}
        assert total == (0 + 1 if rank < 2 else 2 + 3)


def expert_group(_: object, rank: int) -> tuple[tuple[str, ...], list[int], list[int]]:
    """Return the dimensions of a mesh of experts, and the ranks of this rank's groups."""
    mesh = ParallelLayout(dp_shard=2, cp=2, tp=1, ep=2).expert_mesh("cpu")
    groups = [dist.get_process_group_ranks(mesh[name].get_group()) for name in ("ep", "dp_shard")]
    return tuple(mesh.mesh_dim_names or ()), *groups


def test_neighbours_divide_experts_and_the_others_hold_the_same(tmp_path: Path):
    for rank, (names, divide, same) in enumerate(on_ranks(tmp_path, 4, expert_group)):
        assert names == ("dp_shard", "ep")
        assert divide == ([0, 1] if rank < 2 else [2, 3])
        assert same == [rank % 2, rank % 2 + 2]


def timeouts(_: object, rank: int) -> dict[str, float]:
    """Return the timeouts of a layout's groups, in seconds."""
    layout = ParallelLayout(dp_shard=1, cp=2, tp=1, pp=2, ep=2)
    meshes = {name: getattr(layout, name)("cpu") for name in ("device_mesh", "weight_mesh", "expert_mesh")}
    groups = {f"{name}.{dim}": mesh[dim].get_group() for name, mesh in meshes.items() for dim in mesh.mesh_dim_names}
    groups["pipeline_group"] = layout.pipeline_group("cpu")
    cpu = torch.device("cpu")
    return {name: group._get_backend(cpu).options._timeout.total_seconds() for name, group in groups.items()}


def test_all_groups_of_a_layout_have_the_timeout_of_the_default_group(tmp_path: Path):
    """`on_ranks` starts it with 30 seconds; gloo's own default are 30 minutes."""
    for found in on_ranks(tmp_path, 4, timeouts):
        assert set(found) >= {"device_mesh.cp", "weight_mesh.dp_shard", "expert_mesh.ep", "pipeline_group"}
        assert set(found.values()) == {30.0}, found


def waits_alone(_: object, rank: int) -> tuple[str, float]:
    """Let rank 0 wait for rank 1 in a group of both; return its error, and the seconds until then."""
    group = ParallelLayout(dp_shard=2, tp=2).device_mesh("cpu")["tp"].get_group()
    if rank == 1:
        time.sleep(2 * DEADLINE_S)
    began = time.monotonic()
    try:
        dist.all_reduce(torch.zeros(1), group=group) if rank == 0 else None
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_a_rank_that_waits_in_a_group_ends_at_the_configured_deadline(tmp_path: Path):
    error, seconds = on_ranks(tmp_path, 4, waits_alone, timeout_s=DEADLINE_S)[0]
    assert f"{DEADLINE_S * 1000}ms" in error
    assert seconds < 2 * DEADLINE_S  # gloo's default is 30 minutes

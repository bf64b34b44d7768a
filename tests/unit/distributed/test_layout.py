"""Ranks of a layout, its data ranks and output ranks, and calls over ranks that share rows."""

import itertools
from typing import Any

import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.distributed.context import RankContext
from rlpack.distributed.errors import PlacementError, RoleError
from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.worker_group import WorkerGroup
from rlpack.packing import Batching
from rlpack.testing.local_ranks import LocalRanks
from rlpack.worker import Worker, broadcast, sharded
from tests.builders import tiny_rollouts

SIZES = [(3, 9), (5, 1), (4, 0), (2, 16), (7, 6), (3, 8), (1, 4)]
LAYOUTS = [
    ParallelLayout(dp_shard=2, tp=2),
    ParallelLayout(dp_shard=2, cp=2),
    ParallelLayout(dp_replicate=2, dp_shard=3),
    ParallelLayout(dp_shard=2, pp=2),
    ParallelLayout(dp_replicate=2, dp_shard=1, cp=2, tp=2, pp=3),
]


class Replica(Worker):
    """Returns the ranks that had its rows, and remembers the rows that it was sent."""

    seen: list[list[int]]

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.seen = []

    @sharded()
    def double(self, shard: BatchedDataDict) -> BatchedDataDict:
        self.seen.append(shard.row_ids.tolist())
        tokens = shard["input_ids"]
        ranks = torch.full((shard.num_rows,), self.context.rank)
        return shard.keep([]).union({"doubled": tokens.with_values(2 * tokens.values), "rank": ranks})

    @sharded(merge=sum)
    def count(self, shard: BatchedDataDict) -> int:
        return shard.num_rows

    @sharded(merge=list)
    def widths(self, shard: BatchedDataDict) -> tuple[int, int]:
        views = list(shard.microbatches())
        return len(views), views[0].layout.shape[1]

    @sharded()
    def forget(self, shard: BatchedDataDict) -> BatchedDataDict:
        return shard.select([]) if self.context.dp_rank == 1 else shard

    @broadcast
    def rank(self) -> int:
        return self.context.rank


def group(layout: ParallelLayout, batching: Batching | None = None) -> tuple[WorkerGroup[Replica], LocalRanks]:
    ranks = LocalRanks([Replica] * layout.world_size, layout=layout)
    return WorkerGroup("replica", ranks, batching or Batching(max_tokens=24), layout=layout), ranks


@pytest.mark.parametrize("layout", [ParallelLayout(), *LAYOUTS])
def test_ranks_are_numbered_as_torch_numbers_a_mesh(layout: ParallelLayout):
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    mesh = torch.arange(layout.world_size).view(sizes)
    for pp, replicate, shard, cp, tp in itertools.product(*map(range, sizes)):
        rank = int(mesh[pp, replicate, shard, cp, tp])
        assert layout.coordinates(rank) == {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp}
        assert layout.dp_rank_of(rank) == replicate * layout.dp_shard + shard
        assert layout.is_output_rank(rank) == (cp == 0 and tp == 0 and pp == layout.pp - 1)


@pytest.mark.parametrize("layout", [ParallelLayout(), *LAYOUTS])
def test_every_data_rank_has_one_output_rank_and_the_first_reports(layout: ParallelLayout):
    assert [layout.dp_rank_of(rank) for rank in layout.output_ranks] == list(range(layout.dp_size))
    reporting = [rank for rank in range(layout.world_size) if RankContext("main", rank, layout).is_reporting_rank]
    assert reporting == [layout.output_ranks[0]]


def test_a_layout_only_raises_the_divisor_of_a_batching():
    batching = Batching(pad_to_multiple=6, length_multiple=8, divisible_by=2)
    aligned = ParallelLayout(cp=2, tp=4, pp=3).align(batching)
    # Ranks split whole rows, so no sequence is padded for them.
    assert (aligned.pad_to_multiple, aligned.length_multiple, aligned.divisible_by) == (6, 8, 6)
    assert ParallelLayout(dp_shard=4, tp=4).align(batching) == batching


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_size_that_is_no_count_is_refused(size: Any):
    with pytest.raises(PlacementError, match=r"tp is .*; it has to be a whole number of at least 1"):
        ParallelLayout(tp=size)


def test_expert_parallel_ranks_are_taken_from_the_others():
    layout = ParallelLayout(dp_shard=2, cp=2, tp=2, ep=4)
    assert layout.world_size == 8
    assert layout.output_ranks == ParallelLayout(dp_shard=2, cp=2, tp=2).output_ranks
    with pytest.raises(PlacementError, match="ep is 4; it has to divide dp_shard · cp, which is 6"):
        ParallelLayout(dp_shard=3, cp=2, tp=4, ep=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_of_a_data_rank_get_the_same_rows_and_each_row_comes_back_once(layout: ParallelLayout):
    replicas, ranks = group(layout)
    batch = tiny_rollouts(SIZES)
    rows = replicas.run(Replica.double, batch)
    assert torch.equal(rows["doubled"].values, 2 * batch["input_ids"].values)
    assert set(rows["rank"].tolist()) <= set(layout.output_ranks)
    seen = [worker.seen[0] for worker in ranks._workers]
    plan = replicas.plan(batch)
    for rank in range(layout.world_size):
        assert seen[rank] == plan.rank_plan(layout.dp_rank_of(rank)).rows.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_are_over_data_ranks(layout: ParallelLayout):
    replicas, _ = group(layout)
    assert replicas.run(Replica.count, tiny_rollouts(SIZES)) == len(SIZES)
    assert replicas.run(Replica.rank) == 0


def test_microbatches_are_counted_as_the_layout_needs():
    replicas, _ = group(ParallelLayout(dp_shard=2, tp=4, pp=3))
    for count, _ in replicas.run(Replica.widths, tiny_rollouts(SIZES)):
        assert count % 3 == 0


def test_an_error_names_the_output_rank():
    replicas, _ = group(ParallelLayout(dp_shard=2, tp=2))
    with pytest.raises(RoleError, match="role replica, rank 2, in forget: it returned 0 rows"):
        replicas.run(Replica.forget, tiny_rollouts(SIZES))


def test_a_layout_for_other_ranks_is_refused():
    with pytest.raises(PlacementError, match=r"role replica has 3 ranks, and ParallelLayout\(.*tp=4.*\) needs 4"):
        WorkerGroup("replica", LocalRanks([Replica] * 3), Batching(), layout=ParallelLayout(tp=4))

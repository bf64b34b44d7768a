"""Which devices the ranks of a pool get on a cluster that others use; Ray's placement groups are simulated."""

import random

import pytest

from rlpack.distributed.layout import ParallelLayout
from rlpack.distributed.reservations import bundles_by_rank


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("devices", [(8, 8, 8, 8), (4, 8, 8, 4), (1, 2)])
def test_the_ranks_of_a_node_are_consecutive_in_whatever_order_bundles_are_placed(devices: tuple[int, ...], seed: int):
    placed = [f"node{node}" for node, free in enumerate(devices) for _ in range(free)]
    random.Random(seed).shuffle(placed)
    node_of = dict(enumerate(placed))

    bundles = bundles_by_rank(node_of)

    assert sorted(bundles) == sorted(node_of)
    nodes = [node_of[bundle] for bundle in bundles]
    sizes = [nodes.count(node) for node in dict.fromkeys(nodes)]
    assert nodes == [node for node, size in zip(dict.fromkeys(nodes), sizes, strict=True) for _ in range(size)]
    assert sizes == sorted(devices, reverse=True)


def test_bundles_on_one_node_keep_their_order():
    assert bundles_by_rank(dict.fromkeys(range(12), "a")) == tuple(range(12))


def test_tensor_parallel_groups_are_within_nodes_if_partly_free_nodes_come_first():
    node_of = {bundle: "half a" if bundle < 4 else "whole" if bundle < 12 else "half b" for bundle in range(16)}
    layout = ParallelLayout(dp_shard=4, tp=4)
    nodes = [node_of[bundle] for bundle in bundles_by_rank(node_of)]
    assert nodes[:8] == ["whole"] * 8
    for data_rank in range(4):
        assert len({nodes[rank] for rank in range(16) if layout.dp_rank_of(rank) == data_rank}) == 1

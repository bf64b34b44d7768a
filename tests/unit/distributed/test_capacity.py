import pytest

from rlpack.config.schema import Pool
from rlpack.distributed.capacity import check_capacity
from rlpack.distributed.errors import PlacementError

NODES = [{"CPU": 8.0, "GPU": 4.0, "memory": 1e9}, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 2.0}]


@pytest.mark.parametrize(
    "pools",
    [
        {"main": Pool(ranks=8, cpus_per_rank=2, gpus_per_rank=1)},
        {"main": Pool(ranks=8, gpus_per_rank=1), "cpu": Pool(ranks=10)},
        {"main": Pool(ranks=60, cpus_per_rank=0.3)},
        {"main": Pool(ranks=180, cpus_per_rank=0.1)},
    ],
)
def test_what_the_cluster_has_room_for_passes(pools):
    check_capacity(pools, NODES if pools["main"].ranks != 60 else [{"CPU": 18.0}], None)


@pytest.mark.parametrize(
    ("pools", "extra", "message"),
    [
        ({"main": Pool(ranks=9, gpus_per_rank=1)}, 0, r"ask for 9 GPU, the cluster has 8 \(3 CPU, 1 GPU free\); lower"),
        ({"a": Pool(ranks=10), "b": Pool(ranks=9)}, 0, r"pools a, b ask for 19 CPU, the cluster has 18 \(3 CPU, 1 GPU"),
        ({"main": Pool(ranks=18)}, 1, r"and the driver \(job.driver_cpus 1\) ask for 19 CPU, the cluster has 18"),
        # Enough in all, but not side by side on a node.
        ({"main": Pool(ranks=2, cpus_per_rank=9)}, 0, r"room for 0 of them \(3 CPU, 1 GPU free\); lower"),
        ({"main": Pool(ranks=3, cpus_per_rank=5)}, 0, r"pool main asks for 3 ranks of 5 CPU and 0 GPU.* room for 2 of"),
        ({"main": Pool(ranks=7, cpus_per_rank=2.5, gpus_per_rank=1)}, 0, r"3 nodes have room for 6 of them"),
    ],
)
def test_what_it_could_never_hold_is_said_with_what_is_free(pools, extra, message):
    with pytest.raises(PlacementError, match=message):
        check_capacity(pools, NODES, {"CPU": 3.0, "GPU": 1.0}, extra=extra)


@pytest.mark.parametrize(
    ("pool", "keys"),
    [
        (Pool(ranks=1, cpus_per_rank=4, gpus_per_rank=8), ".gpus_per_rank"),
        (Pool(ranks=3, cpus_per_rank=5, gpus_per_rank=1), ".cpus_per_rank"),
        (Pool(ranks=1, cpus_per_rank=9), ".cpus_per_rank"),
        (Pool(ranks=1, cpus_per_rank=9, gpus_per_rank=5), ".cpus_per_rank or .gpus_per_rank"),
        # Some nodes have the cores, others the GPUs.
        (Pool(ranks=2, cpus_per_rank=2, gpus_per_rank=4), ".cpus_per_rank or .gpus_per_rank"),
    ],
)
def test_the_key_of_what_no_node_has_room_for_is_named(pool: Pool, keys: str):
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 1.0, "GPU": 4.0}, {"CPU": 8.0}]
    with pytest.raises(PlacementError, match=rf"lower placement.pools.judge.ranks or {keys}$"):
        check_capacity({"judge": pool}, nodes, None)

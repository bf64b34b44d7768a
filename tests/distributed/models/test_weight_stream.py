"""A sharded policy streams its weights, and no rank ever holds much more than a bucket."""

from pathlib import Path
from typing import Any

import torch

from rlpack.models.parallel import shard_model
from rlpack.models.policy import Policy
from rlpack.models.weight_stream import WeightStream
from tests.distributed.processes import on_ranks
from tests.memory_rise import MIB, MemoryRise
from tests.unit.models.tiny import tiny_model

BUCKET_BYTES = 16 * MIB


def large_policy() -> Policy:
    """Return a policy of 210 MiB, whose largest weight has 4 MiB."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 14, "tie_word_embeddings": True}
    return Policy(tiny_model("qwen2", dtype=torch.float32, **shape))


def stream(mesh: Any, rank: int) -> tuple[bool, int, int]:
    """Return whether all weights arrived, the size of the model, and how far memory rose while it was streamed."""
    memory = MemoryRise()
    policy = large_policy()
    named = policy.model.named_parameters()
    expected = {name: weight.detach().sum(dtype=torch.float64).item() for name, weight in named}
    shard_model(policy, mesh)
    weights = WeightStream(policy, torch.float32, bucket_bytes=BUCKET_BYTES)
    sums: dict[str, float] = {}
    weights.gather(0)  # sets up communication, which takes memory, too
    memory.start()
    for index in range(len(weights.layout)):
        bucket = weights.gather(index, keep=index % mesh.size() == rank)
        sums |= {name: weight.sum(dtype=torch.float64).item() for name, weight in bucket.items()}
        del bucket
    total = sum(spec.num_bytes for specs in weights.layout.buckets for spec in specs)
    every: list[Any] = [None] * mesh.size()
    torch.distributed.all_gather_object(every, sums)
    arrived = {name: value for part in every for name, value in part.items()}
    return arrived == expected, total, memory.num_bytes


def test_memory_of_an_exporting_rank_is_bounded_by_the_bucket_and_not_by_the_model(tmp_path: Path):
    for arrived, total, rise in on_ranks(tmp_path, 2, stream):
        assert arrived
        assert total > 200 * MIB
        # A gathered bucket, its parts as sent and received.
        assert rise < 3 * BUCKET_BYTES < total / 4


def stream_large_weight(mesh: Any, rank: int) -> tuple[bool, float]:
    """Return whether rank 0 got a weight in bf16, and how far memory rose, in MiB."""
    memory = MemoryRise()
    shape = {"vocab_size": 131_072, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}
    policy = Policy(tiny_model("qwen2", dtype=torch.float32, tie_word_embeddings=True, **shape))
    truth = policy.model.get_parameter("model.embed_tokens.weight").detach().bfloat16() if rank == 0 else None
    shard_model(policy, mesh)
    weights = WeightStream(policy, torch.bfloat16, bucket_bytes=0)
    assert weights.layout.buckets[0][0].num_bytes == 128 * MIB
    weights.gather(1)  # sets up communication, which takes memory, too
    memory.start()
    bucket = weights.gather(0, keep=rank == 0)
    rise = memory.num_bytes / MIB
    if truth is None:
        return bucket == {}, rise
    (weight,) = bucket.values()
    return torch.equal(weight, truth), rise


def test_a_weight_above_the_bucket_takes_its_own_size_in_the_stream_and_nothing_elsewhere(tmp_path: Path):
    (keeps, most), (takes_part, least) = on_ranks(tmp_path, 2, stream_large_weight)
    assert keeps
    assert takes_part
    assert 128 < most < 128 + 32  # of 256 MiB in fp32
    assert least < 32

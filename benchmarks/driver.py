"""Measure what a rollout step costs the driver, as tokens a row grow and rows don't.

    python -m benchmarks.driver [--rows 2048]

Two ranks sample, score, compute log-probs and train, all of it made up; the driver plans, shards, restores and hands
results on as a recipe does. Its bytes are those of all arguments and results as they are pickled, its memory what the
process has for itself alone while the step's batch is alive.
"""

import argparse
import pickle
from typing import Any

import psutil
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Config, Placement, Pool, Role, RoleBatching
from rlpack.data.tokenization import character_tokenizer
from rlpack.distributed.calls import Call, Pending
from rlpack.distributed.cluster import Cluster
from rlpack.distributed.ray_store import RayStore
from rlpack.distributed.start_roles import start_roles
from rlpack.distributed.worker_group import Ranks, WorkerGroup
from rlpack.worker import Worker, sharded

TOKENS, GROWTH = 128, 16


class MadeUp(Worker):
    """Does what the four roles do to a batch's columns, without a model."""

    @sharded()
    def generate(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return rows of `tokens` tokens, with texts."""
        lengths = shard["tokens"]
        total = int(lengths.sum())
        tokens = Ragged(torch.arange(total), lengths)
        columns = {
            "input_ids": tokens,
            "response_mask": tokens.with_values(torch.ones(total, dtype=torch.bool)),
            "rollout_logprobs": tokens.with_values(torch.zeros(total)),
            "completion": ["x" * 4 * count for count in lengths.tolist()],
        }
        return shard.keep(["uid"]).union(columns)

    @sharded()
    def score(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return `rewards`, from texts."""
        return shard.keep([]).union({"rewards": torch.tensor([float(len(text)) for text in shard["completion"]])})

    @sharded()
    def logprobs(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return `logprobs`."""
        tokens = shard["input_ids"]
        return shard.keep([]).union({"logprobs": tokens.with_values(tokens.values.float())})

    @sharded(merge=sum)
    def update(self, shard: BatchedDataDict) -> int:
        """Return how many tokens were read."""
        views = (view for step in range(shard.num_steps) for view in shard.microbatches(step))
        return sum(view.rows["logprobs"].values.numel() for view in views)


class Meter:
    """Counts the bytes that go to a group's ranks and come back."""

    def __init__(self, ranks: Ranks) -> None:
        """Take the place of the ranks' own method."""
        self.sent: list[int] = []
        self._submit = ranks.submit
        ranks.submit = self.submit

    def submit(self, call: Call) -> Pending[list[Any]]:
        """Start a call, and count once its results are there."""
        pending = self._submit(call)
        return Pending(lambda: self._metered(call, pending.result()), pending.answers)

    def _metered(self, call: Call, results: list[Any]) -> list[Any]:
        self.sent.append(len(pickle.dumps((list(call.args_of_rank), results))))
        return results


def step(group: WorkerGroup[MadeUp], meter: Meter, store: RayStore, rows: int, tokens: int) -> tuple[int, int]:
    """Take one step; return the driver's bytes on the wire and in memory."""
    meter.sent.clear()
    spread = torch.randint(tokens // 2, tokens * 3 // 2, (rows,), generator=torch.Generator().manual_seed(0))
    prompts = BatchedDataDict({"tokens": spread, "uid": [f"row {row}" for row in range(rows)]})
    with store.lease("a step"):
        rollouts = group.run(MadeUp.generate, prompts)
        rollouts = rollouts.union(group.run(MadeUp.score, rollouts.keep(["input_ids", "completion"])))
        rollouts = rollouts.union(group.run(MadeUp.logprobs, rollouts.keep(["input_ids", "response_mask"])))
        advantages = rollouts["rewards"] - rollouts["rewards"].mean()
        columns = ["input_ids", "response_mask", "logprobs"]
        read = group.run(MadeUp.update, rollouts.keep(columns).union({"advantages": advantages}))
        assert read == int(spread.sum())
        memory = psutil.Process().memory_full_info().uss
    return sum(meter.sent), memory


def growth(rows: int = 2048) -> tuple[float, float]:
    """Return bytes on the wire and in memory with 16 times the tokens a row, over those with few; prints both."""
    target = "benchmarks.driver:MadeUp"
    roles = {"made_up": Role(target=target, batching=RoleBatching(mode="packed", max_tokens=4 * TOKENS * GROWTH))}
    config = Config(roles=roles, placement=Placement(pools={"main": Pool(ranks=2, cpus_per_rank=0.5)}))
    with Cluster(config.placement) as cluster:
        groups = start_roles(cluster, config, ["made_up"], (config, character_tokenizer("x")))
        group = groups["made_up"]
        meter = Meter(group.ranks)
        costs = []
        for tokens in (TOKENS, TOKENS * GROWTH):
            step(group, meter, cluster.store, rows, tokens)
            sent, memory = min(step(group, meter, cluster.store, rows, tokens) for _ in range(3))
            peak = cluster.store.pop_peak_bytes()
            print(f"{rows} rows of {tokens} tokens: the store holds {peak / 1e6:.1f} MB, the driver moves ", end="")
            print(f"{sent / 1e6:.3f} MB and has {memory / 1e6:.0f} MB to itself")
            costs.append((sent, memory))
    return costs[1][0] / costs[0][0], costs[1][1] / costs[0][1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    print("bytes, memory: times {:.4f}, times {:.4f}".format(*growth(parser.parse_args().rows)))

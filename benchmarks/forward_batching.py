"""Compute the log-probs of one long-tailed batch with the update's microbatches and with larger ones.

    python -m benchmarks.forward_batching [--ranks 2] [--rows 128] [--factor 4] [--repeats 9] [--seed 1]

The update's token budget is the longest row, the least that a run can have; `actor.forward_batching.max_tokens` is
`--factor` times as large. Each rank is a process with one thread, and the actor is the one of a run, sharded by FSDP2.
The two plans take turns within every repeat, so that a slow moment of the machine meets both. Exits with 1 if the
ratio of the medians is below 1.15 or a log-prob differs by more than 1e-6.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.config.roles import forward_batching, role_batching
from rlpack.config.schema import Actor, Config, Data, Model, Rollout
from rlpack.config.sections.role_batching import ForwardBatching
from rlpack.data.tokenization import character_tokenizer
from rlpack.distributed.context import RankContext
from rlpack.distributed.layout import ParallelLayout
from rlpack.gloo import GLOO
from rlpack.models.flops import sequence_cost
from rlpack.models.loading import build_meta_model
from rlpack.packing import Batching, MicrobatchPlan, make_plan
from rlpack.workers.actor import ActorWorker

LONGEST, PROMPT = 256, 16
# Characters of the vocabulary, and a model whose shape is that of a small pretrained one: most weights are in matrices
# that FSDP2 gathers for each microbatch.
CHARACTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 2048)))
MODEL = Model(
    config={
        "model_type": "qwen2",
        "hidden_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
        "tie_word_embeddings": True,
    }
)
BAR, TOLERANCE = 1.15, 1e-6


def long_tailed_lengths(rows: int, seed: int) -> np.ndarray:
    """Return lognormal lengths with a median of 32 tokens; the longest has 256.

    >>> lengths = long_tailed_lengths(256, 1)
    >>> lengths.size, int(lengths.max())
    (256, 256)
    """
    drawn = np.random.default_rng(seed).lognormal(np.log(32), 1.0, rows)
    lengths = np.clip(drawn, PROMPT + 1, LONGEST).astype(np.int64)
    lengths[lengths.argmax()] = LONGEST
    return lengths


def config_of(factor: int) -> Config:
    """Return the configuration of a run whose passes without gradients have a separate budget."""
    return Config(
        model=MODEL,
        data=Data(max_prompt_tokens=PROMPT),
        rollout=Rollout(max_new_tokens=LONGEST - PROMPT),
        batching=Batching(max_tokens=LONGEST),
        actor=Actor(logprob_chunk=256, forward_batching=ForwardBatching(max_tokens=factor * LONGEST)),
    )


def plans_of(config: Config, lengths: np.ndarray, ranks: int, vocabulary: int) -> dict[str, MicrobatchPlan]:
    """Return the plan of the update and that of passes without gradients."""
    cost = sequence_cost(build_meta_model(config.model, vocab_size=vocabulary, pad_token_id=0))
    forward = forward_batching(config, "actor")
    assert forward is not None
    batchings = {"update": role_batching(config, "actor"), "forward": forward}
    return {name: make_plan(lengths, batching, dp_size=ranks, cost=cost) for name, batching in batchings.items()}


def rows_of(lengths: np.ndarray, vocabulary: int, seed: int) -> BatchedDataDict:
    """Return rows of random tokens; all but the prompts are responses."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.from_numpy(lengths)
    tokens = Ragged(torch.randint(vocabulary, (int(lengths.sum()),), generator=generator), sizes)
    places = torch.cat([torch.arange(length) for length in lengths.tolist()])
    return BatchedDataDict({"input_ids": tokens, "response_mask": Ragged(places >= PROMPT, sizes)})


def measure(rank: int, arguments: argparse.Namespace, store: str, results: str) -> None:
    """Time both plans on one rank; the first one writes the times and every rank its largest difference."""
    torch.set_num_threads(1)
    dist.init_process_group(GLOO, init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    tokenizer, config = character_tokenizer(CHARACTERS), config_of(arguments.factor)
    lengths = long_tailed_lengths(arguments.rows, arguments.seed)
    plans = plans_of(config, lengths, arguments.ranks, len(tokenizer))
    context = RankContext("main", rank, ParallelLayout(dp_shard=arguments.ranks))
    actor = ActorWorker.from_settings(context, config, tokenizer)
    batch = rows_of(lengths, len(tokenizer), arguments.seed)
    shards = {name: batch.shard(plan) for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    scored: dict[str, BatchedDataDict] = {}
    for _ in range(arguments.repeats + 1):  # the first one warms up
        for name, own in shards.items():
            dist.barrier()
            start = time.perf_counter()
            scored[name] = actor.logprobs(own[rank])
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    gathered: list[dict[str, BatchedDataDict]] = [{} for _ in range(arguments.ranks)]
    dist.all_gather_object(gathered, scored)
    if rank == 0:
        parts = {name: [of_rank[name] for of_rank in gathered] for name in plans}
        whole = [batch.keep([]).restore(parts[name])["logprobs"].values for name in plans]
        torch.save({"seconds": seconds, "gap": (whole[0] - whole[1]).abs().max().item()}, results)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Measure, print, and compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    lengths = long_tailed_lengths(arguments.rows, arguments.seed)
    plans = plans_of(config_of(arguments.factor), lengths, arguments.ranks, len(CHARACTERS))
    print(f"{lengths.size} rows, {lengths.min()} to {lengths.max()} tokens, median {int(np.median(lengths))}")
    with tempfile.TemporaryDirectory() as folder:
        results = str(Path(folder) / "results.pt")
        spawn(measure, (arguments, f"{folder}/store", results), nprocs=arguments.ranks)
        found = torch.load(results, weights_only=True)
    medians = {name: float(np.median(times[1:])) for name, times in found["seconds"].items()}
    fastest = {name: min(times[1:]) for name, times in found["seconds"].items()}
    for name, plan in plans.items():
        count = int(plan.counts.shape[1])
        print(f"{name:8} {count:3} microbatches per rank, {medians[name]:.3f} s (fastest {fastest[name]:.3f} s)")
    ratio = medians["update"] / medians["forward"]
    print(f"ratio {ratio:.2f} of medians, {fastest['update'] / fastest['forward']:.2f} of the fastest (at least {BAR})")
    print(f"largest difference of a log-prob {found['gap']:.1e} (at most {TOLERANCE:.0e})")
    return int(ratio < BAR or found["gap"] > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())

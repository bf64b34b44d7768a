"""What recording spans takes: the time of one, of all spans of a run as a share of its steps, and side by side.

    python -m benchmarks.spans [RUN_DIR] [--repeats 20000] [--pairs 300]

Without a run, one of the smallest size is made. Side by side, an actor of that size takes optimizer steps in turns with
its spans recorded and without. The order within a pair is random, and a pair's figure is the difference of its two
steps in CPU time, which other work on the machine changes less. Exits with 1 if any process spends more than 1 % of the
steps on spans, or if the mean of the pairs is above 1 % by more than two standard errors.
"""

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Algorithm, Config, Data, Model, Rollout
from rlpack.data.tokenization import character_tokenizer
from rlpack.distributed.context import RankContext
from rlpack.distributed.layout import ParallelLayout
from rlpack.gloo import GLOO
from rlpack.observe.trace import read_spans, train_steps
from rlpack.packing import Batching, make_plan
from rlpack.spans import recorded_spans, span
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import PolicyGradientLoss

BAR = 0.01
SMALL = ("experiment=smoke", "trainer.steps=6", "trainer.mini_batch_size=2", "trainer.lead=1", "placement=two_pools")


def costs(repeats: int) -> tuple[float, float]:
    """Return the seconds of a nested and of an outermost span, which is written to the file; medians of ten runs."""
    nested, outermost = [], []
    with tempfile.TemporaryDirectory() as folder, recorded_spans(Path(folder), "main/0"):
        for _ in range(10):
            with span("outer"):
                nested.append(seconds_of_one(repeats))
            outermost.append(seconds_of_one(repeats // 10))
    return statistics.median(nested), statistics.median(outermost)


def seconds_of_one(repeats: int) -> float:
    """Return the seconds of an empty span, the mean of `repeats`."""
    began = time.perf_counter()
    for _ in range(repeats):
        with span("empty"):
            pass
    return (time.perf_counter() - began) / repeats


def shard_of_step(rows: int, vocabulary: int, batching: Batching) -> BatchedDataDict:
    """Return the rows of an optimizer step: random tokens, of which all but the first four of a row are a response."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(8, 24, (rows,), generator=generator)
    places = torch.cat([torch.arange(size) for size in sizes.tolist()])
    tokens = torch.randint(1, vocabulary, places.shape, generator=generator)
    batch = BatchedDataDict(
        {
            "input_ids": Ragged(tokens, sizes),
            "response_mask": Ragged(places >= 4, sizes),
            "logprobs": Ragged(torch.where(places >= 4, -1.0, 0.0), sizes),
            "advantages": torch.randn(rows, generator=generator),
            "loss_weight": torch.full((rows,), 1 / int((sizes - 4).sum())),
            "token_weight": torch.full((rows,), 1 / int((sizes - 4).sum())),
        }
    )
    return batch.shard(make_plan(sizes.numpy(), batching, dp_size=1))[0]


def side_by_side(pairs: int) -> tuple[float, float]:
    """Return what recording adds to an optimizer step, as a share of it.

    Args:
        pairs: how many pairs of steps are timed.

    Returns:
        The mean of the pairs, and its standard error.
    """
    torch.set_num_threads(1)
    tokenizer = character_tokenizer("".join(map(chr, range(0x4E00, 0x4E00 + 64))))
    config = Config(
        model=Model(
            config={
                "model_type": "qwen2",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "intermediate_size": 64,
                "tie_word_embeddings": True,
            }
        ),
        data=Data(max_prompt_tokens=8),
        rollout=Rollout(max_new_tokens=24),
        batching=Batching(max_tokens=64),
    )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(GLOO, init_method=f"file://{folder}/store", rank=0, world_size=1)
        actor = ActorWorker.from_settings(RankContext("main", 0, ParallelLayout(dp_shard=1)), config, tokenizer)
        shard = shard_of_step(16, len(tokenizer), config.batching)
        loss = PolicyGradientLoss(Algorithm(), temperature=1.0)

        def seconds_of_step(recorded: bool) -> float:
            with recorded_spans(Path(folder), "main/0") if recorded else contextlib.nullcontext():
                began = time.process_time()
                with span("actor.train_step"):
                    actor.train_step(shard, loss, 1e-9)
                return time.process_time() - began

        draws, added, plain = random.Random(0), list[float](), list[float]()
        for pair in range(pairs + 10):  # the first ones warm up
            first = draws.random() < 0.5
            seconds = {recorded: seconds_of_step(recorded) for recorded in (first, not first)}
            if pair >= 10:
                added.append(seconds[True] - seconds[False])
                plain.append(seconds[False])
        dist.destroy_process_group()
    step = statistics.fmean(plain)
    return statistics.fmean(added) / step, statistics.stdev(added) / len(added) ** 0.5 / step


def main() -> int:
    """Measure, and compare with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, nargs="?")
    parser.add_argument("--repeats", type=int, default=20000)
    parser.add_argument("--pairs", type=int, default=300)
    options = parser.parse_args()
    nested_s, outermost_s = costs(options.repeats)
    print(f"a nested span {nested_s * 1e6:.1f} µs, an outermost one {outermost_s * 1e6:.1f} µs")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = options.run_dir
        if run_dir is None:
            run_dir = Path(folder) / "run"
            command = [sys.executable, "-m", "rlpack", "train", *SMALL, f"run_dir={run_dir}"]
            subprocess.run(command, check=True, capture_output=True, timeout=600.0)
        processes = read_spans(run_dir)
    steps = train_steps(processes)
    begin, end = steps[0].begin_us, steps[-1].end_us
    seconds, worst = (end - begin) / 1e6, 0.0
    for one in processes:
        inside = [s for s in one.spans if begin <= s.begin_us <= end]
        outer = sum(s in inside for thread in {s.thread for s in inside} for s in one.outermost(thread))
        share = (outer * outermost_s + (len(inside) - outer) * nested_s) / seconds
        worst = max(worst, share)
        print(f"{one.process}: {len(inside)} spans in {len(steps)} steps, {share:.2%} of their {seconds:.2f} s")
    print(f"at most {worst:.2%} (at most {BAR:.0%})")
    share, error = side_by_side(options.pairs)
    print(f"side by side, {options.pairs} pairs of optimizer steps: {share:+.2%} ± {error:.2%} (at most {BAR:.0%})")
    return int(worst > BAR or share - 2 * error > BAR)


if __name__ == "__main__":
    sys.exit(main())

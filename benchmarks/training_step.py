"""Train the same 40 sequences packed, dynamically batched and padded in arrival order; print real tokens per second.

    python benchmarks/training_step.py [--seed 1] [--repeats 7] [--picture FILE]

Lengths follow Zipf's law, with the exponent at which rows that are padded in arrival order, eight at a time, use 28 %
of their slots. Each step is what a rank does: forward and backward over the plan's microbatches, clipping, AdamW. The
modes take turns within every repeat, so that a slow moment of the machine meets all of them; medians are compared.
One CPU thread. Exits with 1 when a ratio is below its bar.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.config.schema import Model
from rlpack.models.inputs import to_model_inputs
from rlpack.models.loading import build_causal_lm
from rlpack.models.parallel import clip_grad_norm
from rlpack.models.policy import Policy
from rlpack.observe.report.packing_picture import packing_picture
from rlpack.observe.report.plan_record import TITLES
from rlpack.packing.batching import Batching
from rlpack.packing.make_plan import make_plan

SEQUENCES, ROWS, LONGEST, SHORTEST, USEFUL = 40, 8, 1024, 8, 0.28
VOCABULARY = 512
BARS = {"fixed": 2.5, "dynamic": 1.3}
MODES = {
    "packed": Batching(mode="packed", max_tokens=4096),
    "dynamic": Batching(mode="dynamic", max_tokens=4096),
    "fixed": Batching(mode="fixed", max_tokens=None, micro_batch_size=ROWS),
}
MODEL = Model(
    config={
        "model_type": "qwen2",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
        "tie_word_embeddings": True,
    }
)


def useful_share(lengths: np.ndarray) -> float:
    """Return the share of slots with a token when rows are padded in arrival order."""
    return lengths.sum() / (lengths.reshape(-1, ROWS).max(1) * ROWS).sum()


def zipf_lengths(seed: int) -> np.ndarray:
    """Return lengths by Zipf's law in random order; the exponent is found by bisection.

    >>> lengths = zipf_lengths(1)
    >>> lengths.size, int(lengths.max()), abs(useful_share(lengths) - 0.28) < 0.01
    (40, 1024, True)
    """
    ranks = np.random.default_rng(seed).permutation(SEQUENCES) + 1
    low, high = 0.0, 4.0
    for _ in range(50):
        exponent = (low + high) / 2
        lengths = np.maximum(np.round(LONGEST / ranks**exponent), SHORTEST).astype(np.int64)
        low, high = (exponent, high) if useful_share(lengths) > USEFUL else (low, exponent)
    return lengths


@dataclass
class Trainer:
    """One mode's model, optimizer and microbatches."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    shard: BatchedDataDict
    num_tokens: int

    @classmethod
    def of(cls, batching: Batching, lengths: np.ndarray, seed: int) -> "Trainer":
        """Build the same model and batch for any batching."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (int(lengths.sum()),), generator=generator)
        batch = BatchedDataDict({"input_ids": Ragged(tokens, torch.from_numpy(lengths))})
        shard = batch.shard(make_plan(lengths, batching, dp_size=1))[0]
        policy = Policy(build_causal_lm(MODEL, vocab_size=VOCABULARY, seed=seed))
        policy.train()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
        return cls(policy, optimizer, shard, int(lengths.sum()))

    def step(self) -> tuple[float, float]:
        """Take one optimizer step; return its seconds and its loss."""
        start, loss = time.perf_counter(), 0.0
        for view in self.shard.microbatches(0):
            scores = self.policy(to_model_inputs(view, device="cpu"), entropy=False)
            part = -scores.logprobs.sum() / self.num_tokens
            part.backward()
            loss += part.item()
        clip_grad_norm(self.policy, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start, loss


def main() -> int:
    """Measure, print, and compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--picture", type=Path, help="draw the three plans on two ranks into this PNG, and stop")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lengths = zipf_lengths(arguments.seed)
    if arguments.picture:
        packing_picture(
            {TITLES[mode]: make_plan(lengths, MODES[mode], dp_size=2) for mode in TITLES}, arguments.picture
        )
        return 0
    print(
        f"{lengths.size} sequences, {lengths.min()} to {lengths.max()} tokens, {lengths.sum()} in all; "
        f"padded in arrival order {useful_share(lengths):.1%} of slots are useful"
    )
    trainers = {mode: Trainer.of(batching, lengths, arguments.seed) for mode, batching in MODES.items()}
    losses = {mode: trainer.step()[1] for mode, trainer in trainers.items()}  # the first step warms up
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses
    seconds: dict[str, list[float]] = {mode: [] for mode in trainers}
    for _ in range(arguments.repeats):
        for mode, trainer in trainers.items():
            seconds[mode].append(trainer.step()[0])
    speed = {mode: int(lengths.sum()) / float(np.median(times)) for mode, times in seconds.items()}
    for mode, trainer in trainers.items():
        count = len(list(trainer.shard.microbatches(0)))
        print(f"{mode:8} {speed[mode]:9,.0f} real tokens/s, {count} microbatches, first loss {losses[mode]:.6f}")
    missed = 0
    for mode, bar in BARS.items():
        ratio = speed["packed"] / speed[mode]
        missed += ratio < bar
        print(f"packed/{mode}: {ratio:.2f} (at least {bar})")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

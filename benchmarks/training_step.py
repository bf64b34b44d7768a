"""Train the same 40 sequences packed, dynamically batched and padded in arrival order; print real tokens per second.

    python benchmarks/training_step.py [--seed 1] [--hidden 128] [--repeats 7] [--picture FILE]

Lengths follow Zipf's law, with the exponent at which rows that are padded in arrival order, eight at a time, use 28 %
of their slots. Each step is what a rank does: forward and backward over the plan's microbatches, clipping, AdamW. The
modes take turns within every repeat, so that a slow moment of the machine meets all of them; medians are compared.
One CPU thread. Products of matrices as large as those of the model's MLP, by the faster of PyTorch's libraries, take
turns with the modes: their rate is what the machine can do, and the packed step is compared with it. Exits with 1 when
a ratio is below its bar.
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
from rlpack.models.cpu_products import matmul_transposed
from rlpack.models.flops import model_flops
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
# By hidden size: how many times as many tokens per second packed rows train, and the share of the machine's rate of
# products that their FLOPs reach.
BARS = {128: {"fixed": 2.5, "dynamic": 1.3, "products": 0.0}, 1024: {"fixed": 2.0, "dynamic": 1.0, "products": 0.6}}
MODES = {
    "packed": Batching(mode="packed", max_tokens=4096),
    "dynamic": Batching(mode="dynamic", max_tokens=4096),
    "fixed": Batching(mode="fixed", max_tokens=None, micro_batch_size=ROWS),
}


def model_settings(hidden: int) -> Model:
    """Return a Qwen2 model of two layers."""
    heads = max(4, hidden // 64)
    return Model(
        config={
            "model_type": "qwen2",
            "hidden_size": hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "intermediate_size": 3 * hidden,
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

    def lengths_of(exponent: float) -> np.ndarray:
        return np.maximum(np.round(LONGEST / ranks**exponent), SHORTEST).astype(np.int64)

    low, high, exponent = 0.0, 4.0, 2.0
    for _ in range(49):
        low, high = (exponent, high) if useful_share(lengths_of(exponent)) > USEFUL else (low, exponent)
        exponent = (low + high) / 2
    return lengths_of(exponent)


@dataclass
class Trainer:
    """One mode's model, optimizer and microbatches."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    shard: BatchedDataDict
    num_tokens: int

    @classmethod
    def of(cls, batching: Batching, lengths: np.ndarray, seed: int, hidden: int) -> "Trainer":
        """Build the same model and batch for any batching."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (int(lengths.sum()),), generator=generator)
        batch = BatchedDataDict({"input_ids": Ragged(tokens, torch.from_numpy(lengths))})
        shard = batch.shard(make_plan(lengths, batching, dp_size=1))[0]
        policy = Policy(build_causal_lm(model_settings(hidden), vocab_size=VOCABULARY, seed=seed))
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


class Products:
    """The products of an MLP layer in a forward and a backward pass, of 4,096 tokens."""

    def __init__(self, hidden: int) -> None:
        self.states, self.weight = torch.randn(4096, hidden), torch.randn(3 * hidden, hidden)
        self.gradient = torch.randn(4096, 3 * hidden)
        self.flops = 3 * 2.0 * 4096 * hidden * 3 * hidden

    def rate(self) -> float:
        """Return FLOPs per second of the faster library."""
        operands = (
            (self.states, self.weight),
            (self.gradient, self.weight.t()),
            (self.gradient.t(), self.states.t()),
        )
        times = []
        for product in (matmul_transposed, lambda left, right: left @ right.t()):
            start = time.perf_counter()
            for left, right in operands:
                product(left, right)
            times.append(time.perf_counter() - start)
        return self.flops / min(times)


def main() -> int:
    """Measure, print, and compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=128, choices=BARS)
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
    trainers = {
        mode: Trainer.of(batching, lengths, arguments.seed, arguments.hidden) for mode, batching in MODES.items()
    }
    losses = {mode: trainer.step()[1] for mode, trainer in trainers.items()}  # the first step warms up
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses
    seconds: dict[str, list[float]] = {mode: [] for mode in trainers}
    products, rates = Products(arguments.hidden), []
    products.rate()
    for _ in range(arguments.repeats):
        for mode, trainer in trainers.items():
            seconds[mode].append(trainer.step()[0])
        rates.append(products.rate())
    speed = {mode: int(lengths.sum()) / float(np.median(times)) for mode, times in seconds.items()}
    for mode, trainer in trainers.items():
        count = len(list(trainer.shard.microbatches(0)))
        print(f"{mode:8} {speed[mode]:9,.0f} real tokens/s, {count} microbatches, first loss {losses[mode]:.6f}")
    flops = model_flops(trainers["packed"].policy.model).update(lengths, int(lengths.sum()) - lengths.size)
    rate, reached = float(np.median(rates)), flops / float(np.median(seconds["packed"]))
    print(f"packed   {reached / 1e9:9,.1f} GFLOP/s of model FLOPs; products of matrices {rate / 1e9:,.1f} GFLOP/s")
    ratios = {mode: speed["packed"] / speed[mode] for mode in ("fixed", "dynamic")} | {"products": reached / rate}
    missed = 0
    for name, bar in BARS[arguments.hidden].items():
        missed += ratios[name] < bar
        print(f"packed/{name}: {ratios[name]:.2f}" + (f" (at least {bar})" if bar else ""))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

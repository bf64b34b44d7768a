"""Compare the time of an optimizer step with one, two and four virtual stages on each pipeline rank.

    python benchmarks/pipeline_time.py                              # layers compute
    python benchmarks/pipeline_time.py --ranks 4 --sleep-ms 2       # layers sleep: any number of ranks, on busy cores

The ranks are processes on one machine, with one thread and one core each, and take the steps of all settings in turn;
the time of a setting is the shortest of its rounds, that of the slowest rank. Where layers compute, each rank needs a
core that nothing else uses. Where they sleep, schedule, messages and autograd are those of a run, and a layer takes a
given time forward and twice that backward.

The expected time is that of the schedule alone, relative to one virtual stage: (1 + (ranks - 1) / (vpp · microbatches))
/ (1 + (ranks - 1) / microbatches). It knows neither messages nor the embedding and the output layer.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from rlpack.config.schema import Actor, Config, Model, Placement, Pool
from rlpack.config.sections.parallelism import Parallel
from rlpack.data.tokenization import character_tokenizer
from rlpack.distributed.context import RankContext
from rlpack.gloo import GLOO
from rlpack.models.inputs import pack_rows
from rlpack.models.parallel import decoder_layers
from rlpack.models.policy import TokenScores
from rlpack.recipes.dry_run.role_memory import role_layout
from rlpack.workers.build import build_policy
from rlpack.workers.loss import MicrobatchLoss
from rlpack.workers.optimizer_step import OptimizerStepper

VIRTUAL = (1, 2, 4)
# Microbatches of a step for each rank.
PER_RANK = (1, 2, 4)
CHARACTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 200)))


class _Sleep(torch.autograd.Function):
    """A layer that sleeps, twice as long in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


def config_of(vpp: int, ranks: int, hidden: int, layers: int) -> Config:
    """Return the configuration of an actor on pipeline ranks."""
    shape = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3 // 64 * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
    }
    actor = Actor(parallel=Parallel(pp=ranks, vpp=vpp), gradient_checkpointing="none", isolation_check=False)
    return Config(model=Model(config=shape), actor=actor, placement=Placement(pools={"main": Pool(ranks=ranks)}))


def run(rank: int, store: str, options: argparse.Namespace) -> None:
    """Take the steps of this rank, and print the table on the first one."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity") and not options.sleep_ms:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group(GLOO, init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    tokenizer = character_tokenizer(CHARACTERS)
    inputs = pack_rows([torch.randint(len(tokenizer), (options.tokens // 4,)) for _ in range(4)])
    steppers = {}
    for vpp in VIRTUAL:
        config = config_of(vpp, options.ranks, options.hidden, options.layers)
        context = RankContext("main", rank, role_layout(config, "actor"), "cpu")
        policy = build_policy(config, "actor", tokenizer, context)
        for layer in decoder_layers(policy) if options.sleep_ms else ():
            layer.forward = lambda hidden, *_, **__: _Sleep.apply(hidden, options.sleep_ms / 1e3)
        steppers[vpp] = policy, OptimizerStepper("actor", policy, config.actor.optimizer, context)
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(1 + options.rounds):
        for microbatches in (options.ranks * count for count in PER_RANK):
            for vpp, (policy, stepper) in steppers.items():
                times.setdefault((microbatches, vpp), []).append(step_time(policy, stepper, inputs, microbatches))
    if rank == 0:
        show({key: min(values[1:]) for key, values in times.items()}, options.ranks)  # the first round warms up
    dist.destroy_process_group()


def step_time(policy: Any, stepper: OptimizerStepper, inputs: Any, microbatches: int) -> float:
    """Return the seconds of an optimizer step on the slower rank."""

    def forward(*_: object) -> TokenScores:
        return policy(inputs)

    def loss(scores: TokenScores, _: object) -> MicrobatchLoss:
        return MicrobatchLoss(scores.logprobs.sum(), {})

    views: list[Any] = [None] * microbatches
    dist.barrier()
    start = time.perf_counter()
    stepper.step(views, forward, loss, 1e-6)
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def show(seconds: dict[tuple[int, int], float], ranks: int) -> None:
    """Print the times of all settings and their ratios to one virtual stage."""
    print("| microbatches | vpp | step | relative to vpp=1 | expected |\n|---|---|---|---|---|")
    for (microbatches, vpp), value in seconds.items():
        ratio = value / seconds[microbatches, 1]
        expected = (1 + (ranks - 1) / (vpp * microbatches)) / (1 + (ranks - 1) / microbatches)
        print(f"| {microbatches} | {vpp} | {value:.3f} s | {ratio:.3f} | {expected:.3f} |")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sleep-ms", type=float, default=0.0, help="time of a layer's forward pass; 0 computes")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512, help="slots of a microbatch")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (str(Path(folder) / "store"), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()

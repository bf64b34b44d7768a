"""Compare `rlpack simulate --async` with measured runs, for several leads and splits of the ranks.

    python -m benchmarks.async_forecast [--steps 14] [--prompts 16] [--bar 0.15] [--in-flight]

Generation and updates are real; then both sleep until they have taken what a dedicated engine or rank would take,
so that ranks that share two cores take the time of ranks that don't. The lengths and rates of one run, two ranks in
turns, forecast the others. Exits with 1 if a forecast of steps per hour is off by more than `--bar` of the measurement.

With `--in-flight`, in the environment of `make vllm`, vLLM generates on one core and a rank trains on the other, at
their own speed. The first run publishes when its batch is complete (drain), the second has no lead, so the same ranks
work in turns, and the others publish while responses are generated.
They are forecast from the first run and, in the last column, each from itself, which doesn't count for the exit code.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.ahead import GROUP, Work, run, write_inputs
from rlpack.algorithms.metric_reduction import merge_steps
from rlpack.batch.batch import BatchedDataDict
from rlpack.cli.rates_of_run import measured
from rlpack.packing.analysis.running_ahead import Rates, Setup, forecast_run
from rlpack.rollout.types import SamplingParams
from rlpack.worker import sharded
from rlpack.workers.actor import ActorWorker
from rlpack.workers.loss import LogprobLoss, columns_of, needs_whole_groups
from rlpack.workers.rollout import RolloutWorker

# Seconds of a token of each response in an engine, and tokens that a rank trains on in a second.
TOKEN_S, TRAIN_TOKENS_PER_S = 0.002, 2200.0
# Tokens of the longest response.
LONGEST = 450
SLEEPING = (
    "algorithm.kl_coef=0",  # no log-probs of a reference, whose time would be real
    "roles.actor.target=benchmarks.async_forecast:SleepingActor",
    "roles.rollout.target=benchmarks.async_forecast:SleepingRollout",
)
APART = ("placement=two_pools", "trainer.lead=1")
RUNS: dict[Setup, tuple[str, ...]] = {
    Setup(0, "drain", 2, 2): ("placement=cpu", "placement.pools.main.ranks=2"),
    Setup(0, "drain", 3, 3): ("placement=cpu", "placement.pools.main.ranks=3"),
    Setup(1, "drain", 1, 1): APART,
    Setup(1, "drain", 1, 2): (*APART, "placement.pools.main.ranks=2"),
    Setup(1, "drain", 2, 1): (*APART, "placement.pools.engines.ranks=2"),
}
# The model has 514 positions, 450 of them for a response.
VLLM = (*APART, "algorithm.kl_coef=0", "rollout=vllm", "rollout.kv_cache_gb=0.3", "data.max_prompt_tokens=64")
IN_FLIGHT: dict[Setup, tuple[str, ...]] = {
    Setup(1, "drain", 1, 1): VLLM,
    Setup(0, "drain", 1, 1): (*VLLM, "trainer.lead=0"),
    Setup(1, "in_flight", 1, 1): (*VLLM, "rollout.publish=in_flight"),
    Setup(2, "in_flight", 1, 1): (*VLLM, "rollout.publish=in_flight", "trainer.lead=2"),
}


class SleepingRollout(RolloutWorker):
    """An engine that takes a time per token of the longest response."""

    @sharded()
    def generate(self, shard: BatchedDataDict, params: SamplingParams) -> BatchedDataDict:
        """Generate, and sleep."""
        began = time.monotonic()
        generated = super().generate(shard, params)
        longest = int(generated["response_lengths"].max()) if generated.num_rows else 0
        time.sleep(max(0.0, began + TOKEN_S * longest - time.monotonic()))
        return generated


class SleepingActor(ActorWorker):
    """A rank that takes a time per token that it trains on."""

    @sharded(reads=columns_of, mini_batches=True, merge=merge_steps, needs_whole_groups=needs_whole_groups)
    def train_step(
        self, shard: BatchedDataDict, loss: LogprobLoss, learning_rate: float | None = None
    ) -> list[dict[str, float]]:
        """Update, and sleep."""
        began = time.monotonic()
        metrics = super().train_step(shard, loss, learning_rate)
        tokens = int(shard["input_ids"].lengths.sum())
        time.sleep(max(0.0, began + tokens / TRAIN_TOKENS_PER_S - time.monotonic()))
        return metrics


def main() -> int:
    """Measure all runs, forecast them from the first, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--bar", type=float, default=0.15)
    parser.add_argument("--in-flight", action="store_true")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error(f"--steps is {options.steps}; the first two and the last don't count, so it has to be at least 4")
    largest = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, LONGEST, 1024)
        lengths, rates = np.zeros(0, dtype=np.int64), Rates()
        print(f"{'lead':>4} {'engines':>8} {'training':>9} {'measured':>9} {'forecast':>9}  steps an hour", flush=True)
        for setup, overrides in (IN_FLIGHT if options.in_flight else RUNS).items():
            sleeping = () if options.in_flight else SLEEPING
            before = set(folder.glob("run-*"))
            step_s = run(folder, (*sleeping, *overrides), Work(options.steps, 1, options.prompts, LONGEST)).whole
            (run_dir,) = set(folder.glob("run-*")) - before
            own_lengths, own_rates = measured(run_dir)[:2]
            if not lengths.size:
                lengths, rates = own_lengths, own_rates
            forecast_s = forecast_run(lengths, rates, setup, steps=300).step_s
            own_s = forecast_run(own_lengths, own_rates, setup, steps=300).step_s
            error = step_s / forecast_s - 1
            largest = max(largest, abs(error))
            print(
                f"{setup.lead:4} {setup.engine_ranks:8} {setup.train_ranks:9} {3600 / step_s:9.0f} "
                f"{3600 / forecast_s:9.0f}  {100 * error:+.1f} %  {100 * (step_s / own_s - 1):+.1f} % from itself",
                flush=True,
            )
    print(f"{GROUP * options.prompts} responses a step of {lengths.mean():.0f} tokens; rates of the first run: {rates}")
    return int(largest > options.bar)


if __name__ == "__main__":
    sys.exit(main())

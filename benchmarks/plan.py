"""Measure how long plans take and how good they are, for lengths drawn from a seed.

python benchmarks/plan.py                                  # 16,384 rows over 64 ranks
python benchmarks/plan.py --rows 4096 --ranks 8 --mini-batch 512 --lengths zipf
"""

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np

from rlpack.packing import Algorithm, Batching, Cost, Mode, PackingMetrics, lower_bound, make_plan, pack

R = TypeVar("R")

# Attention against matrix multiplications for a hidden size of 4,096: 4·d·L² against 24·d²·L a layer.
COST = Cost(linear=24.0 * 4096, quadratic=4.0)


def main() -> None:
    """Print one table for packers and one for plans."""
    arguments = parse()
    lengths = draw(arguments.lengths, arguments.rows, arguments.longest, arguments.seed)
    print(f"{machine()}; {arguments.rows:,} {arguments.lengths} lengths (seed {arguments.seed}), ", end="")
    print(f"mean {lengths.mean():.0f}, longest {lengths.max():,}, on {arguments.ranks} ranks; ", end="")
    print(f"budget {arguments.max_tokens:,}; median and worst of {arguments.repeat} calls after warm-up")
    print(f"\n{'packer':32}{'median ms':>10}{'worst ms':>10}{'bins':>8}{'bound':>8}")
    bound = lower_bound(lengths, arguments.max_tokens)
    for algorithm in get_args(Algorithm):
        median, worst, bins = timed(partial(pack, lengths, arguments.max_tokens, algorithm), arguments.repeat)
        print(f"{algorithm:32}{median:10.2f}{worst:10.2f}{len(bins):8}{bound:8}")
    print(
        f"\n{'plan':20}{'mini-batch':>11}{'median ms':>10}{'worst ms':>10}{'microb.':>9}{'dummies':>8}"
        f"{'waste %':>9}{'ranks +%':>9}{'lock-step +%':>13}"
    )
    for mode in get_args(Mode):
        batching = Batching(mode=mode, max_tokens=arguments.max_tokens)
        for size in dict.fromkeys((None, arguments.mini_batch)):
            for name, cost in (("tokens", None), ("cost", COST)):
                plan = partial(make_plan, lengths, batching, dp_size=arguments.ranks, mini_batch_size=size, cost=cost)
                median, worst, planned = timed(plan, arguments.repeat)
                print(
                    f"{mode + ', by ' + name:20}{size or 'all':>11}{median:10.1f}{worst:10.1f}"
                    + figures(planned.metrics)
                )


def figures(metrics: PackingMetrics) -> str:
    """Return the columns that say how good a plan is."""
    return (
        f"{metrics.num_microbatches:9}{metrics.dummy_microbatches:8}{100 * metrics.waste_ratio:9.2f}"
        f"{100 * metrics.rank_imbalance:9.2f}{100 * metrics.lockstep_overhead:13.2f}"
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--mini-batch", type=int, default=4096, help="rows of an optimizer step, besides all at once")
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--lengths", choices=("lognormal", "zipf"), default="lognormal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=11)
    return parser.parse_args()


def draw(kind: str, rows: int, longest: int, seed: int) -> np.ndarray:
    """Return lengths of responses: mostly short, with a long tail."""
    random = np.random.default_rng(seed)
    drawn = random.lognormal(6.0, 1.0, rows) if kind == "lognormal" else 64.0 * random.zipf(1.5, rows)
    return np.clip(drawn, 1, longest).astype(np.int64)


def timed(call: Callable[[], R], repeat: int) -> tuple[float, float, R]:
    """Return median and worst milliseconds of a call after one for warm-up, and its result."""
    result, times = call(), []
    for _ in range(repeat):
        start = time.perf_counter()
        result = call()
        times.append(1000 * (time.perf_counter() - start))
    return float(np.median(times)), max(times), result


def machine() -> str:
    """Return what this runs on."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = f"{models[0]} ({len(models)} processors)" if models else platform.processor() or platform.machine()
    return f"{processor}, Python {platform.python_version()}, NumPy {np.__version__}"


if __name__ == "__main__":
    main()

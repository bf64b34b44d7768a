"""Measure packing, balance, plans and the data path against their bars, on traces drawn from a seed.

    python -m benchmarks.limits [--seed 0] [--plots FOLDER]

Prints one table; a line that misses its bar ends with MISSED, and the exit code is 1. Times are the best of several
calls, and ratios are of times within this run. With a folder, plots are written there as PNG.
"""

import argparse
import heapq
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch

from benchmarks.driver import growth
from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.packing import Batching, Cost, MicrobatchPlan, lower_bound, make_plan, pack, warm_up_jit
from rlpack.packing.algorithms.contiguous import partition_sorted
from rlpack.packing.analysis.traces import REALISTIC, trace

R = TypeVar("R")
# 24,576·L + L²: six times a hidden size of 4,096 against attention, as the peers were measured.
COST = Cost(24576.0, 1.0)


@dataclass
class Line:
    """One figure and its bar; `least` tells whether it has to be at least or at most the bar."""

    what: str
    value: float
    bar: float
    least: bool = False

    @property
    def held(self) -> bool:
        """Return whether the figure keeps its bar."""
        return self.value >= self.bar if self.least else self.value <= self.bar

    def __str__(self) -> str:
        """Return the line as it is printed."""
        sign = "≥" if self.least else "≤"
        return f"{self.what:72}{self.value:12.5g}   {sign} {self.bar:<8g}{'' if self.held else 'MISSED'}"


def main() -> int:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plots", type=Path)
    arguments = parser.parse_args()
    warm_up_jit()
    lines = [*bins(arguments.seed), *packing_time(arguments.seed), *plan_time(arguments.seed)]
    lines += [
        *lockstep(arguments.seed),
        *dynamic(arguments.seed),
        *data_path(arguments.seed),
        *microbatches(arguments.seed),
    ]
    lines += data_plane()
    for line in lines:
        print(line)
    if arguments.plots:
        plot(arguments.plots, arguments.seed)
    return int(not all(line.held for line in lines))


def best(call: Callable[[], R], repeat: int = 7) -> tuple[float, R]:
    """Return the least seconds of a call after one for warm-up, and its result."""
    result, times = call(), []
    for _ in range(repeat):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return min(times), result


def bins(seed: int) -> list[Line]:
    """Bins over the lower bound on realistic traces, and over the optimum where best-fit is far from it."""
    ratios, over = [], []
    for name in REALISTIC:
        for rows in (4096, 32768):
            for capacity in (8192, 16384, 32768, 65536):
                lengths = trace(name, rows, longest=8192, seed=seed)
                bound, num_bins = lower_bound(lengths, capacity), len(pack(lengths, capacity))
                ratios.append(num_bins / bound)
                over.append((num_bins - bound) / max(1, bound // 1000))
    lines = [
        Line("bins / lower bound, realistic traces, mean", float(np.mean(ratios)), 1.0002),
        Line("bins over the bound / max(1, 0.1 %), worst", max(over), 1.0),
    ]
    for name, longest, optimum in (("johnson", 8016, 9 / 30), ("triplets", 8192, 1 / 3)):
        lengths = trace(name, 32760, longest=longest, seed=seed)
        capacity = 16000 if name == "johnson" else 2 * longest
        seconds, packed = best(partial(pack, lengths, capacity, "optimal"), repeat=2)
        lines.append(Line(f"bins / optimum, {name}, algorithm=optimal", len(packed) / (optimum * 32760), 1.02))
        lines.append(
            Line(f"seconds for it (best-fit: {len(pack(lengths, capacity)) / (optimum * 32760):.3f})", seconds, 1.0)
        )
    return lines


def packing_time(seed: int) -> list[Line]:
    """Time of best-fit, and against a heap in plain Python."""
    lengths = trace("lognormal", 32768, longest=8192, seed=seed)
    ours, _ = best(lambda: pack(lengths, 16384))
    plain, _ = best(lambda: heap_packing(lengths.tolist(), 16384), repeat=2)
    return [
        Line("best-fit, n = 32,768, ms", 1e3 * ours, 8.0),
        Line("plain Python heap / ours", plain / ours, 10.0, least=True),
    ]


def heap_packing(lengths: list[int], capacity: int) -> int:
    """Return the bins of a packer as people write it: each row, longest first, to the emptiest bin if it fits."""
    heap: list[tuple[int, int]] = []
    members: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if heap and heap[0][0] + lengths[row] <= capacity:
            used, label = heapq.heappop(heap)
        else:
            used, label = 0, len(members)
            members.append([])
        members[label].append(row)
        heapq.heappush(heap, (used + lengths[row], label))
    return len(members)


def plan_time(seed: int) -> list[Line]:
    """Time of plans up to a million rows; hard ones have rows as long as the budget, and a cost that is not linear."""
    batching = Batching(max_tokens=16384, pad_to_multiple=8)

    def plan(shape: tuple[int, int, int], name: str = "lognormal", *, hard: bool = False, repeat: int = 3) -> float:
        rows, ranks, steps = shape
        lengths = trace(name, rows, longest=16384 if hard else 8192, seed=seed)
        cost, size = COST if hard else None, rows // steps
        return best(lambda: make_plan(lengths, batching, dp_size=ranks, mini_batch_size=size, cost=cost), repeat)[0]

    small, large = plan((16384, 64, 1), repeat=7), plan((1_000_000, 64, 1))
    hard = max(plan((16384, 64, 8), name, hard=True, repeat=7) for name in REALISTIC)
    hard_large = max(plan((262_144, 64, 64), name, hard=True) for name in REALISTIC)
    return [
        Line("plan of 16,384 rows, 64 ranks, 8 optimizer steps, ms", 1e3 * plan((16384, 64, 8), repeat=7), 25.0),
        Line("the same with rows as long as the budget and a cost, worst trace, ms", 1e3 * hard, 25.0),
        Line("plan of 262,144 rows, 1,024 ranks, 64 optimizer steps, s", plan((262_144, 1024, 64)), 1.0),
        Line("with rows as long as the budget and a cost, 64 ranks, worst trace, s", hard_large, 1.0),
        Line("growth of time from 16,384 to 1,000,000 rows: n to the", math.log(large / small, 1e6 / 16384), 1.15),
    ]


def lockstep(seed: int) -> list[Line]:
    """How much ranks wait for each other, and how unlike their tokens are."""
    many, few, imbalance = [], [], []
    shapes = ((8192, 4096), (16384, 8192), (32768, 8192), (65536, 16384))
    for name, (capacity, longest), ranks, count in product(REALISTIC, shapes, (8, 64), (2, 3, 4, 5, 8, 12)):
        plan = planned(name, capacity, longest, ranks, count, seed)
        efficiency = 1 / (1 + plan.metrics.lockstep_overhead)
        (many if plan.counts.shape[1] >= 5 else few).append(efficiency)
        if plan.counts.shape[1] >= 5 and ranks == 64:
            imbalance.append(by_tokens(plan).metrics.rank_imbalance)
    return [
        Line("lock-step efficiency, 5 and more microbatches a rank, median", float(np.median(many)), 0.999, least=True),
        Line("lock-step efficiency, 5 and more microbatches a rank, worst", min(many), 0.985, least=True),
        Line("lock-step efficiency, 2 to 4 microbatches a rank, median", float(np.median(few)), 0.995, least=True),
        Line("tokens of the fullest of 64 ranks / mean, worst", 1 + max(imbalance), 1.01),
    ]


def planned(name: str, capacity: int, longest: int, ranks: int, microbatches: int, seed: int) -> MicrobatchPlan:
    """Return a plan with about so many microbatches on each rank, the last index partly full."""
    mean = trace(name, 4096, longest=longest, seed=seed).mean()
    fullness = 1 - np.random.default_rng((seed, ranks, microbatches)).random() / microbatches
    rows = int(ranks * microbatches * fullness * capacity / mean)
    lengths = trace(name, rows, longest=longest, seed=seed + 1)
    return make_plan(lengths, Batching(max_tokens=capacity), dp_size=ranks, cost=COST)


def by_tokens(plan: MicrobatchPlan) -> MicrobatchPlan:
    """Return the plan of the same lengths that balances tokens."""
    return make_plan(plan.request.lengths, plan.batching, dp_size=plan.num_ranks)


def dynamic(seed: int) -> list[Line]:
    """Slots of dynamic batching over the fewest at the same count."""
    ratios = []
    for name in REALISTIC:
        for ranks in (8, 64):
            lengths = trace(name, 4096, longest=8192, seed=seed)
            plan = make_plan(lengths, Batching(mode="dynamic", max_tokens=16384), dp_size=ranks)
            falling = np.sort(lengths)[::-1].copy()
            labels = partition_sorted(np.ones_like(falling), falling, plan.counts.size, 16384)
            firsts = np.flatnonzero(np.diff(labels, prepend=-1))
            fewest = int((np.diff(firsts, append=falling.size) * falling[firsts]).sum())
            ratios.append(plan.metrics.slots / fewest)
    return [Line("dynamic: padded slots / fewest at the same count, worst", max(ratios), 1.005)]


def data_path(seed: int) -> list[Line]:
    """Shard, restore and pickling against one copy of the ragged bytes; the copy is NumPy's, of memory in use."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(8.4, 0.75, 4096), 1, 16384).astype(np.int64)
    total = int(lengths.sum())
    kinds = {
        "input_ids": torch.int64,
        "logprobs": torch.float32,
        "reference_logprobs": torch.float32,
        "values": torch.float32,
    }
    counts = torch.from_numpy(lengths)
    batch = BatchedDataDict({name: Ragged(torch.arange(total).to(kind), counts) for name, kind in kinds.items()})
    copy, _ = best(lambda: [batch[name].values.clone() for name in kinds])
    batching = Batching(max_tokens=16384)
    shard, shards = best(lambda: batch.shard(make_plan(lengths, batching, dp_size=8)))
    restore, _ = best(lambda: batch.restore(shards))
    size = sum(column.values.numel() * column.values.element_size() for column in batch.values())
    put, get, padded = object_store(shards)
    print(f"4,096 rows of up to 16,384 tokens, {total / 4096 / 16384:.0%} filled: {size / 1e6:.0f} MB, ", end="")
    print(f"one copy {1e3 * copy:.0f} ms")
    return [
        Line("plan and shard, 4 columns, 8 ranks / one copy", shard / copy, 1.3),
        Line("restore of 8 ranks / one copy", restore / copy, 1.3),
        Line("put 8 shards into the object store / one copy", put / copy, 1.3),
        Line("get them, ms", 1e3 * get, 5.0),
        Line("padded torch tensors / ours, put and get", padded / (put + get), 15.0, least=True),
    ]


def microbatches(seed: int) -> list[Line]:
    """Iterate over the microbatches of a shard, and of half its rows in another order."""
    seconds: dict[int, float] = {}
    for rows in (2048, 32768):
        lengths = trace("lognormal", rows, 8192, seed=seed)
        batch = BatchedDataDict({"input_ids": Ragged(torch.zeros(int(lengths.sum())).long(), torch.tensor(lengths))})
        (shard,) = batch.shard(make_plan(lengths, Batching(max_tokens=16384), dp_size=1))
        half = shard.select(np.random.default_rng(seed).permutation(rows)[: rows // 2])
        seconds[rows] = best(lambda parts=(shard, half): [list(part.microbatches()) for part in parts], 2)[0]
    return [Line("microbatches of 32,768 rows / 16 times those of 2,048", seconds[32768] / 16 / seconds[2048], 2.0)]


def object_store(shards: list[BatchedDataDict]) -> tuple[float, float, float]:
    """Return seconds to put shards into Ray's object store, to get them, and to put and get padded torch tensors."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level=logging.ERROR)
    try:
        put, get = _there_and_back(shards, repeat=4)
        width = max(int(shard["input_ids"].lengths.max()) for shard in shards)
        padded = [{name: shard.padded(name, width) for name in shard} for shard in shards]
        return put, get, sum(_there_and_back(padded, repeat=1))
    finally:
        ray.shutdown()


def _there_and_back(values: Sequence[Any], repeat: int) -> tuple[float, float]:
    """Return the least seconds to put values and to get them; the first round only touches the store's memory."""
    puts, gets = [], []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        stored = [ray.put(value) for value in values]
        puts.append(time.perf_counter() - start)
        start = time.perf_counter()
        fetched = ray.get(stored)
        gets.append(time.perf_counter() - start)
        del stored, fetched
    return min(puts[1:]), min(gets[1:])


def data_plane() -> list[Line]:
    """What a step costs the driver when rows have 16 times as many tokens."""
    wire, memory = growth()
    return [
        Line("driver's bytes a step, 16 times the tokens / one", wire, 1.05),
        Line("driver's memory, 16 times the tokens / one", memory, 1.05),
    ]


def plot(folder: Path, seed: int) -> None:
    """Draw time over rows, waste by trace and waiting over ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, (times, waste, waiting) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    modes = {
        "packed": Batching(max_tokens=16384),
        "dynamic": Batching(mode="dynamic", max_tokens=16384),
        "fixed": Batching(mode="fixed", max_tokens=None),
    }
    sizes = [2**power for power in range(10, 20)]
    for name in ("packed", "dynamic"):
        calls = [
            partial(make_plan, trace("lognormal", rows, 8192, seed=seed), modes[name], dp_size=64) for rows in sizes
        ]
        times.loglog(sizes, [1e3 * best(call, 2)[0] for call in calls], "o-", label=name)
    times.set(title="time of a plan over 64 ranks", xlabel="rows", ylabel="ms")
    for place, (name, batching) in enumerate(modes.items()):
        plans = [make_plan(trace(kind, 4096, 8192, seed=seed), batching, dp_size=8) for kind in REALISTIC]
        waste.bar(
            np.arange(4) + 0.27 * (place - 1), [100 * plan.metrics.waste_ratio for plan in plans], 0.26, label=name
        )
    waste.set(title="slots without a token", ylabel="%")
    waste.set_xticks(np.arange(4), REALISTIC)
    ranks = [2**power for power in range(1, 9)]
    for kind in REALISTIC:
        plans = [
            make_plan(trace(kind, 64 * many, 8192, seed=seed), Batching(max_tokens=16384), dp_size=many, cost=COST)
            for many in ranks
        ]
        waiting.semilogx(ranks, [100 * plan.metrics.lockstep_overhead for plan in plans], "o-", base=2, label=kind)
    waiting.set(title="lock-step overhead, 64 rows a rank", xlabel="ranks", ylabel="%")
    for axes in (times, waste, waiting):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "planning.png", dpi=130)
    print(f"plots: {folder / 'planning.png'}")


if __name__ == "__main__":
    sys.exit(main())

"""What vLLM's statistics for the trace and the report cost: CPU time per token with and without them.

    python -m benchmarks.engine_statistics [--rows 64] [--rounds 7]

Two engines of one small model in one process take turns. Run it with vLLM, as `make vllm` installs it.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rlpack.rollout.types import SamplingParams
from rlpack.rollout.vllm import start_engine
from rlpack.rollout.vllm.vllm_engine import VLLMEngine
from rlpack.spans import recorded_spans
from tests.vllm.engines import prompts_of, start

BAR = 0.01
TOKENS = 96


async def _without_statistics(arguments: Any, meter: Any) -> Any:
    """Start vLLM as `start_engine` does, without statistics."""
    from rlpack.rollout.vllm import library

    del meter
    return library.AsyncLLM.from_engine_args(library.AsyncEngineArgs(**arguments))


def engines() -> dict[str, VLLMEngine]:
    """Return an engine with statistics and one without."""
    built, usual = {"with": start("qwen2", tied=False)}, start_engine._start
    start_engine._start = _without_statistics
    try:
        return built | {"without": start("qwen2", tied=False)}
    finally:
        start_engine._start = usual


def cpu_us(engine: VLLMEngine, rows: int) -> float:
    """Return the CPU time per token of a batch, front end and EngineCore together, in microseconds.

    Other work on the machine changes CPU time less than wall time.
    """
    pids = [os.getpid(), *(process.pid for process in engine._started.processes)]

    def spent() -> float:
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return sum(one.user + one.system for one in times)

    before = spent()
    made = engine.generate(
        prompts_of(*[8] * rows), SamplingParams(max_new_tokens=TOKENS), np.arange(rows, dtype=np.uint64)
    )
    return (spent() - before) / len(made.token_ids.values) * 1e6


def main() -> int:
    """Measure, and compare with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    costs: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder, recorded_spans(Path(folder), "main/0"):
        built = engines()
        for turn in range(options.rounds + 1):
            for name in sorted(built, reverse=bool(turn % 2)):
                measured = cpu_us(built[name], options.rows)
                if turn:  # the first is a warm-up
                    costs[name].append(measured)
        for engine in built.values():
            engine.close()
    for name, measured in costs.items():
        spread = f"{min(measured):.1f} to {max(measured):.1f}"
        print(f"{name} statistics: {statistics.median(measured):.1f} µs of CPU time per token ({spread})")
    cost = statistics.median(costs["with"]) / statistics.median(costs["without"]) - 1
    print(f"cost {cost:.2%} (at most {BAR:.0%})")
    return int(cost > BAR)


if __name__ == "__main__":
    sys.exit(main())

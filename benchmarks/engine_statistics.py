"""What vLLM's statistics for the trace and the report cost: tokens per second with and without them.

    python benchmarks/engine_statistics.py [--rows 64] [--rounds 7]

Two engines of one small model in one process take turns. Run it with vLLM, as `make vllm` installs it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

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


def rate(engine: VLLMEngine, rows: int) -> float:
    """Return the tokens per second of a batch whose rows all have the same length."""
    began = time.perf_counter()
    made = engine.generate(
        prompts_of(*[8] * rows), SamplingParams(max_new_tokens=TOKENS), np.arange(rows, dtype=np.uint64)
    )
    return len(made.token_ids.values) / (time.perf_counter() - began)


def main() -> int:
    """Measure, and compare with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder, recorded_spans(Path(folder), "main/0"):
        built = engines()
        for turn in range(options.rounds + 1):
            for name in sorted(built, reverse=bool(turn % 2)):
                measured = rate(built[name], options.rows)
                if turn:  # the first is a warm-up
                    rates[name].append(measured)
        for engine in built.values():
            engine.close()
    for name, measured in rates.items():
        spread = f"{min(measured):,.0f} to {max(measured):,.0f}"
        print(f"{name} statistics: {statistics.median(measured):,.0f} tokens/s ({spread})")
    cost = 1 - statistics.median(a / b for a, b in zip(rates["with"], rates["without"], strict=True))
    print(f"cost {cost:.2%} (at most {BAR:.0%})")
    return int(cost > BAR)


if __name__ == "__main__":
    sys.exit(main())

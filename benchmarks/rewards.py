"""Measure the throughput of the reward pool, its start-up time, and its recovery from a hanging function.

    python -m benchmarks.rewards [--rows 2048] [--processes 2]

Each rate is the best of three batches. Exits with 1 if the trivial function is under 500 rewards/s.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from rlpack.rewards.pool.call_queue import FunctionSpec, PoolSettings
from rlpack.rewards.pool.pool import RewardPool

BAR_PER_S = 500.0
_TIMES = 3


def length(completion: str) -> float:
    """Return a trivial reward."""
    return float(len(completion))


def lengths(completions: Sequence[str]) -> list[float]:
    """Return the same rewards for many rows at once."""
    return [float(len(completion)) for completion in completions]


async def length_later(completion: str) -> float:
    """Return the same reward from a coroutine."""
    return float(len(completion))


def waits(completion: str) -> float:
    """Hang on the completion "wait"."""
    while completion == "wait":
        pass
    return 1.0


def main() -> int:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    texts = [f"a{row}b3#{row % 10}" for row in range(arguments.rows)]
    columns = {"prompt": texts, "completion": texts, "answer": [str(row % 10) for row in range(arguments.rows)]}
    print(f"{arguments.rows} rows, {arguments.processes} processes")
    slowest = float("inf")
    for target in ("benchmarks.rewards:length", "benchmarks.rewards:lengths", "benchmarks.rewards:length_later",
                   "rlpack.rewards.functions:final_answer", "rlpack.rewards.math:equivalent"):  # fmt: skip
        for strict in (False, True):
            began = time.perf_counter()
            pool = RewardPool({"f": FunctionSpec(target)}, PoolSettings(processes=arguments.processes, strict=strict))
            try:
                pool.wait()
                start_s = time.perf_counter() - began
                rate = arguments.rows / best(lambda pool=pool: pool.run(columns, arguments.rows))
            finally:
                pool.close()
            sandbox = "strict" if strict else "limits"
            print(f"{target:42} {sandbox}  {rate:9,.0f} rewards/s  ready after {start_s:.2f} s")
            slowest = min(slowest, rate) if target.endswith(":length") else slowest
    print(f"a hanging row is killed and its process replaced {overtime_s():.2f} s after its deadline")
    print(f"trivial function: {slowest:,.0f} rewards/s, bar {BAR_PER_S:g}")
    return int(slowest < BAR_PER_S)


def best(work: Callable[[], object]) -> float:
    """Return the shortest time of `work`, in seconds."""
    times = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def overtime_s(timeout_s: float = 0.5) -> float:
    """Return the seconds from the deadline of a hanging row until the pool is complete again."""
    pool = RewardPool({"f": FunctionSpec("benchmarks.rewards:waits", {}, timeout_s)})
    try:
        pool.wait()
        began = time.perf_counter()
        pool.run({"prompt": [""], "completion": ["wait"]}, 1)
        pool.wait()
        return time.perf_counter() - began - timeout_s
    finally:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())

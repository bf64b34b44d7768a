"""Time the packers and partitioners of other projects on the same lengths; they have to be in a separate folder.

    make peers     # installs them into .peers and runs python benchmarks/peers.py --peers .peers

Frameworks that cannot be imported are named and skipped. TRL's packing moves the tokens too, which ours leaves to
the ranks.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlpack.packing import Batching, make_plan, pack, partition, warm_up_jit
from rlpack.packing.analysis.traces import trace

ROWS, CAPACITY, RANKS = 32768, 16384, 64


def main() -> None:
    """Print a line for each peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.path.append(str(arguments.peers))
    lengths = trace("lognormal", ROWS, longest=8192, seed=arguments.seed)
    warm_up_jit()
    for name, peer, ours in (
        ("TRL pack_dataset, bfd", trl_packing(lengths), lambda: pack(lengths, CAPACITY)),
        ("verl get_seqlen_balanced_partitions", verl_partition(lengths), lambda: partition(lengths, RANKS)),
        (
            "the same, equal sizes",
            verl_partition(lengths, equal=True),
            lambda: partition(lengths, RANKS, equal_size=True),
        ),
    ):
        if peer is not None:
            theirs, mine = seconds(peer, 1), seconds(ours, 5)
            print(f"{name:40}{1e3 * theirs:10.1f} ms   ours {1e3 * mine:8.2f} ms   {theirs / mine:8.1f} ×")
    plan = seconds(lambda: make_plan(lengths, Batching(max_tokens=CAPACITY), dp_size=RANKS), 5)
    print(f"{'a whole plan of ours over 64 ranks':40}{1e3 * plan:10.1f} ms")


def seconds(call: Callable[[], Any], repeat: int) -> float:
    """Return the least seconds of a call after one for warm-up."""
    call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def trl_packing(lengths: np.ndarray) -> Callable[[], Any] | None:
    """Return TRL's best-fit decreasing packing of rows of these lengths, one byte a token."""
    try:
        import pyarrow
        from datasets import Dataset, disable_progress_bars
        from trl import pack_dataset  # pyright: ignore[reportMissingImports]  # installed by hand
    except ImportError as error:
        print(f"TRL is left out: {error}")
        return None
    disable_progress_bars()
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = pyarrow.array(np.zeros(int(lengths.sum()), dtype=np.int8))
    table = pyarrow.table({"input_ids": pyarrow.LargeListArray.from_arrays(offsets, tokens)})
    return lambda: pack_dataset(Dataset(table), CAPACITY, strategy="bfd")


def verl_partition(lengths: np.ndarray, *, equal: bool = False) -> Callable[[], Any] | None:
    """Return verl's Karmarkar-Karp partition of these lengths over the ranks."""
    try:
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        print(f"verl is left out: {error}")
        return None
    given = lengths.tolist()
    return lambda: get_seqlen_balanced_partitions(given, RANKS, equal_size=equal)


if __name__ == "__main__":
    main()

"""Time policy losses over the tokens of a microbatch at once, against one sequence at a time.

    python benchmarks/losses.py [--seed 0] [--sequences 1024]

Forward and backward, one CPU thread. The loop is what peers do and what a paper's formula reads like: cut the row out,
weigh its tokens, add its loss up. Both give the same number, or this fails. A ratio below 20 ends with MISSED, and the
exit code is 1.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rlpack.algorithms.policy_loss import PolicyLoss, PolicyTokens
from rlpack.algorithms.registry import LOSSES
from rlpack.algorithms.statistics import statistics_of
from rlpack.packing.analysis.traces import trace

BAR = 20.0


def main() -> int:
    """Print one line a loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lengths = torch.from_numpy(trace("lognormal", arguments.sequences, longest=256, seed=arguments.seed))
    generator = torch.Generator().manual_seed(arguments.seed)
    columns = torch.randn(3, int(lengths.sum()), generator=generator) * 0.3
    mask = torch.rand(columns.shape[1], generator=generator) < 0.9
    print(f"{arguments.sequences} sequences, {columns.shape[1]} tokens")
    print(f"{'loss':20}{'at once, ms':>12}{'by sequence, ms':>18}{'ratio':>8}")
    missed = False
    for name, loss in LOSSES.items():
        given = _arguments(loss, columns, mask, lengths)
        together, value = best(partial(at_once, loss, columns, mask, lengths, given))
        apart, other = best(partial(by_sequence, loss, columns, mask, lengths, given), repeat=3)
        assert abs(value - other) < 1e-4 * abs(other) + 1e-6, (name, value, other)
        failed = apart / together < BAR
        missed |= failed
        note = "  MISSED" if failed else ""
        print(f"{name:20}{1e3 * together:12.2f}{1e3 * apart:18.1f}{apart / together:8.1f}{note}")
    return int(missed)


def at_once(
    loss: Callable[..., PolicyLoss], columns: Tensor, mask: Tensor, lengths: Tensor, arguments: dict[str, object]
) -> float:
    """Return the sequence mean of token means, and take its gradient."""
    new = columns[0].clone().requires_grad_(True)
    tokens = PolicyTokens(new, columns[1], columns[2], mask, lengths)
    counts = torch.zeros(lengths.shape[0]).index_add(0, tokens.rows, mask.float())
    weights = (counts > 0) / counts.clamp(min=1) / (counts > 0).sum()
    value = (loss(tokens, **arguments).token_losses * weights[tokens.rows]).sum()
    value.backward()
    return value.item()


def by_sequence(
    loss: Callable[..., PolicyLoss], columns: Tensor, mask: Tensor, lengths: Tensor, arguments: dict[str, object]
) -> float:
    """Return the same, one sequence after the other."""
    new = columns[0].clone().requires_grad_(True)
    ends = lengths.cumsum(0).tolist()
    total, counted = torch.zeros(()), 0
    for start, end in zip([0, *ends], ends, strict=False):
        here = slice(start, end)
        inside = mask[here]
        if not inside.any():
            continue
        row = PolicyTokens(new[here], columns[1, here], columns[2, here], inside, torch.tensor([end - start]))
        total = total + loss(row, **arguments).token_losses[inside].mean()
        counted += 1
    value = total / counted
    value.backward()
    return value.item()


def best(call: Callable[[], float], repeat: int = 7) -> tuple[float, float]:
    """Return the least seconds of a call after one for warm-up, and its result."""
    value, times = call(), []
    for _ in range(repeat):
        start = time.perf_counter()
        value = call()
        times.append(time.perf_counter() - start)
    return float(np.min(times)), value


def _arguments(loss: Callable[..., PolicyLoss], columns: Tensor, mask: Tensor, lengths: Tensor) -> dict[str, object]:
    """Return what a loss that looks at the whole step is given."""
    compute = statistics_of(loss)
    new, old, advantages = columns
    return {} if compute is None else {"statistics": compute(PolicyTokens(new, old, advantages, mask, lengths))}


if __name__ == "__main__":
    sys.exit(main())

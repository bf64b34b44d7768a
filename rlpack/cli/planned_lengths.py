"""The lengths that `rlpack plan` and `rlpack simulate` plan, and the line that describes them."""

import argparse
import os
from pathlib import Path

import numpy as np

from rlpack.batch.errors import DataError
from rlpack.data.length_files import read_lengths
from rlpack.packing import lower_bound
from rlpack.packing.analysis.traces import TRACES, trace
from rlpack.packing.lengths import align


def planned_lengths(arguments: argparse.Namespace) -> np.ndarray:
    """Return the lengths to plan."""
    if arguments.lengths in TRACES:
        return trace(arguments.lengths, arguments.rows, arguments.longest, seed=arguments.seed)
    path = Path(arguments.lengths)
    if arguments.record is not None:
        return np.asarray(arguments.record.lengths, dtype=np.int64)
    if not os.path.exists(path) and not path.suffix:
        raise DataError(
            f"{path} is neither a file nor a synthetic trace; give a file of lengths, a run's directory, "
            f"or one of {', '.join(TRACES)}"
        )
    return read_lengths(path, arguments.column)


def grown_lengths(arguments: argparse.Namespace, ranks: int) -> np.ndarray:
    """Return `--rows-per-rank` lengths per rank: from a longer trace, or by repeating a file's lengths."""
    count = ranks * arguments.rows_per_rank
    if arguments.lengths in TRACES:
        return trace(arguments.lengths, count, arguments.longest, seed=arguments.seed)
    return np.resize(planned_lengths(arguments), count)


def headline(lengths: np.ndarray, arguments: argparse.Namespace) -> str:
    """Return the numbers of sequences and tokens, and the fewest microbatches."""
    budget, repeated = arguments.max_tokens * arguments.data_rank.cp, ""
    aligned = align(lengths, arguments.data_rank.aligned(arguments.pad_to_multiple))
    fitting = aligned[aligned <= budget]
    over = lengths.size - fitting.size
    if arguments.prompts is not None:  # rows that share prompts are not aligned
        slots = arguments.prompts.repeated(lengths.size).least_slots(lengths, budget)
        repeated = f" ({int(fitting.sum() - slots.sum()):,} of them in repeated prompts)"
        fitting = slots
    bound = lower_bound(fitting, budget) + over
    steps = -(-lengths.size // (arguments.mini_batch_size or lengths.size))
    text = f"{lengths.size:,} sequences, {int(lengths.sum()):,} tokens{repeated}, mean {lengths.mean():,.0f}, longest "
    text += f"{int(lengths.max()):,}"
    # Only `plan` has the option, and fixed microbatches have no budget.
    has_budget = vars(arguments).get("mode") != "fixed" or arguments.compare
    if has_budget:
        text += f"; a budget of {budget:,} needs at least {bound:,} microbatch{'es' * (bound != 1)} in all"
    if steps > 1:
        text += f"; numbers are totals over all {steps:,} optimizer steps"
    if over and has_budget:
        text += (
            f"\n{over:,} sequences exceed the budget: each gets its own microbatch here; training refuses them "
            "unless batching.overlong is set"
        )
    return text

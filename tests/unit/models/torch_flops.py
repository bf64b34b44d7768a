"""PyTorch's own count of a model's floating-point operations."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def flops_by_operation(counter: FlopCounterMode) -> dict[Any, int]:
    """Return what was counted, without rotary embeddings, whose angles transformers 5.17 computes as a product."""
    by_module = counter.get_flop_counts()
    total = dict(by_module["Global"])
    for name, counts in by_module.items():
        if name.endswith("rotary_emb"):
            for operation, flops in counts.items():
                total[operation] -= flops
    return total


def total_flops(counter: FlopCounterMode) -> int:
    """Return the sum over all operations."""
    return sum(flops_by_operation(counter).values())


def flops_of_causal_model(counter: FlopCounterMode) -> float:
    """Return the sum, in which products of attention, counted for all pairs of tokens, count by half."""
    counts = flops_by_operation(counter)
    attention = counts[torch.ops.aten.bmm]
    assert attention > 0
    return sum(counts.values()) - attention / 2

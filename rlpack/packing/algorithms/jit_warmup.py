"""JIT warm-up: compile the planner ahead of time.

Compiling takes seconds on a new machine, and no training step should wait for it.
"""

import numpy as np

from rlpack.packing.analysis.cost import Cost
from rlpack.packing.analysis.traces import trace
from rlpack.packing.batching import Batching
from rlpack.packing.make_plan import make_plan


def warm_up_jit() -> None:
    """Load every compiled loop of the planner, compiling those that are not cached yet."""
    # Three of these rows fill a bin: the packers leave a gap to the bound, and LPT leaves rows to exchange.
    lengths = trace("triplets", 96, longest=64, seed=1)
    packed = Batching(max_tokens=128, algorithm="optimal", divisible_by=3)
    for batching in (packed, Batching(mode="dynamic", max_tokens=128), Batching(mode="fixed", micro_batch_size=4)):
        make_plan(lengths, batching, dp_size=4, mini_batch_size=48, cost=Cost(1.0, 0.1))
    for algorithm in ("concatenative", "first_fit_decreasing", "modified_first_fit_decreasing"):
        make_plan(np.sort(lengths), Batching(max_tokens=128, algorithm=algorithm), dp_size=2)

"""Planning from lengths alone: which rows share a microbatch, on which rank, in which optimizer step.

`make_plan` turns lengths and a `Batching` into a `MicrobatchPlan`; `assert_invariants` checks one. `pack`, `partition`
and `lower_bound` are the underlying bin packing. `algorithms` has the packers, `analysis` metrics, costs, layouts and
simulation. NumPy and Numba only: a plan is made on the driver, without tensors.
"""

from rlpack.packing.algorithms.jit_warmup import warm_up_jit
from rlpack.packing.algorithms.packers import lower_bound, pack
from rlpack.packing.algorithms.partition import partition
from rlpack.packing.analysis.cost import Cost
from rlpack.packing.analysis.invariants import assert_invariants
from rlpack.packing.analysis.metrics import PackingMetrics
from rlpack.packing.batching import Algorithm, Balance, Batching, Mode, Overlong
from rlpack.packing.errors import PackingError
from rlpack.packing.make_plan import make_plan
from rlpack.packing.plan import Microbatch, MicrobatchPlan, RankPlan

__all__ = [
    "Algorithm",
    "Balance",
    "Batching",
    "Cost",
    "Microbatch",
    "MicrobatchPlan",
    "Mode",
    "Overlong",
    "PackingError",
    "PackingMetrics",
    "RankPlan",
    "assert_invariants",
    "lower_bound",
    "make_plan",
    "pack",
    "partition",
    "warm_up_jit",
]

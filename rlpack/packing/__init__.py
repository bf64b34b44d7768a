"""Planning on lengths alone: which rows share a microbatch, on which rank, in which optimizer step."""

from rlpack.packing.batching import Algorithm, Batching, Mode, Overlong
from rlpack.packing.cost import Cost
from rlpack.packing.errors import PackingError
from rlpack.packing.metrics import PackingMetrics
from rlpack.packing.packers import lower_bound, pack
from rlpack.packing.partitioning import partition
from rlpack.packing.plan import Microbatch, MicrobatchPlan, RankPlan
from rlpack.packing.planning import make_plan
from rlpack.packing.warming import warm

__all__ = [
    "Algorithm",
    "Batching",
    "Cost",
    "Microbatch",
    "MicrobatchPlan",
    "Mode",
    "Overlong",
    "PackingError",
    "PackingMetrics",
    "RankPlan",
    "lower_bound",
    "make_plan",
    "pack",
    "partition",
    "warm",
]

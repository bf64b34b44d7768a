"""What a model eats at one time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlpack.packing.analysis.layouts import Layout

if TYPE_CHECKING:
    from rlpack.batch.batch import BatchedDataDict


@dataclass(frozen=True)
class MicrobatchView:
    """The rows of one forward and backward, and where their tokens go.

    Attributes:
        rows: the microbatch's rows; none in a filler.
        layout: slots, positions and segment bounds of the rows' tokens, in row order.
        is_dummy: takes part in forward and backward with zero weight, to keep ranks in step.
        index: positions of `rows` in the shard, int64 [n].
    """

    rows: "BatchedDataDict"
    layout: Layout
    is_dummy: bool
    index: np.ndarray

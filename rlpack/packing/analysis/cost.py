"""What a sequence costs to train on."""

import math
from dataclasses import dataclass

import numpy as np

from rlpack.packing.errors import PackingError

# The dearest row gets 2**COST_BITS ticks: precise to 1e-9, and 2**20 such rows add up exactly, also in float64.
COST_BITS = 32
# Times the square of the longest length this is still finite, and 2**20 such rows add up too.
_LARGEST = 1e280


@dataclass(frozen=True)
class Cost:
    """The work that a sequence of L slots is: `linear · L + quadratic · L²`, in any unit.

    The linear part stands for the matrix multiplications of each token, the quadratic one for attention; only their
    proportion matters to a plan.

    >>> Cost(linear=2.0, quadratic=0.5).of(np.array([1, 4]))
    array([ 2.5, 16. ])

    Raises:
        PackingError: a coefficient is no number, negative, not finite or too large, or both are zero.
    """

    linear: float
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        """Check the coefficients."""
        for name, value in (("linear", self.linear), ("quadratic", self.quadratic)):
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise PackingError(f"cost.{name} is {value!r}, of type {type(value).__name__}; give a number")
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if not 0 <= number <= _LARGEST:
                limits = f"a finite number of at least 0 and at most {_LARGEST}"
                raise PackingError(f"cost.{name} is {number}; it has to be {limits}: count in another unit")
        if self.linear == self.quadratic == 0:
            raise PackingError("cost.linear and cost.quadratic are both 0; one of them has to be above 0")

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the cost of each length, float64 of the same shape."""
        slots = np.asarray(lengths, dtype=np.float64)
        return self.linear * slots + self.quadratic * slots * slots


def integer_costs(weights: np.ndarray) -> np.ndarray:
    """Scale weights to integers by a power of two, so that their sums do not depend on the order of summing.

    The greatest becomes about 2**32; whole numbers below that stay as they are. Plans computed from ticks are the
    same on every machine.

    >>> integer_costs(np.array([1.0, 0.5, 0.0])).tolist()
    [2147483648, 1073741824, 0]
    """
    if weights.dtype.kind in "iu" and (weights.size == 0 or int(weights.max()) <= 2**COST_BITS):
        return weights.astype(np.int64)
    values = weights.astype(np.float64)
    _, exponent = np.frexp(values.max(initial=0.0))
    return np.rint(np.ldexp(values, COST_BITS - int(exponent))).astype(np.int64)


def lockstep_cost(costs: np.ndarray, ranks: int) -> int:
    """Return Σ_i max_rank cost(rank, i) of bins, int64 [K], that are dealt to the ranks in order of cost."""
    return int(np.sort(costs)[::-1][::ranks].sum())

"""Cost models of a sequence, and costs as integers.

Plans compare integer costs only, so they are the same on every machine.
"""

import math
from dataclasses import dataclass

import numpy as np

from rlpack.packing.errors import PackingError

# The costliest row costs about 2**COST_BITS: precise to 1e-9, and 2**20 such rows sum exactly, also in float64.
COST_BITS = 32
# Times the square of the longest length this is finite, and so is the sum over 2**20 such rows.
_LARGEST = 1e280


@dataclass(frozen=True)
class Cost:
    """The cost of a sequence of L slots: `linear · L + quadratic · L²`.

    The linear part models the matrix multiplications of each token, the quadratic part attention. A plan depends only
    on their ratio.

    >>> Cost(linear=2.0, quadratic=0.5).of(np.array([1, 4]))
    array([ 2.5, 16. ])

    Raises:
        PackingError: a coefficient is negative, not finite, too large or not a number, or both are zero.
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
                raise PackingError(f"cost.{name} is {number}; it has to be {limits}: use another unit")
        if self.linear == self.quadratic == 0:
            raise PackingError("cost.linear and cost.quadratic are both 0; one of them has to be above 0")

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the cost of each length, float64 of the same shape."""
        slots = np.asarray(lengths, dtype=np.float64)
        return self.linear * slots + self.quadratic * slots * slots

    def of_rest(self, lengths: np.ndarray, shared: np.ndarray | None) -> np.ndarray:
        """Return the cost of each row's tokens after its first `shared`, which they still attend to, float64 [B]."""
        return self.of(lengths) if shared is None else self.of(lengths) - self.of(shared)


def integer_costs(weights: np.ndarray) -> np.ndarray:
    """Scale weights to integers by a power of two, so that sums do not depend on the order of summation.

    The largest weight becomes about 2**32; integer weights up to that stay unchanged.

    >>> integer_costs(np.array([1.0, 0.5, 0.0])).tolist()
    [2147483648, 1073741824, 0]
    """
    if weights.dtype.kind in "iu" and (weights.size == 0 or int(weights.max()) <= 2**COST_BITS):
        return weights.astype(np.int64)
    values = weights.astype(np.float64)
    _, exponent = np.frexp(values.max(initial=0.0))
    return np.rint(np.ldexp(values, COST_BITS - int(exponent))).astype(np.int64)


def lockstep_cost(costs: np.ndarray, ranks: int) -> int:
    """Return Σ_i max_rank cost(rank, i) of bins whose `costs`, int64 [K], are dealt in decreasing order."""
    return int(np.sort(costs)[::-1][::ranks].sum())

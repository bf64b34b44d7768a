"""Calibration: fit the cost model to the measured steps of a run.

The step time is a sum of seconds per slot, per squared slot and per microbatch, fitted by non-negative least squares.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rlpack.packing.analysis.cost import Cost
from rlpack.packing.analysis.simulation import FORWARD_AND_BACKWARD
from rlpack.packing.errors import PackingError

_MIN_STEPS = 8


@dataclass(frozen=True)
class Calibration:
    """Coefficients of the step time.

    Attributes:
        slot_s: seconds per slot, forward and backward.
        square_s: seconds per squared slot, for attention.
        microbatch_s: fixed seconds per microbatch.
        explained: share of the variance of the step times that the fit explains (R²), at most 1.
    """

    slot_s: float
    square_s: float
    microbatch_s: float
    explained: float

    @property
    def cost(self) -> Cost:
        """Cost of a sequence's forward pass in seconds, for a `Device` of speed 1."""
        return Cost(self.slot_s / FORWARD_AND_BACKWARD, self.square_s / FORWARD_AND_BACKWARD)


def calibrate(steps: np.ndarray) -> Calibration:
    """Return the non-negative coefficients that fit the step times best.

    >>> steps = [[n, n * m, 1, 0.5 * n + 0.25 * n * m + 2] for n, m in zip(range(1, 10), [3, 1, 2] * 3)]
    >>> calibration = calibrate(np.array(steps, dtype=float))
    >>> calibration.slot_s, calibration.square_s, calibration.microbatch_s
    (0.5, 0.25, 2.0)

    Args:
        steps: critical slots, critical squares, microbatches per rank and seconds of each step, float64 [S, 4].

    Raises:
        PackingError: there are too few steps, or their times don't grow with their slots.
    """
    if len(steps) < _MIN_STEPS:
        raise PackingError(f"calibration has {len(steps)} steps with times; it needs at least {_MIN_STEPS}")
    terms, seconds = steps[:, :3], steps[:, 3]
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-300)
    best, lowest = np.zeros(3), np.inf
    # Non-negative least squares: with three coefficients, every subset of positive ones can be tried.
    for size in (1, 2, 3):
        for chosen in map(list, combinations(range(3), size)):
            solution = np.linalg.lstsq(terms[:, chosen] / scale[chosen], seconds, rcond=None)[0]
            error = float(np.square(terms[:, chosen] / scale[chosen] @ solution - seconds).sum())
            if (solution >= 0).all() and error < lowest * (1 - 1e-9):
                best, lowest = np.zeros(3), error
                best[chosen] = solution
    # A term of less than a billionth of the longest step is rounding error.
    coefficients = [float(f"{value:.12g}") for value in np.where(best > 1e-9 * seconds.max(), best / scale, 0.0)]
    if not any(coefficients[:2]):
        raise PackingError("step times don't grow with their slots; use a run whose steps differ more in length")
    spread = float(np.square(seconds - seconds.mean()).sum())
    return Calibration(*coefficients, explained=1.0 - lowest / spread if spread else 1.0)

"""Fit the cost model to the steps of a run: seconds a slot, a squared slot and a microbatch."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rlpack.packing.analysis.cost import Cost
from rlpack.packing.analysis.simulation import FORWARD_AND_BACKWARD
from rlpack.packing.errors import PackingError

_FEWEST_STEPS = 8


@dataclass(frozen=True)
class Calibration:
    """What a step's time is made of.

    Attributes:
        slot_s: seconds of a slot, forward and backward.
        square_s: seconds of a squared slot, for attention.
        microbatch_s: seconds of a microbatch, whatever it holds.
        explained: share of the variance of the step times that these explain, at most 1.
    """

    slot_s: float
    square_s: float
    microbatch_s: float
    explained: float

    @property
    def cost(self) -> Cost:
        """Return the cost of a sequence's forward pass in seconds, for a `Device` of speed 1."""
        return Cost(self.slot_s / FORWARD_AND_BACKWARD, self.square_s / FORWARD_AND_BACKWARD)


def calibrate(steps: np.ndarray) -> Calibration:
    """Return the coefficients, none negative, under which the steps took most nearly as long as they did.

    >>> steps = [[n, n * m, 1, 0.5 * n + 0.25 * n * m + 2] for n, m in zip(range(1, 10), [3, 1, 2] * 3)]
    >>> found = calibrate(np.array(steps, dtype=float))
    >>> found.slot_s, found.square_s, found.microbatch_s
    (0.5, 0.25, 2.0)

    Args:
        steps: for each step its critical slots, critical squares, microbatches of a rank and seconds, f64 [S, 4].

    Raises:
        PackingError: there are too few steps, or their times don't grow with what they computed.
    """
    if len(steps) < _FEWEST_STEPS:
        raise PackingError(f"there are {len(steps)} steps with times to fit; a fit needs at least {_FEWEST_STEPS}")
    terms, seconds = steps[:, :3], steps[:, 3]
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-300)
    best, least = np.zeros(3), np.inf
    # Least squares without negative coefficients: with three of them, each choice of those above zero can be tried.
    for size in (1, 2, 3):
        for chosen in map(list, combinations(range(3), size)):
            found = np.linalg.lstsq(terms[:, chosen] / scale[chosen], seconds, rcond=None)[0]
            missed = float(np.square(terms[:, chosen] / scale[chosen] @ found - seconds).sum())
            if (found >= 0).all() and missed < least * (1 - 1e-9):
                best, least = np.zeros(3), missed
                best[chosen] = found
    # What explains less than a billionth of the longest step is rounding.
    coefficients = [float(f"{value:.12g}") for value in np.where(best > 1e-9 * seconds.max(), best / scale, 0.0)]
    if not any(coefficients[:2]):
        raise PackingError("the steps' times don't grow with their slots; fit a run whose steps differ more in length")
    spread = float(np.square(seconds - seconds.mean()).sum())
    return Calibration(*coefficients, explained=1.0 - least / spread if spread else 1.0)

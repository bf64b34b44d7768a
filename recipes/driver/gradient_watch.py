"""GradientWatch: gradients that are NaN or infinite are a warning; if they stay so, the run ends.

A rank skips an optimizer step whose gradient isn't finite, so the weights stay as they are. A run that skips all of its
steps from some point on would otherwise finish successfully, with a model that stopped learning at that point.
"""

import logging

from rlpack.recipes.driver.step_context import StepContext

logger = logging.getLogger(__name__)

# This many steps in a row that lose all of their updates end the run.
MOST_LOST = 10
_ADVICE = (
    "lower its optimizer's learning_rate, set its precision=fp32, or look for rewards and advantages that are too large"
)


class NonFiniteGradientError(RuntimeError):
    """The gradients of a role have been NaN or infinite for many steps."""


class GradientWatch:
    """Counts the steps in a row that lost all updates of a role."""

    def __init__(self) -> None:
        """Start without steps."""
        self._lost: dict[str, int] = {}
        self._warned: set[str] = set()

    def check(self, step: StepContext) -> None:
        """Warn once per role about updates that were skipped because the gradient wasn't finite.

        Raises:
            NonFiniteGradientError: a role has lost all updates of `MOST_LOST` steps in a row.
        """
        for role, (lost, total) in step.nonfinite_updates.items():
            self._lost[role] = self._lost.get(role, 0) + 1 if lost == total else 0
            if lost and role not in self._warned:
                self._warned.add(role)
                logger.warning(
                    "step %d: the gradient of the %s was NaN or infinite in %d of %d optimizer steps, which were "
                    "skipped; %s. Later steps don't repeat this.",
                    *(step.number, role, lost, total, _ADVICE),
                )
            if self._lost[role] >= MOST_LOST:
                raise NonFiniteGradientError(
                    f"step {step.number} of {step.progress.phase}: the gradient of the {role} has been NaN or infinite "
                    f"in all optimizer steps of the last {MOST_LOST} steps, so its weights no longer change; {_ADVICE}"
                    ". Then resume from the newest checkpoint"
                )

"""GradientWatch: warn about lost updates, and end the run if they persist.

A rank skips an optimizer step whose gradient isn't finite, so the weights stay as they are. An off-policy correction
that excludes every token leaves no gradient of the policy loss. A run that loses all of its updates from some point on
would otherwise finish successfully, with a model that stopped learning at that point.
"""

import logging

from rlpack.recipes.driver.step_context import StepContext

logger = logging.getLogger(__name__)

# This many steps in a row that lose all of their updates end the run.
MOST_LOST = 10
_ADVICE = (
    "lower its optimizer's learning_rate, set its precision=fp32, or look for rewards and advantages that are too large"
)
_WIDER = "widen its limits, or choose criteria that don't grow with the length of responses (seq_mean_* for seq_sum_*)"


class NothingTrainedError(RuntimeError):
    """The off-policy correction has excluded every token for many steps."""


class NonFiniteGradientError(RuntimeError):
    """The gradients of a role have been NaN or infinite for many steps."""


class GradientWatch:
    """Counts the steps in a row that lost all updates of a role, or whose tokens were all excluded."""

    def __init__(self) -> None:
        """Start without steps."""
        self._lost: dict[str, int] = {}
        self._excluded = 0
        self._warned: set[str] = set()

    def check(self, step: StepContext) -> None:
        """Warn once of a correction that excludes all tokens, and once per role of gradients that aren't finite.

        Raises:
            NothingTrainedError: every token of `MOST_LOST` steps in a row was excluded.
            NonFiniteGradientError: a role has lost all updates of `MOST_LOST` steps in a row.
        """
        self._check_excluded(step)
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

    def _check_excluded(self, step: StepContext) -> None:
        key = step.excluded_by
        self._excluded = 0 if key is None else self._excluded + 1
        if key is not None and key not in self._warned:
            self._warned.add(key)
            logger.warning(
                "step %d: %s excluded every token of the batch, so the policy loss has no gradient; %s. Later steps "
                "don't repeat this.",
                *(step.number, key, _WIDER),
            )
        if self._excluded >= MOST_LOST:
            raise NothingTrainedError(
                f"step {step.number} of {step.progress.phase}: {key} has excluded every token of the last {MOST_LOST} "
                f"steps, so the policy isn't trained; {_WIDER}. Then resume from the newest checkpoint"
            )

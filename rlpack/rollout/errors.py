"""The errors of generation."""

from collections.abc import Iterator
from contextlib import contextmanager


class SamplingError(ValueError):
    """An invalid sampling parameter or prompt; the message names it, its value and what is allowed."""


class EngineError(RuntimeError):
    """An engine returned invalid values, or received weights that do not fit.

    Attributes:
        policy_version: version of the weights that the engine had, or was to get; None if the error is about neither.
    """

    def __init__(self, *args: object, policy_version: int | None = None) -> None:
        super().__init__(*args)
        self.policy_version = policy_version

    @classmethod
    @contextmanager
    def at_version(cls, version: int) -> Iterator[None]:
        """Set `policy_version` of an error that leaves the block, unless it has one."""
        try:
            yield
        except cls as error:
            if error.policy_version is None:
                error.policy_version = version
            raise


class CanaryError(EngineError):
    """An engine's log-probs of a fixed prompt differ from the trainer's after a load."""


class LogprobGapError(EngineError):
    """The trainer's and the sampler's log-probs of the same responses differ by far more than rounding."""


class MismatchError(EngineError):
    """The trainer's policy and the one that sampled are further apart than a limit of `algorithm.correction` allows."""


class StalenessError(EngineError):
    """A token was sampled by an older policy version than the run allows."""


class EngineDeadlineError(EngineError):
    """An engine's process did not answer in time; it is treated as dead."""


class BucketError(EngineError):
    """A bucket of weights was not loaded; engines that load in the background raise this in a later call.

    Attributes:
        index: index of the bucket in its update, from 0.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message, index)
        self.index = index

    def __str__(self) -> str:
        return self.args[0]

"""The errors of generation."""


class SamplingError(ValueError):
    """An invalid sampling parameter or prompt; the message names it, its value and what is allowed."""


class EngineError(RuntimeError):
    """An engine returned invalid values, or received weights that do not fit."""


class CanaryError(EngineError):
    """An engine's log-probs of a fixed prompt differ from the trainer's after a load."""


class LogprobGapError(EngineError):
    """The trainer's and the sampler's log-probs of the same responses differ by far more than rounding."""

"""The errors of generation."""


class SamplingError(ValueError):
    """A sampling parameter or a prompt that can't be used; the text names it, what was found and the way out."""


class EngineError(RuntimeError):
    """An engine gave what it must not give, or was handed weights that don't fit."""

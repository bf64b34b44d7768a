"""The errors of `rlpack.models`."""


class ModelError(ValueError):
    """An invalid model setting: a path, a config key, or an unsupported kind of model."""


class IsolationError(RuntimeError):
    """A model whose packed sequences are not independent of each other."""
